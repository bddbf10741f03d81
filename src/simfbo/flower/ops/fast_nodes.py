"""Flower's SuperNode and SuperExec, made quick: a node's app stays loaded between messages.

As they come, a SuperNode looks for messages every three seconds and starts a process for each: it
imports JAX, reads the data and compiles again, every time. Here the SuperNode looks often, and one
process per app stays: it keeps data and compiled programs. Both are Flower's own programs with two
parts replaced; nodes that run them and nodes that run Flower's can be mixed.

    python -m simfbo.flower.ops.fast_nodes supernode --superlink ...    # as flower-supernode
    python -m simfbo.flower.ops.fast_nodes superexec --runtime-api-address ...  # as flower-superexec
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.runtime import run_clientapp

SOON, GIVE_UP = 0.05, 30.0  # seconds


class ResidentExecutor(SubprocessExecutor):
    """Starts processes as Flower does, but one that runs a ClientApp stays for the next message."""

    def __init__(self) -> None:
        """Begin without any process."""
        self._app: str | None = None
        self._worker: subprocess.Popen[str] | None = None

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Hand a task to the process that has its app loaded; start it where there is none."""
        if spec.task_type != TaskType.CLIENT_APP or spec.runtime_dependency_install:
            return super().launch(spec)
        certificates = None if spec.insecure else spec.root_certificates_path
        task = [spec.runtime_api_address, spec.token, spec.insecure, certificates]
        if not self._hand_over(spec.fab_hash, json.dumps(task)):
            return LaunchResult.failed("The app's process ended at once.")
        return LaunchResult.accepted()

    def _hand_over(self, app: str | None, task: str) -> bool:
        """Return whether the process of an app has taken a task, an old one or a new one."""
        for _ in range(2):
            if self._worker is None or self._worker.poll() is not None or app != self._app:
                self.close()
                command = [sys.executable, "-m", "simfbo.flower.ops.fast_nodes", "worker"]
                self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
                self._app = app
            assert self._worker.stdin is not None
            with contextlib.suppress(OSError):
                self._worker.stdin.write(task + "\n")
                self._worker.stdin.flush()
                return True
        return False

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            self._worker = None


class Rhythm:
    """How long a SuperNode sleeps between looks: a tenth of the time since the last message.

    So it adds a tenth to an exchange, and an idle federation costs next to nothing.
    """

    def __init__(self) -> None:
        """Begin as if a message had just come."""
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep at most so long."""
        if seconds < 1:  # it waits for its app, so there is a message
            self._last = time.monotonic()
        time.sleep(min(seconds, max(SOON, 0.1 * (time.monotonic() - self._last))))


def hasten_pulls() -> None:
    """Look again soon for parts of a message that are not there yet, and give up in time.

    A message is announced before its parts are sent, and whoever looks often comes too early: by
    default they look again after a second. If the sender dies in between, they look for two hours.
    """
    defaults = pull_objects.__kwdefaults__
    if defaults is not None and {"initial_backoff", "max_time"} <= defaults.keys():
        defaults |= {"initial_backoff": SOON, "max_time": GIVE_UP}


def supernode() -> None:
    """Run a SuperNode that looks for messages often."""
    hasten_pulls()
    _replace(
        start_client_internal, "time", SimpleNamespace(**vars(time) | {"sleep": Rhythm().sleep})
    )
    flower_supernode()


def superexec() -> None:
    """Run a SuperExec that keeps a ClientApp's process."""
    _replace(run_superexec, "get_executor", lambda *given, **named: ResidentExecutor())
    flower_superexec()


def worker() -> None:
    """Run one ClientApp task after the other, as they come line by line, until there are no more.

    Each is Flower's own procedure, except that it does not end the process.
    """
    hasten_pulls()
    after: list[Callable[[], Any]] = []

    def register(*, exit_handlers: list[Callable[[], Any]], **named: Any) -> None:
        after.extend(exit_handlers)

    _replace(run_clientapp, "register_signal_handlers", register)
    _replace(run_clientapp, "flwr_exit", lambda **named: None)
    for line in sys.stdin:
        address, token, insecure, certificates = json.loads(line)
        root = None if certificates is None else Path(certificates).read_bytes()
        after.clear()
        run_clientapp.run_clientapp(address, token, insecure, root)
        for last_thing in after:
            last_thing()


def _replace(module: ModuleType, name: str, value: Any) -> None:
    """Replace a part of one of Flower's modules, which must be there."""
    if not hasattr(module, name):
        raise SystemExit(
            f"This Flower has no {module.__name__}.{name}: use 'simfbo flower up --stock'."
        )
    setattr(module, name, value)


if __name__ == "__main__":
    role = sys.argv.pop(1)
    {"supernode": supernode, "superexec": superexec, "worker": worker}[role]()
