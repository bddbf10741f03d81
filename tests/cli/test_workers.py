"""The worker processes of `simfbo compare`, `tune` and `reproduce`: how they start and end."""

import os
import pickle
import queue
import signal
import subprocess
from types import SimpleNamespace

import pytest

from simfbo.config.run import load
from simfbo.errors import ResumableError, UserError
from simfbo.runs.history import History
from simfbo.studies import sweep

JOB = {"task.name": "quadratic", "task.clients": 2, "rounds": 2}


@pytest.fixture
def endless(start, tmp_path):
    """Return a comparison without end, and its history's file."""
    arguments = ("compare", "quadratic", "--methods", "simfbo", "--seeds", "1", "--rounds",
                 "9999999", "--every", "50", "--output", "it", "--clients", "2",
                 "--cohort", "2", "--quiet")  # fmt: skip
    process = start("import sys; from simfbo.cli.main import main; sys.exit(main())", *arguments)
    file = tmp_path / "it" / "simfbo-seed0" / "history.jsonl"
    process.wait_until(lambda: file.exists() and file.read_text().count("\n") > 3)
    return process, file


def workers(pid):
    """Return the workers that a process has started."""
    found = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,command="], capture_output=True,
                           text=True, check=True).stdout  # fmt: skip
    lines = [line.split(maxsplit=2) for line in found.splitlines() if "spawn_main" in line]
    return [int(own) for own, parent, _ in lines if parent == str(pid)]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("politely", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_nothing_behind_and_says_how_to_resume(endless, politely):
    process, file = endless
    (worker,) = workers(process.pid)
    if politely:
        process.terminate()  # as a service manager does, to the parent alone
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the workers too
    _, err = process.outcome()
    assert process.returncode == 130
    assert err == "simfbo: interrupted. Resume with: simfbo compare --resume it\n"
    assert not is_alive(worker)
    last = int(max(file.parent.glob("checkpoint-*")).stem.removeprefix("checkpoint-"))
    assert last >= max(History.load(file).column("round")) - 50  # saved before it ended


ENDED = {
    signal.SIGKILL: "A worker process was killed by signal 9, possibly out of memory: try --jobs "
    "1. Rerun with --resume to continue from the last checkpoints.",
    signal.SIGTERM: "A worker process was terminated. Rerun with --resume to continue from the "
    "last checkpoints.",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDED)
def test_a_worker_that_is_killed_is_one_sentence(endless, how):
    process, _ = endless
    (worker,) = workers(process.pid)
    os.kill(worker, how)
    _, err = process.outcome()
    assert (process.returncode, err) == (2, f"simfbo: {ENDED[how]}\n")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (-9, ENDED[signal.SIGKILL]),
        (143, ENDED[signal.SIGTERM]),
        (1, "A worker process could not start, see its message above. A script that calls this "
            'needs `if __name__ == "__main__":` around the call.'),
    ],
)  # fmt: skip
def test_what_an_exit_code_says(code, sentence):
    reports = []

    def get(timeout):
        raise queue.Empty

    processes = [SimpleNamespace(exitcode=None), SimpleNamespace(exitcode=code)]
    with pytest.raises(UserError) as caught:
        sweep._await_job(processes, SimpleNamespace(get=get), lambda: reports.append(1))
    assert str(caught.value) == sentence
    assert reports == [1]


def test_what_went_wrong_in_a_worker_is_raised():
    done = queue.Queue()
    done.put(UserError("Stop."))
    done.put(None)
    with pytest.raises(UserError, match=r"^Stop\.$"):
        sweep._await_job([], done, lambda: None)
    sweep._await_job([], done, lambda: None)
    assert done.empty()


def test_a_worker_ends_with_its_parent(start, tmp_path):
    """However the parent ends: here it is killed, and the child does nothing but wait for that."""
    (tmp_path / "family.py").write_text(
        "import multiprocessing, pathlib, time\n"
        "from simfbo.studies.sweep import _end_with_the_parent\n"
        "def child():\n"
        "    pathlib.Path('born').touch()\n"
        "    _end_with_the_parent()\n"
        "def parent():\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    process = start("import family; family.parent()")
    process.wait_until((tmp_path / "born").exists)
    process.kill()
    process.outcome()  # the child holds the pipes open as long as it lives
    assert process.returncode == -9


def results(config, folder):
    """Return what a worker puts into its queue for a job, and whether it takes another one."""
    done = queue.Queue()
    more = sweep._run_and_report(
        config.model_dump(mode="json"), folder, None, done=done, data_dir=None
    )
    return [done.get() for _ in range(done.qsize())], more


def test_what_a_worker_reports(tmp_path, monkeypatch):
    good = load(None, JOB)
    assert results(good, tmp_path / "good") == ([None], True)
    assert History.load(tmp_path / "good").end == {"status": "finished"}
    (wrong,), more = results(load(None, JOB | {"sampling.size": 3}), tmp_path / "wrong")
    assert str(wrong) == "A cohort of 3 cannot be drawn from 2 clients: lower it."
    assert isinstance(wrong, UserError)
    assert more

    def fail(*given):
        raise KeyError("x")

    def stop(*given):
        return History({}, [], {"status": "interrupted"})

    monkeypatch.setattr(sweep, "run_job", fail)
    (wrong,), more = results(good, tmp_path / "bad")
    assert str(wrong) == f"{tmp_path / 'bad'}: KeyError: 'x'"
    assert more
    monkeypatch.setattr(sweep, "run_job", stop)
    assert results(good, tmp_path / "stopped") == ([], False)


def test_a_worker_never_sees_ctrl_c(monkeypatch):
    """Not even while it starts: it inherits that the signal is blocked."""
    seen = []

    class Process:
        def __init__(self, **given):
            pass

        def start(self):
            seen.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

    monkeypatch.setattr(sweep._SPAWN, "Process", Process, raising=False)
    sweep._started_worker(None, None, None)
    assert seen == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_errors_travel_between_processes():
    for error in (UserError("Stop."), ResumableError("Full disk: make room and", "it")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
