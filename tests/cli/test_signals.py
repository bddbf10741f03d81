"""SIGTERM and Ctrl-C at any moment: one sentence, exit code 130, and nothing is lost."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import simfbo
from simfbo.config import build_task
from simfbo.runs import report
from simfbo.runs.interrupts import Interrupts

OURS = tuple(str(Path(simfbo.__file__).parent / room) + os.sep for room in ("cli", "runs"))
RUN = ("run", "quadratic", "--clients", "2", "--cohort", "2", "--rounds", "3", "--every", "1",
       "--checkpoint-seconds", "0", "--quiet")  # fmt: skip
CLOCKS = ("seconds", "cpu_seconds", "crc32")


class Signals:
    """Sends signals at chosen lines of the command line and the runner, counted as they run."""

    def __init__(self, *places):
        self.lines, self._places = 0, places

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)

    def call(self, frame, event, argument):
        file = frame.f_code.co_filename
        return self.line if file.startswith(OURS) and "interrupts" not in file else None

    def line(self, frame, event, argument):
        handler = signal.getsignal(signal.SIGTERM)
        if event == "line" and isinstance(handler, Interrupts):
            self.lines += 1
            if self.lines in self._places:
                self._places = self._places[1:]
                sys.settrace(self.call)  # an exception from here would end it
                handler(signal.SIGTERM, frame)
        return self.line


@pytest.fixture
def quick(monkeypatch):
    """Build the task once, and draw nothing."""
    kept = []

    def once(*given):
        kept.append(kept[0] if kept else plain(*given))
        return kept[0]

    plain = build_task.build_task
    monkeypatch.setattr(build_task, "build_task", once)
    monkeypatch.setattr(report, "save", lambda histories, directory: [])


def outcome(folder):
    """Return what a finished run has written, without its clocks."""
    lines = [json.loads(line) for line in Path(folder, "history.jsonl").read_text().splitlines()]
    with np.load(Path(folder, "variables.npz")) as stored:
        arrays = {name: stored[name].tobytes() for name in stored.files}
    return arrays, [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines]


@pytest.mark.parametrize("apart", [0, 1, 40])
def test_a_signal_at_any_moment(simfbo, quick, apart):
    """Wherever a signal comes, and a second one right or shortly after it."""
    with Signals() as whole:
        assert simfbo(*RUN, "--output", "whole")[0] == 0
    expected = outcome("whole")
    assert whole.lines > 500
    count = int(os.environ.get("SIMFBO_SIGNALS", "20"))  # 3000 for all
    for place in sorted({*np.linspace(1, whole.lines - 1, count, dtype=int).tolist()}):
        folder = f"it{place}"
        with Signals(place, *([place + apart] if apart else [])):
            code, _, err = simfbo(*RUN, "--output", folder)
        hint = f"esume with: simfbo run --resume {folder}\n"
        if (code, err) == (0, ""):
            assert outcome(folder) == expected, place  # it came when all was done
            continue
        assert (code, err.count("\n")) == (130, 1), (place, err)
        assert err == "simfbo: interrupted.\n" or err.endswith(hint), (place, err)
        if not Path(folder, "history.jsonl").exists():
            assert simfbo(*RUN, "--output", folder)[0] == 0
        else:
            done = Path(folder, "summary.txt").exists() and outcome(folder) == expected
            assert done or err.endswith(hint), place
            assert simfbo("run", "--resume", folder, "--quiet")[0] == 0
        assert outcome(folder) == expected, place
