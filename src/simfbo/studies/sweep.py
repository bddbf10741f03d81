"""Many runs in parallel worker processes; completed runs are not repeated.

Only the workers import JAX.
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
_LEAVE = 10.0  # seconds that a worker has to exit
_TERMINATED = 143  # the exit code of a worker that was terminated and has saved
_RESUME = "Rerun with --resume to continue from the last checkpoints."
ENDED = ("finished", "diverged")  # statuses of runs that are not resumed
_SPAWN = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork


class Job(NamedTuple):
    """One run: its settings, its folder, and its tracking."""

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

    A repeated call resumes an interrupted sweep: completed and diverged runs are kept, others
    continue from their last checkpoints.

    Args:
        jobs: the runs, each with a folder of its own.
        workers: parallel processes; a run keeps about two cores busy.
        data_dir: folder of the data sets.
        on_progress: called with the completed and the total number of iterations.
        tracking: the trackers of the study.

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
    """Raise if a job's folder holds a run with other settings."""
    for job in jobs:
        _ended(job)


def _ended(job: Job) -> History | None:
    """Return the history of a job that has ended; None if it has not."""
    history = _load(job)
    if history is None:
        return None
    if history.header["config"] != job.config.model_dump(mode="json"):
        raise UserError(
            f"{job.directory} holds a run with other settings: choose another output folder."
        )
    return history if (history.end or {}).get("status") in ENDED else None


def _load(job: Job) -> History | None:
    """Read a job's history; None before its first line is complete."""
    try:
        return History.load(job.directory)
    except (UserError, OSError):
        return None


def _run_all(
    jobs: Sequence[Job], workers: int, data_dir: Path | None, report: Callable[[], None]
) -> None:
    """Run the jobs in worker processes, which are all terminated at the end."""
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
            _await_job(processes, done, report)
        for process in processes:
            process.join(_LEAVE)
    finally:
        with held_back():
            for process in processes:
                process.terminate()
                process.join()


def _started_worker(todo: Any, done: Any, data_dir: Path | None) -> Any:
    """Start a worker that ignores Ctrl-C and the like, which the parent handles."""
    process = _SPAWN.Process(target=_work, args=(todo, done, data_dir), daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TO_GROUPS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _await_job(processes: Sequence[Any], done: Any, report: Callable[[], None]) -> None:
    """Wait until another job has ended; raise its error."""
    while True:
        try:
            error = done.get(timeout=0.5)
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
    if error is not None:
        raise error


def _work(todo: Any, done: Any, data_dir: Path | None) -> None:
    """Run jobs until none are left; the body of a worker process."""
    with contextlib.suppress(KeyboardInterrupt):
        install(Interrupts(), *TO_PROCESSES)
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
        from simfbo.runs.files import keep_compilations

        keep_compilations()
        for job in iter(todo.get, None):
            if not _run_and_report(*job, done=done, data_dir=data_dir):
                break
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it exits anyway
            return
    sys.exit(_TERMINATED)


def _run_and_report(
    config: Json, directory: Path, nested: Nested | None, *, done: Any, data_dir: Path | None
) -> bool:
    """Run one job and report its outcome; return False if it was interrupted."""

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
    """Exit when the parent process has ended."""
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


_CACHE: "dict[tuple[str, Path | None], Task]" = {}  # the last task built


def _task(config: RunConfig, data_dir: Path | None) -> "Task":
    """Build the task of a configuration; the last one is cached."""
    from simfbo.config.build_task import build_task

    key = config.model_dump_json(include={"task", "seed"}), data_dir
    if key not in _CACHE:
        _CACHE.clear()
        _CACHE[key] = build_task(config, data_dir)
    return _CACHE[key]


def _report(jobs: Sequence[Job], on_progress: OnProgress | None) -> None:
    """Report the number of completed iterations, from the histories."""
    if on_progress is not None:
        on_progress(sum(map(_progress, jobs)), sum(job.config.rounds for job in jobs))


def _progress(job: Job) -> int:
    """Return the number of completed iterations of a job; all if it has ended."""
    history = _load(job)
    if history is None:
        return 0
    if (history.end or {}).get("status") in ENDED:
        return job.config.rounds
    return history.records[-1]["round"] if history.records else 0
