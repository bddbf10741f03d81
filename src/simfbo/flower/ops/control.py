"""A federation on this machine: create certificates, start, admit nodes, look at it, stop."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from simfbo.errors import MissingExtra, UserError, missing
from simfbo.flower.ops import certificates, flwr_commands, supervisor
from simfbo.flower.ops.folder import Layout, Setup, environment, local_port, write_connection
from simfbo.flower.ops.reach import is_healthy, require_superlink
from simfbo.runs.files import Json, write_atomic

_READY = 80.0  # seconds; a SuperLink rejects a node that was killed for 60 of them

Say = Callable[[str], object]


class Status(NamedTuple):
    """What is running.

    Attributes:
        processes: by name, each with its `pid` and number of `starts`.
        nodes: what the SuperLink knows of each node.
        runs: what the SuperLink knows of each run.
    """

    processes: dict[str, Json]
    nodes: list[Json]
    runs: list[Json]


def create_certificates(
    folder: Path, hosts: Sequence[str] = (), nodes: int = 3, new: bool = False
) -> list[str]:
    """Create the certificates and node keys that are missing; return their names.

    Args:
        folder: of the federation.
        hosts: names and addresses by which nodes reach the server.
        nodes: the number of node keys.
        new: replace the existing ones.
    """
    layout = Layout(folder.resolve())
    certificates.require_names(hosts)
    if supervisor.running(layout):
        raise UserError("The federation is running: stop it with 'simfbo flower down' first.")
    if new:
        for old in (*layout.certificates.glob("*"), *layout.key(1).parent.glob("node-*")):
            old.unlink()
        for old in layout.folder.glob("superlink.db*"):  # it remembers the old keys
            old.unlink()
    return create_missing(layout, hosts, nodes)


def up(folder: Path, setup: Setup, hosts: Sequence[str] = (), say: Say = lambda text: None) -> None:
    """Start the processes of a setup under a supervisor, and wait until they are ready.

    Args:
        folder: of the federation.
        setup: what to start.
        hosts: names and addresses by which nodes on other machines reach the server.
        say: called with what is being waited for.
    """
    layout = Layout(folder.resolve())
    if supervisor.running(layout):
        raise UserError(f"The federation in {layout.folder} is already running.")
    certificates.require_names(hosts)
    _create_folder(layout)
    if setup.link and not setup.insecure:
        create_missing(layout, hosts, len(setup.nodes))
    _require_startable(layout, setup)
    _write_files(layout, setup)
    process = supervisor.start(layout)
    try:
        _become_ready(layout, setup, process, say)
    except BaseException:
        process.terminate()
        process.wait()
        supervisor.stop(layout)
        raise


def admit(folder: Path, key: Path) -> str:
    """Admit a node: keep its public key, and register it if the SuperLink is running."""
    layout = Layout(folder.resolve())
    if not key.name.endswith(".pub") or not certificates.is_public_key(key):
        raise UserError(
            f"{key} is not a public key: give a file such as node-4.pub, created with "
            "'ssh-keygen -t ecdsa -b 384'."
        )
    _create_folder(layout)
    kept = layout.key(1).parent / key.name
    kept.parent.mkdir(exist_ok=True)
    if kept.resolve() != key.resolve():
        shutil.copy(key, kept)
    if supervisor.running(layout) is not None:
        flwr_commands.register(layout, kept)
    return kept.name


def down(folder: Path) -> bool:
    """Stop all processes; return whether there were any."""
    return supervisor.stop(Layout(folder.resolve()))


def status(folder: Path) -> Status | None:
    """Return what is running; None if nothing is."""
    layout = Layout(folder.resolve())
    layout.read_setup()
    state = supervisor.running(layout)
    if state is None:
        return None
    nodes, runs = flwr_commands.list_nodes(layout), flwr_commands.list_runs(layout)
    return Status(state["processes"], nodes, runs)


def create_missing(layout: Layout, hosts: Sequence[str], nodes: int) -> list[str]:
    """Create an authority, a server certificate, node keys and a secret, unless they exist.

    A server certificate is replaced if it lacks one of the hosts.
    """
    made, server = [], layout.certificates / "server.crt"
    _create_folder(layout)
    if not (layout.certificates / "ca.crt").exists():
        certificates.make_authority(layout.certificates)
        made.append("ca.crt")
    known = [] if "ca.crt" in made or not server.is_file() else certificates.names_of(server)
    if not known or not {*hosts} <= {*known}:
        names = [*dict.fromkeys([*hosts, *known, socket.gethostname(), *certificates.LOCAL])]
        certificates.make_server_certificate(layout.certificates, names)
        made.append(f"server.crt for {', '.join(names)}")
    admitted = {key.name for key in layout.public_keys()}
    for node in range(1, nodes + 1):
        if not layout.key(node).exists() and f"node-{node}.pub" not in admitted:
            certificates.make_node_key(layout.key(node))
            made.append(f"node-{node}")
    return made


def _create_folder(layout: Layout) -> None:
    """Create a federation's folder, which only its owner can read, and its secret."""
    try:
        layout.folder.mkdir(parents=True, exist_ok=True)
        layout.folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"Cannot use {layout.folder} as a folder: {error}.") from None
    if not layout.secret.exists():
        certificates.make_secret(layout.secret)


def _require_startable(layout: Layout, setup: Setup) -> None:
    """Raise unless certificates, ports, the SuperLink to join and Flower itself are there."""
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
    """Write what the supervisor and Flower read, and put old logs aside."""
    layout.logs.mkdir(exist_ok=True)
    for old in layout.logs.glob("*.log"):
        old.replace(old.with_suffix(".log.old"))
    write_atomic(layout.setup, setup.model_dump_json(indent=1))
    layout.registered.unlink(missing_ok=True)
    write_connection(layout, setup)


def _become_ready(layout: Layout, setup: Setup, process: subprocess.Popen[bytes], say: Say) -> None:
    """Wait for the SuperLink, register the nodes, wait for them."""
    deadline = time.monotonic() + _READY
    if setup.link:
        say("Starting the SuperLink ...")
        _wait(lambda: is_healthy(layout, setup), process, layout, "superlink", deadline)
        if not setup.insecure:
            with ThreadPoolExecutor(4) as pool:
                keys = layout.public_keys()
                list(pool.map(lambda key: flwr_commands.register(layout, key), keys))
    layout.registered.touch()
    say("Starting the nodes ...")
    for node in setup.nodes:
        name = f"node-{node}"
        _wait(lambda name=name: _has_joined(layout, name), process, layout, name, deadline)


def _wait(
    ready: Callable[[], bool],
    process: subprocess.Popen[bytes],
    layout: Layout,
    name: str,
    deadline: float,
) -> None:
    """Wait until something is ready; raise with the end of its log if that fails."""
    while not ready():
        if process.poll() is not None:
            raise UserError(f"The supervisor ended: {tail(layout.log('supervisor'))}")
        if time.monotonic() > deadline:
            if b"code: 200" in layout.log(name).read_bytes():
                raise UserError(
                    f"The SuperLink rejected {name}, whose key is not registered: run "
                    f"'simfbo flower admit {name}.pub' on the server."
                )
            raise UserError(f"{name} is not ready after {_READY:g} s: {tail(layout.log(name))}")
        time.sleep(0.1)


def _has_joined(layout: Layout, name: str) -> bool:
    """Return whether the SuperLink has accepted a node, according to its log."""
    file = layout.log(name)
    return file.exists() and b"SuperNode ID" in file.read_bytes()[-20_000:]


def tail(file: Path) -> str:
    """Return the end of a log, on one line."""
    text = file.read_text(errors="replace") if file.is_file() else ""
    return " ".join(text.split())[-400:] or "(log is empty)"
