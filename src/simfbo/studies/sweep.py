"""Many runs side by side, each in a worker process; a run that has ended is not repeated.

Light on purpose: JAX is imported in the workers only.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simfbo.config.run import RunConfig, checked
from simfbo.errors import UserError
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.runs.interrupts import TO_GROUPS, TO_PROCESSES, Interrupts, held_back, install
from simfbo.runs.trackers.tracking import Nested, Tracking

if TYPE_CHECKING:
    from simfbo.tasks import Task

OnProgress = Callable[[int, int], None]
_LEAVE = 10.0  # seconds that a worker may take to end by itself
_TERMINATED = 143  # the exit code of a worker that saved first
_RESUME = "Rerun with --resume to continue from the last checkpoints."
ENDED = ("finished", "diverged")  # such a run is not resumed
_SPAWN = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork


class Job(NamedTuple):
    """One run: its settings, the folder of its history, and how it is tracked."""

    config: RunConfig
    directory: Path
    nested: Nested | None = None


def sweep(
    jobs: Sequence[Job],
    workers: int = 1,
    data_dir: Path | None = None,
    on_progress: OnProgress | None = None,
    tracking: Tracking | None = None,
) -> list[History]:
    """Run the jobs that have not ended yet, and return the histories of all.

    Called again after an interruption it resumes: runs that had finished or diverged are kept,
    others continue from their last checkpoints.

    Args:
        jobs: the runs, each with a folder of its own.
        workers: processes side by side; a run keeps about two cores busy.
        data_dir: folder of the data sets.
        on_progress: called with the iterations done and the iterations in all.
        tracking: the trackers of the study that the jobs belong to.

    Returns:
        A history per job, in the same order.
    """
    nested = None if tracking is None else tracking.nested
    waiting = [job._replace(nested=nested) for job in jobs if _ended(job) is None]
    if waiting:
        _run_all(waiting, min(workers, len(waiting)), data_dir, lambda: _report(jobs, on_progress))
    _report(jobs, on_progress)
    return [History.load(job.directory) for job in jobs]


def refuse_other_settings(jobs: Sequence[Job]) -> None:
    """Raise if a run with other settings is in the folder of a job."""
    for job in jobs:
        _ended(job)


def _ended(job: Job) -> History | None:
    """Return the history of a job that has ended; None where it must (still) be run."""
    history = _load(job)
    if history is None:
        return None
    if history.header["config"] != job.config.model_dump(mode="json"):
        raise UserError(
            f"{job.directory} holds a run with other settings: choose another output folder."
        )
    return history if (history.end or {}).get("status") in ENDED else None


def _load(job: Job) -> History | None:
    """Return what there is of a job's history; None before its first line is whole."""
    try:
        return History.load(job.directory)
    except (UserError, OSError):
        return None


def _run_all(
    jobs: Sequence[Job], workers: int, data_dir: Path | None, report: Callable[[], None]
) -> None:
    """Run the jobs in worker processes; none is left behind, however this ends."""
    todo, done = _SPAWN.Queue(), _SPAWN.Queue()
    for job in jobs:
        # As JSON: settings derived from a signature have a class that cannot be pickled.
        todo.put((job.config.model_dump(mode="json"), job.directory, job.nested))
    for _ in range(workers):
        todo.put(None)
    processes: list[Any] = []
    try:
        for _ in range(workers):
            with held_back():
                processes.append(_started_worker(todo, done, data_dir))
        for _ in jobs:
            _await_one(processes, done, report)
        for process in processes:
            process.join(_LEAVE)  # they have nothing left to do
    finally:
        with held_back():
            for process in processes:
                process.terminate()
                process.join()


def _started_worker(todo: Any, done: Any, data_dir: Path | None) -> Any:
    """Start a worker, which never sees Ctrl-C and the like: these are the parent's to answer."""
    process = _SPAWN.Process(target=_work, args=(todo, done, data_dir), daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TO_GROUPS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _await_one(processes: Sequence[Any], done: Any, report: Callable[[], None]) -> None:
    """Wait until another job has ended; raise what went wrong in it."""
    while True:
        try:
            wrong = done.get(timeout=0.5)
            break
        except queue.Empty:
            report()
        codes = [process.exitcode for process in processes if process.exitcode]
        if _TERMINATED in codes:
            raise UserError(f"A worker process was terminated. {_RESUME}")
        if codes and codes[0] < 0:
            raise UserError(
                f"A worker process was killed by signal {-codes[0]}, possibly out of memory: try "
                f"--jobs 1. {_RESUME}"
            )
        if codes:
            raise UserError(
                "A worker process could not start, see its message above. A script that calls "
                'this needs `if __name__ == "__main__":` around the call.'
            )
    if wrong is not None:
        raise wrong


def _work(todo: Any, done: Any, data_dir: Path | None) -> None:
    """Run jobs until there are no more; the body of a worker process."""
    with contextlib.suppress(KeyboardInterrupt):
        install(Interrupts(), *TO_PROCESSES)
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
        from simfbo.runs.files import keep_compilations

        keep_compilations()
        for sent in iter(todo.get, None):
            if not _do(*sent, done=done, data_dir=data_dir):
                break
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # on its way out already
            return
    sys.exit(_TERMINATED)


def _do(
    config: Json, directory: Path, nested: Nested | None, *, done: Any, data_dir: Path | None
) -> bool:
    """Run one job and report how it went; return whether there is time for another."""

    def show(message: object, *rest: object) -> None:
        print(f"simfbo: {directory.name}: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = show
    try:
        history = run_job(Job(checked(config, {}), directory, nested), data_dir)
        if (history.end or {}).get("status") == "interrupted":
            return False
        done.put(None)
    except UserError as error:
        done.put(error)
    except Exception as error:
        done.put(RuntimeError(f"{directory}: {type(error).__name__}: {error}"))
    return True


def _end_with_the_parent() -> None:
    """Terminate this worker when its parent process is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_job(job: Job, data_dir: Path | None = None) -> History:
    """Run one job in this process, from its last checkpoint if it has one."""
    from simfbo.config.build import build, run_built

    built = build(job.config, _task(job.config, data_dir))
    track, study = job.nested or (None, None)
    with Tracking(track, job.directory, study) as tracking:
        return run_built(built, job.directory, resume=True, track=tracking)


_KEPT: "dict[tuple[str, Path | None], Task]" = {}  # the last task built


def _task(config: RunConfig, data_dir: Path | None) -> "Task":
    """Return the task of a configuration; it is kept for the next job."""
    from simfbo.config.build_task import build_task

    key = config.model_dump_json(include={"task", "seed"}), data_dir
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = build_task(config, data_dir)
    return _KEPT[key]


def _report(jobs: Sequence[Job], on_progress: OnProgress | None) -> None:
    """Report how many iterations are done, from the histories."""
    if on_progress is not None:
        on_progress(sum(map(_progress, jobs)), sum(job.config.rounds for job in jobs))


def _progress(job: Job) -> int:
    """Return how many iterations of a job are done; all, once it has ended."""
    history = _load(job)
    if history is None:
        return 0
    if (history.end or {}).get("status") in ENDED:
        return job.config.rounds
    return history.records[-1]["round"] if history.records else 0
