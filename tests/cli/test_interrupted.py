"""Ctrl-C and SIGTERM during `simfbo run`: what is written, and how the run is resumed."""

import signal
from pathlib import Path

import numpy as np
import pytest

from simfbo.config import build, build_task
from simfbo.runs import report
from simfbo.runs.history import History

FILES = {"history.jsonl", "figure.png", "figure.svg", "report.html", "card.md", "summary.txt",
         "variables.npz"}  # fmt: skip
RUN = ("run", "quadratic", "--clients", "3", "--cohort", "3", "--rounds", "3", "--every", "1")


def files(directory: Path) -> set[str]:
    """Return the names of a folder's files but its checkpoints."""
    return {path.name for path in directory.iterdir() if not path.name.startswith("checkpoint-")}


def test_interrupted(simfbo, monkeypatch):
    watched = build.run_built

    def interrupted(built, directory, on_round, **how):
        def stop(t, record):
            on_round(t, record)
            if t == 1:
                raise KeyboardInterrupt

        return watched(built, directory, stop, **how)

    monkeypatch.setattr(build, "run_built", interrupted)
    code, _, err = simfbo(*RUN, "--output", "it")
    assert (code, err) == (130, "simfbo: resume with: simfbo run --resume it\n")
    history = History.load("it")
    assert history.end == {"status": "interrupted"}
    assert history.column("round") == [0, 1]
    assert files(Path("it")) == FILES
    assert "interrupted after 1 of 3 iterations." in Path("it/summary.txt").read_text()
    assert Path("it/checkpoint-0000000001.npz").exists()
    monkeypatch.setattr(build, "run_built", watched)
    code, out, err = simfbo("run", "--resume", "it", "--quiet")
    assert (code, err) == (0, "")
    assert "finished after 3 of 3 iterations." in out
    assert simfbo(*RUN, "--output", "whole")[0] == 0
    states = [np.load(Path(name) / "checkpoint-0000000003.npz") for name in ("it", "whole")]
    for name in states[0].files:
        if name != "manifest":
            np.testing.assert_array_equal(states[0][name], states[1][name])
    assert same_but_clocks("it", "whole")
    code, out, err = simfbo("run", "--resume", "it")
    assert (code, err) == (0, "")
    assert out == "it has finished: nothing left to do.\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU])
def test_a_closed_terminal_and_batch_systems(simfbo, monkeypatch, number):
    watched = build.run_built

    def signalled(built, directory, on_round, **how):
        def stop(t, record):
            on_round(t, record)
            if t == 1:
                signal.raise_signal(number)

        return watched(built, directory, stop, **how)

    monkeypatch.setattr(build, "run_built", signalled)
    monkeypatch.setattr(report, "save", lambda histories, directory: [])
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert simfbo(*RUN, "--output", "it")[0] == 130
        assert History.load("it").column("round") == [0, 1]
        assert Path("it/checkpoint-0000000001.npz").exists()
        signal.signal(number, signal.SIG_IGN)  # as under nohup: then it stays ignored
        assert simfbo(*RUN, "--output", "other")[0] == 0
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def same_but_clocks(a, b):
    """Return whether two histories agree in all but what the clock says."""
    clocks = ("seconds", "cpu_seconds")
    first, second = History.load(a), History.load(b)
    return (
        all(
            {k: v for k, v in r.items() if k not in clocks}
            == {k: v for k, v in s.items() if k not in clocks}
            for r, s in zip(first.records, second.records, strict=True)
        )
        and first.end == second.end
    )


def test_interrupted_before_the_first_evaluation(simfbo, monkeypatch):
    def evaluate(state):
        raise KeyboardInterrupt

    plain = build_task.build_task
    monkeypatch.setattr(
        build_task, "build_task", lambda *given: plain(*given)._replace(evaluate=evaluate)
    )
    code, out, err = simfbo(*RUN, "--output", "it")
    assert (code, err) == (130, "simfbo: resume with: simfbo run --resume it\n")
    assert "The run ended before its first evaluation." in out
    assert History.load("it").end == {"status": "interrupted"}
    assert History.load("it").records == []


def test_interrupted_elsewhere(simfbo, monkeypatch):
    def stopped(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(build_task, "build_task", stopped)
    assert simfbo(*RUN) == (130, "", "simfbo: interrupted.\n")


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_real_signal(start, tmp_path, how):
    arguments = ("run", "quadratic", "--rounds", "9999999", "--every", "50", "--output", "it",
                 "--quiet", "--set", "task.clients=2")  # fmt: skip
    process = start("import sys; from simfbo.cli.main import main; sys.exit(main())", *arguments)
    file = tmp_path / "it" / "history.jsonl"
    process.wait_until(lambda: file.exists() and file.read_text().count("\n") > 3)
    process.send_signal(how)
    out, err = process.outcome()
    said = [line for line in err.splitlines() if not line.startswith("Matplotlib is building")]
    assert (process.returncode, said) == (130, ["simfbo: resume with: simfbo run --resume it"])
    assert ": interrupted after " in out
    history = History.load(tmp_path / "it")
    assert history.end == {"status": "interrupted"}
    *before, last = history.column("round")  # every 50 rounds, and where the signal arrived
    assert before == list(range(0, 50 * len(before), 50))
    assert last > 50 * (len(before) - 1)
    assert files(tmp_path / "it") == FILES
