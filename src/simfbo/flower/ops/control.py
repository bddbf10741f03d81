"""Start, inspect and stop a federation on this machine."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from simfbo.errors import MissingExtra, UserError, missing
from simfbo.flower.ops import certificates, control_api, operators, supervisor
from simfbo.flower.ops.credentials import create_folder, create_missing, sync_nodes
from simfbo.flower.ops.folder import Layout, Setup, environment, local_port
from simfbo.flower.ops.reach import is_healthy, require_superlink
from simfbo.runs.files import Json, write_atomic

_READY = 80.0  # seconds; a SuperLink rejects a node that was killed for 60 of them

OnProgress = Callable[[int, str], object]


class Status(NamedTuple):
    """The state of a federation on this machine.

    Attributes:
        processes: by name, each with its `pid` and number of `starts`.
        nodes: the SuperLink's list of nodes; None if it is on another machine.
        runs: the SuperLink's list of runs; None if it is on another machine.
        listening: the open addresses, and the credentials that they require.
        expiring: a sentence for every certificate that expires soon.
    """

    processes: dict[str, Json]
    nodes: list[Json] | None
    runs: list[Json] | None
    listening: list[Json]
    expiring: list[str]


def up(
    folder: Path,
    setup: Setup,
    hosts: Sequence[str] = (),
    on_progress: OnProgress = lambda done, name: None,
) -> None:
    """Start the processes of a setup under a supervisor, and wait until they are ready.

    Args:
        folder: of the federation.
        setup: the processes to start.
        hosts: names and addresses by which nodes on other machines reach the server.
        on_progress: called with the number of ready processes, and the next one's name.
    """
    layout = Layout(folder.resolve())
    if supervisor.running(layout):
        raise UserError(f"The federation in {layout.folder} is already running.")
    certificates.require_names(hosts)
    create_folder(layout)
    certificates.make_secret(layout.secret)
    if setup.link:
        operators.create_first(layout.operators)
    if setup.link and not setup.insecure:
        create_missing(layout, hosts, len(setup.nodes))
    _require_startable(layout, setup)
    _write_files(layout, setup)
    process = supervisor.start(layout)
    try:
        _become_ready(layout, setup, process, on_progress)
    except BaseException:
        process.terminate()
        process.wait()
        supervisor.stop(layout)
        raise


def down(folder: Path) -> bool:
    """Stop all processes; return False if there were none."""
    return supervisor.stop(Layout(folder.resolve()))


def status(folder: Path) -> Status | None:
    """Return the state of the federation; None if it is down."""
    layout = Layout(folder.resolve())
    setup, state = layout.read_setup(), supervisor.running(layout)
    if state is None:
        return None
    nodes = control_api.list_nodes(layout) if setup.link else None
    runs = control_api.list_runs(layout) if setup.link else None
    return Status(
        state["processes"], nodes, runs, listening(layout, setup), layout.expiring(setup.link)
    )


def listening(layout: Layout, setup: Setup) -> list[Json]:
    """Return the addresses that a setup listens on, with their users and required credentials."""
    port, rows, secret = local_port(setup.address), [], "the secret of this folder"
    if setup.link:
        tls = "no TLS" if setup.insecure else "TLS"
        operator_names = (
            ", ".join(operator["operator"] for operator in operators.listed(layout.operators))
            or "nobody"
        )
        keys = "nothing" if setup.insecure else f"one of {len(layout.public_keys())} node keys"
        rows = [
            (f"{setup.host}:{port}", tls, "nodes", keys),
            (f"127.0.0.1:{port}", tls, "operators", f"an operator's key ({operator_names})"),
            (f"127.0.0.1:{port}", tls, "processes of runs", secret),
        ]
    for node in setup.nodes:
        rows.append((f"127.0.0.1:{setup.base_port + node}", "no TLS", f"node-{node}'s app", secret))
    names = "listening on", "with", "for", "who must have"
    return [dict(zip(names, row, strict=True)) for row in rows]


def _require_startable(layout: Layout, setup: Setup) -> None:
    """Raise if certificates, free ports, the SuperLink to join or Flower are missing."""
    layout.require_certificates(setup)
    _require_free_ports(setup)
    if not setup.link:
        require_superlink(layout, setup)
    if shutil.which("flower-superlink", path=environment(layout)["PATH"]) is None:
        raise MissingExtra(missing("flwr", "flower"))


def _require_free_ports(setup: Setup) -> None:
    """Raise if a port is in use."""
    ports = [setup.base_port + node for node in setup.nodes]
    for port in [local_port(setup.address), *ports] if setup.link else ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                raise UserError(
                    f"Port {port} is in use: choose another range with --port."
                ) from None


def _write_files(layout: Layout, setup: Setup) -> None:
    """Write the files for the supervisor and Flower, and rename old logs."""
    layout.logs.mkdir(exist_ok=True)
    for old in layout.logs.glob("*.log"):
        old.replace(old.with_suffix(".log.old"))
    write_atomic(layout.setup, setup.model_dump_json(indent=1))
    layout.registered.unlink(missing_ok=True)


def _become_ready(
    layout: Layout, setup: Setup, process: subprocess.Popen[bytes], on_progress: OnProgress
) -> None:
    """Wait for the SuperLink, register the nodes, and wait for them."""
    deadline = time.monotonic() + _READY
    if setup.link:
        on_progress(0, "the SuperLink")
        _wait(lambda: is_healthy(layout, setup), process, layout, "superlink", deadline)
        sync_nodes(layout)
    layout.registered.touch()
    for done, node in enumerate(setup.nodes, int(setup.link)):
        name = f"node-{node}"
        on_progress(done, name)
        _wait(lambda name=name: _has_joined(layout, name), process, layout, name, deadline)


def _wait(
    ready: Callable[[], bool],
    process: subprocess.Popen[bytes],
    layout: Layout,
    name: str,
    deadline: float,
) -> None:
    """Wait until a process is ready; on failure raise with the end of its log."""
    while not ready():
        if process.poll() is not None:
            raise UserError(f"The supervisor ended: {tail(layout.log('supervisor'))}")
        if layout.log(name).is_file() and b"is not admitted" in layout.log(name).read_bytes():
            raise UserError(
                f"The SuperLink rejected {name}, whose key is not admitted: run "
                f"'simfbo flower admit {name}.pub' on the server."
            )
        if time.monotonic() > deadline:
            raise UserError(f"{name} is not ready after {_READY:g} s: {tail(layout.log(name))}")
        time.sleep(0.1)


def _has_joined(layout: Layout, name: str) -> bool:
    """Check whether the SuperLink has accepted a node, according to its log."""
    file = layout.log(name)
    return file.exists() and b"SuperNode ID" in file.read_bytes()[-20_000:]


def tail(file: Path) -> str:
    """Return the end of a log, on one line."""
    text = file.read_text(errors="replace") if file.is_file() else ""
    return " ".join(text.split())[-400:] or "(log is empty)"
