"""Keep a federation's processes running on this machine until SIGTERM.

`simfbo flower up` starts `python -m simfbo.flower.ops.supervisor FOLDER`. A process that ends is
restarted, with a growing delay if it fails repeatedly: a SuperLink rejects a SuperNode for up to a
minute while the previous one is still registered. The supervisor ends all processes before it
exits.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from simfbo.flower.ops.folder import Layout, Process, environment, processes
from simfbo.runs.files import Json, write_atomic

_LASTED = 20.0  # seconds after which the delay of restarts is reset
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_DOWN = 30.0  # seconds for a supervisor to exit


class _Child:
    """One supervised process."""

    def __init__(self, layout: Layout, process: Process) -> None:
        self.process, self._layout = process, layout
        self.running: subprocess.Popen[bytes] | None = None
        self.starts, self._delay, self._begun, self._due = 0, 0.5, 0.0, 0.0

    def poll(self) -> bool:
        """Start the process if it is due, detect its end; return True if anything changed."""
        now = time.monotonic()
        if self.running is not None:
            if self.running.poll() is None:
                return False
            _signal_group(self.running.pid, signal.SIGKILL)  # its own child processes
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

    def describe(self) -> Json:
        """Return its process id, None if it is not running, and the number of its starts."""
        pid = None if self.running is None else self.running.pid
        return {"pid": pid, "starts": self.starts}


def supervise(layout: Layout) -> None:
    """Start the processes of a setup and keep them running until SIGTERM or SIGINT."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    children = [_Child(layout, p) for p in processes(layout, layout.read_setup())]
    try:
        while not received:
            registered = layout.registered.exists()  # unregistered nodes would be rejected
            due = [c for c in children if registered or c.process.name == "superlink"]
            if any([child.poll() for child in due]):
                _write_state(layout, children)
            time.sleep(0.2)
    finally:
        running = {c.process.name: c.running.pid for c in children if c.running is not None}
        # Nodes first: they sign off from the SuperLink and would otherwise stay registered.
        _end_groups([pid for name, pid in running.items() if name.startswith("node")])
        _end_groups([pid for name, pid in running.items() if not name.startswith("node")])
        layout.state.unlink(missing_ok=True)


def start(layout: Layout) -> subprocess.Popen[bytes]:
    """Start a supervisor in the background."""
    command = [sys.executable, "-m", "simfbo.flower.ops.supervisor", str(layout.folder)]
    with open(layout.log("supervisor"), "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def running(layout: Layout) -> Json | None:
    """Return the state written by a running supervisor; None if there is no supervisor."""
    try:
        state = json.loads(layout.state.read_text())
        os.kill(state["supervisor"], 0)
        command = _command_line(state["supervisor"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Another process may have the same number by now.
    return state if command is None or command[-1:] == [str(layout.folder)] else None


def stop(layout: Layout) -> bool:
    """Stop the supervisor and all processes; return False if nothing was running."""
    state = running(layout)
    if state is not None:
        os.kill(state["supervisor"], signal.SIGTERM)
        deadline = time.monotonic() + _DOWN
        while running(layout) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
    orphans = _orphans(layout)
    _end_groups(orphans)
    if layout.folder.is_dir():
        layout.state.unlink(missing_ok=True)
    return state is not None or bool(orphans)


def _write_state(layout: Layout, children: list[_Child]) -> None:
    """Write the list of running processes."""
    descriptions = {child.process.name: child.describe() for child in children}
    write_atomic(layout.state, json.dumps({"supervisor": os.getpid(), "processes": descriptions}))


def _end_groups(groups: list[int]) -> None:
    """Terminate process groups together, and kill those that do not exit."""
    for group in groups:
        _signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while any(map(_is_alive, groups)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for group in groups:
        _signal_group(group, signal.SIGKILL)


def _is_alive(group: int) -> bool:
    """Check whether a group has any process other than a zombie child of ours."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(group, os.WNOHANG)
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _orphans(layout: Layout) -> list[int]:
    """Return process groups of this federation left by a killed supervisor."""
    groups = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            pid = int(entry.parent.name)
            belongs_here = os.fsencode(f"FLWR_HOME={layout.home}") in entry.read_bytes().split(
                b"\0"
            )
            command = " ".join(_command_line(pid) or [])
            if belongs_here and re.search(r"flower-super|flwr-|simfbo\.flower\.ops", command):
                groups.add(os.getpgid(pid))
        except OSError:
            continue
    return sorted(groups - {os.getpgrp()})


def _command_line(pid: int) -> list[str] | None:
    """Return a process's command; None on systems without /proc."""
    if not Path("/proc/self/cmdline").exists():
        return None
    return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).rstrip("\0").split("\0")


if __name__ == "__main__":
    supervise(Layout(Path(sys.argv[1])))
