"""Fast variants of Flower's SuperNode and SuperExec that keep an app loaded between messages.

By default, a SuperNode polls for messages every three seconds and starts a process for each one,
which imports JAX, loads the data and compiles every time. Here the SuperNode polls often, and one
process per app stays alive with its data and compiled programs. Both are Flower's own programs with
two parts replaced; they can be mixed with Flower's own.

    python -m simfbo.flower.ops.fast_nodes supernode ...    # like flower-supernode; --only-apps
    python -m simfbo.flower.ops.fast_nodes superexec ...    # like flower-superexec
"""

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime import run_clientapp

POLL, GIVE_UP = 0.05, 30.0  # seconds


class ResidentExecutor(SubprocessExecutor):
    """Starts processes like Flower, but reuses the process of a ClientApp."""

    def __init__(self) -> None:
        """Start without a process."""
        self._app: str | None = None
        self._worker: subprocess.Popen[str] | None = None

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Pass a task to the process that has its app loaded; start one if there is none."""
        if spec.task_type != TaskType.CLIENT_APP or spec.runtime_dependency_install:
            return super().launch(spec)
        certificates = None if spec.insecure else spec.root_certificates_path
        task = [spec.runtime_api_address, spec.token, spec.insecure, certificates]
        if not self._hand_over(spec.fab_hash, json.dumps(task)):
            return LaunchResult.failed("The app's process ended immediately.")
        return LaunchResult.accepted()

    def _hand_over(self, app: str | None, task: str) -> bool:
        """Pass a task to the process of an app, starting it if necessary; False on failure."""
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


class Pacer:
    """The polling interval of a SuperNode: a tenth of the time since the last message.

    Polling thus adds a tenth to an exchange, and costs an idle federation almost nothing.
    """

    def __init__(self) -> None:
        """Start with the shortest interval."""
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for at most this long."""
        if seconds < 1:  # the SuperNode waits for its app, so a message has arrived
            self._last = time.monotonic()
        time.sleep(min(seconds, max(POLL, 0.1 * (time.monotonic() - self._last))))


def hasten_pulls() -> None:
    """Poll often for missing parts of a message, with a shorter timeout.

    A message is announced before its parts are sent, so the first polls often come too early. By
    default Flower polls again after a second and, if the sender dies in between, for two hours.
    """
    defaults = pull_objects.__kwdefaults__
    if defaults is not None and {"initial_backoff", "max_time"} <= defaults.keys():
        defaults |= {"initial_backoff": POLL, "max_time": GIVE_UP}


class CurrentKey:
    """Signs a node's requests with the key in a file, reloaded when it is replaced."""

    def __init__(self, file: Path) -> None:
        """Take the file of the private key."""
        self._file, self._version, self._signer = file, 0, None

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Sign a request and send it."""
        version = self._file.stat().st_mtime_ns
        if self._signer is None or version != self._version:
            key: Any = load_ssh_private_key(self._file.read_bytes(), None)
            self._signer = NodeAuthHttpInterceptor(key, key.public_key())
            self._version = version
        return self._signer.intercept(context, call_next)


class _OtherApp(Exception):
    """The app of a run is not on this node's list."""


def only_apps(digests: set[str]) -> None:
    """Reply to messages of unlisted apps with an error instead of running them.

    The digest is computed from the received content, independent of the SuperLink's claim.
    """
    internal: Any = start_client_internal
    original = internal._pull_and_store_message

    def pull(*, state: Any, object_store: Any, receive: Any, get_fab: Any, **kwargs: Any) -> Any:
        received: list[Any] = []

        def remember() -> Any:
            received[:] = [receive()]
            return received[0]

        def check(*args: Any) -> Any:
            app = get_fab(*args)
            if hashlib.sha256(app.content).hexdigest() not in digests:
                raise _OtherApp
            return app

        call = {"state": state, "object_store": object_store, **kwargs}
        try:
            return original(receive=remember, get_fab=check, **call)
        except _OtherApp:
            message, _ = received[0]
            error = Error(ErrorCode.INVALID_FAB, "the app is not on the node's list (--only-apps)")
            reply = Message(error, reply_to=message)
            internal._insert_message(reply, state, object_store)
            return message.metadata.run_id

    replace(start_client_internal, "_pull_and_store_message", pull)


def supernode() -> None:
    """Run a SuperNode that polls often, and runs only the apps of `--only-apps`."""
    if sys.argv[1:2] == ["--only-apps"]:
        only_apps(set(sys.argv[2].split(",")))
        del sys.argv[1:3]
    if (flag := "--auth-supernode-private-key") in sys.argv:
        file = Path(sys.argv[sys.argv.index(flag) + 1])
        replace(fleet_http_connection, "NodeAuthHttpInterceptor", lambda *keys: CurrentKey(file))
    hasten_pulls()
    replace(start_client_internal, "time", SimpleNamespace(**vars(time) | {"sleep": Pacer().sleep}))
    flower_supernode()


def superexec() -> None:
    """Run a SuperExec that keeps a ClientApp's process alive."""
    replace(run_superexec, "get_executor", lambda *args, **kwargs: ResidentExecutor())
    flower_superexec()


def worker() -> None:
    """Run ClientApp tasks one after the other, each given by a line of stdin.

    Each runs Flower's own procedure, which here does not end the process.
    """
    hasten_pulls()
    after: list[Callable[[], Any]] = []

    def register(*, exit_handlers: list[Callable[[], Any]], **named: Any) -> None:
        after.extend(exit_handlers)

    replace(run_clientapp, "register_signal_handlers", register)
    replace(run_clientapp, "flwr_exit", lambda **named: None)
    for line in sys.stdin:
        address, token, insecure, certificates = json.loads(line)
        root = None if certificates is None else Path(certificates).read_bytes()
        after.clear()
        run_clientapp.run_clientapp(address, token, insecure, root)
        for exit_handler in after:
            exit_handler()


def replace(module: ModuleType, name: str, value: Any) -> None:
    """Replace an attribute of one of Flower's modules; it must exist."""
    if not hasattr(module, name):
        raise SystemExit(
            f"This version of Flower has no {module.__name__}.{name}: install the one that "
            "simfbo was tested with, pip install 'flwr==1.41.0'."
        )
    setattr(module, name, value)


if __name__ == "__main__":
    role = sys.argv.pop(1)
    {"supernode": supernode, "superexec": superexec, "worker": worker}[role]()
