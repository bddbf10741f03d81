"""Keeps a federation's processes running on this machine, until it is told to stop.

`python -m simfbo.flower.ops.supervisor FOLDER` is started by `simfbo flower up`. A process that ends is
started again, later each time it did not last: a SuperNode whose old self is still remembered is
turned away for up to a minute. At the end every process group is gone.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from simfbo.flower.ops.folder import Layout, Process, environment, processes

_LASTED = 20.0  # seconds after which a process is taken to have started well
_PATIENCE = 10.0  # seconds between asking processes to end and making them


class _Child:
    """One process that is kept running."""

    def __init__(self, layout: Layout, process: Process) -> None:
        self.process, self._layout = process, layout
        self.running: subprocess.Popen[bytes] | None = None
        self.starts, self._delay, self._begun, self._due = 0, 0.5, 0.0, 0.0

    def tend(self) -> bool:
        """Return whether anything changed: start the process if it is due, notice if it ended."""
        now = time.monotonic()
        if self.running is not None:
            if self.running.poll() is None:
                return False
            _end_group(self.running.pid, signal.SIGKILL)  # what it may have started
            self._delay = 0.5 if now - self._begun > _LASTED else min(2 * self._delay, 8.0)
            self._due, self.running = now + self._delay, None
            return True
        if now < self._due:
            return False
        self._start(now)
        return True

    def _start(self, now: float) -> None:
        with open(self._layout.log(self.process.name), "ab") as log:
            self.running = subprocess.Popen(
                self.process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self._layout, self.process.name),
                cwd=self._layout.folder,
                start_new_session=True,
            )
        self._begun, self.starts = now, self.starts + 1

    def describe(self) -> dict[str, Any]:
        """Return what is known of it."""
        pid = None if self.running is None else self.running.pid
        return {"pid": pid, "starts": self.starts}


def supervise(layout: Layout) -> None:
    """Start the processes of a setup and keep them running, until SIGTERM or SIGINT."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    children = [_Child(layout, p) for p in processes(layout, layout.read_setup())]
    try:
        while not asked:
            nodes_may = layout.admitted.exists()  # before that they would be turned away
            due = [c for c in children if nodes_may or not c.process.name.startswith("node")]
            if any([child.tend() for child in due]):
                write_state(layout, children)
            time.sleep(0.2)
    finally:
        running = {c.process.name: c.running.pid for c in children if c.running is not None}
        # Nodes first: they take their leave of the SuperLink, which else remembers them.
        stop([pid for name, pid in running.items() if name.startswith("node")])
        stop([pid for name, pid in running.items() if not name.startswith("node")])
        layout.state.unlink(missing_ok=True)


def write_state(layout: Layout, children: list[_Child]) -> None:
    """Write down what is running, in one step."""
    found = {child.process.name: child.describe() for child in children}
    temporary = layout.state.with_suffix(".tmp")
    temporary.write_text(json.dumps({"supervisor": os.getpid(), "processes": found}))
    os.replace(temporary, layout.state)


def stop(groups: list[int]) -> None:
    """Ask process groups to end, all at once, and make those end that do not."""
    for group in groups:
        _end_group(group, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
    while any(map(_group_lives, groups)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for group in groups:
        _end_group(group, signal.SIGKILL)


def _group_lives(group: int) -> bool:
    """Return whether any process of a group is there, other than as a zombie of ours."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(group, os.WNOHANG)
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _end_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    supervise(Layout(Path(sys.argv[1])))
