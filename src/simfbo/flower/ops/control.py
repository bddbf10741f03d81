"""`simfbo flower`: certs, up, run, status and down."""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from simfbo.errors import UserError
from simfbo.flower.ops import certificates
from simfbo.flower.ops.folder import (
    CONNECTION,
    Layout,
    Setup,
    environment,
    local_port,
    write_connection,
)
from simfbo.flower.ops.reach import is_healthy, require_superlink
from simfbo.flower.ops.supervisor import stop

OUT = Console(highlight=False, soft_wrap=True)
_NODE_CONFIG = re.compile(r"""\s*([\w-]+=('[^']*'|"[^"]*"|[^\s'"]+)\s*)*""")
_READY = 80.0  # seconds; a node that ended without a word is turned away for 60 of them


def certs(options: argparse.Namespace) -> int:
    """Make certificates and node keys, as far as they are not there."""
    layout = Layout(options.folder.resolve())
    certificates.require_names(options.host)
    if running(layout):
        raise UserError("The federation is up: end it with 'simfbo flower down' first.")
    if options.new:
        for old in (*layout.certificates.glob("*"), *layout.key(1).parent.glob("node-*")):
            old.unlink()
        for old in layout.folder.glob("superlink.db*"):  # it remembers the old keys
            old.unlink()
    made = make_missing(layout, options.host, options.nodes)
    OUT.print(f"Made: {', '.join(made)}." if made else "Nothing was missing.")
    OUT.print(
        f"In {layout.folder}. A node's machine needs certificates/ca.crt and its own keys/node-K; "
        "ca.key and server.key stay here."
    )
    return 0


def up(options: argparse.Namespace) -> int:
    """Start the processes, supervised, and wait until they are there."""
    layout, setup = Layout(options.folder.resolve()), _setup(options)
    if running(layout):
        raise UserError(f"The federation in {layout.folder} is up already.")
    certificates.require_names(options.host)
    _open_folder(layout)
    if setup.link and not setup.insecure:
        make_missing(layout, options.host, len(setup.nodes))
    layout.require_certificates(setup)
    _require_free_ports(setup)
    if not setup.link:
        require_superlink(layout, setup)
    if shutil.which("flower-superlink", path=environment(layout)["PATH"]) is None:
        raise UserError("Flower is not installed: pip install 'simfbo[flower]'.")
    layout.logs.mkdir(exist_ok=True)
    for old in layout.logs.glob("*.log"):
        old.replace(old.with_suffix(".log.old"))
    layout.setup.write_text(setup.model_dump_json(indent=1))
    layout.admitted.unlink(missing_ok=True)
    write_connection(layout, setup)
    supervisor = _start_supervisor(layout)
    try:
        _become_ready(layout, setup, supervisor)
    except BaseException:
        supervisor.terminate()
        supervisor.wait()
        _stop(layout)
        raise
    where = f"SuperLink at {setup.address}" if setup.link else f"joined to {setup.address}"
    secured = "without TLS" if setup.insecure else "TLS and node keys on"
    OUT.print(f"Up: {where}, {len(setup.nodes)} nodes here, {secured}. Logs in {layout.logs}.")
    return 0


def admit(options: argparse.Namespace) -> int:
    """Let a node join: keep its public key, and register it if the SuperLink is up."""
    layout = Layout(options.folder.resolve())
    if not options.key.name.endswith(".pub") or not certificates.is_public_key(options.key):
        raise UserError(
            f"{options.key} is no public key: give a file such as node-4.pub, made with "
            "'ssh-keygen -t ecdsa -b 384'."
        )
    _open_folder(layout)
    kept = layout.key(1).parent / options.key.name
    kept.parent.mkdir(exist_ok=True)
    if kept.resolve() != options.key.resolve():
        shutil.copy(options.key, kept)
    if running(layout) is not None:
        _register(layout, kept)
    OUT.print(f"{kept.name} may join.")
    return 0


def down(options: argparse.Namespace) -> int:
    """End all processes."""
    layout = Layout(options.folder.resolve())
    OUT.print("Down." if _stop(layout) else f"Nothing was running in {layout.folder}.")
    return 0


def status(options: argparse.Namespace) -> int:
    """Show processes, nodes and runs."""
    layout = Layout(options.folder.resolve())
    layout.read_setup()
    state = running(layout)
    if state is None:
        OUT.print(f"Down: nothing is running in {layout.folder}.")
        return 1
    table = Table("process", "pid", "started", box=None)
    for name, known in state["processes"].items():
        times = f"{known['starts']} times" if known["starts"] != 1 else "once"
        table.add_row(name, str(known["pid"] or "waits to start again"), times)
    OUT.print(table)
    for title, words, key, columns in (
        ("nodes", ["supernode", "list"], "nodes", ("node-id", "status", "online-elapsed")),
        ("runs", ["list"], "runs", ("run-id", "status", "elapsed")),
    ):
        found = _flwr_json(layout, *words, CONNECTION).get(key, [])
        table = Table(*columns, box=None, title=title, title_justify="left")
        for row in found:
            table.add_row(*(str(row.get(column, "")) for column in columns))
        OUT.print(table if found else f"no {title}")
    return 0


def running(layout: Layout) -> dict[str, Any] | None:
    """Return what the supervisor says is running; None where it is not there."""
    try:
        state = json.loads(layout.state.read_text())
        os.kill(state["supervisor"], 0)
        words = _command_line(state["supervisor"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Another process may have its number now.
    return state if words is None or words[-1:] == [str(layout.folder)] else None


def _command_line(pid: int) -> list[str] | None:
    """Return a process's command; None where that cannot be asked."""
    file = Path(f"/proc/{pid}/cmdline")
    return (
        file.read_text().rstrip("\0").split("\0") if Path("/proc/self/cmdline").exists() else None
    )


def flwr(layout: Layout, *words: str) -> subprocess.CompletedProcess[str]:
    """Return what one of Flower's own commands says."""
    return subprocess.run(
        ["flwr", *words], env=environment(layout), capture_output=True, text=True, check=False
    )


def make_missing(layout: Layout, hosts: Sequence[str], nodes: int) -> list[str]:
    """Return what was made: an authority, a server certificate, keys of as many nodes, a secret.

    What is there stays, except that a server certificate is made anew for further names.
    """
    made, server = [], layout.certificates / "server.crt"
    _open_folder(layout)
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


def _open_folder(layout: Layout) -> None:
    """Make a federation's folder, which nobody else can look into, and its secret."""
    try:
        layout.folder.mkdir(parents=True, exist_ok=True)
        layout.folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"{layout.folder} cannot be a federation's folder: {error}.") from None
    if not layout.secret.exists():
        certificates.make_secret(layout.secret)


def _setup(options: argparse.Namespace) -> Setup:
    """Return what the options ask for."""
    shared = {"insecure": options.insecure, "stock": options.stock}
    if not _NODE_CONFIG.fullmatch(options.node_config):
        raise UserError("Write --node-config as \"data='/srv/data' site=3\": names and values.")
    shared |= {"node_config": options.node_config}
    if options.join is None:
        nodes = list(range(1, options.nodes + 1))
        host = "0.0.0.0" if options.host else "127.0.0.1"
        address = f"127.0.0.1:{options.port}"
        parts = options.parts or max(1, len(nodes))
        if parts < len(nodes):
            raise UserError(f"{len(nodes)} nodes cannot share {parts} parts: raise --parts.")
        return Setup(
            address=address, host=host, nodes=nodes, parts=parts, base_port=options.port, **shared
        )
    local_port(options.join)
    if options.node is None or options.parts is None or not 1 <= options.node <= options.parts:
        raise UserError("To join, say which node of how many this is: --node 2 --parts 3.")
    return Setup(
        link=False, address=options.join, nodes=[options.node], parts=options.parts,
        base_port=options.port, **shared,
    )  # fmt: skip


def _require_free_ports(setup: Setup) -> None:
    """Raise if a port is taken."""
    ports = [setup.base_port + node for node in setup.nodes]
    for port in [local_port(setup.address), *ports] if setup.link else ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                raise UserError(
                    f"Port {port} is taken: choose another range with --port."
                ) from None


def _start_supervisor(layout: Layout) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "simfbo.flower.ops.supervisor", str(layout.folder)]
    with open(layout.log("supervisor"), "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _become_ready(layout: Layout, setup: Setup, supervisor: subprocess.Popen[bytes]) -> None:
    """Wait for the SuperLink, admit the nodes, wait for them."""
    deadline = time.monotonic() + _READY
    if setup.link:
        with OUT.status("Starting the SuperLink ..."):
            _wait(lambda: is_healthy(layout, setup), supervisor, layout, "superlink", deadline)
        if not setup.insecure:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda key: _register(layout, key), layout.public_keys()))
    layout.admitted.touch()
    with OUT.status("Starting the nodes ..."):
        for node in setup.nodes:
            name = f"node-{node}"
            _wait(lambda name=name: _joined(layout, name), supervisor, layout, name, deadline)


def _wait(
    ready: Any, supervisor: subprocess.Popen[bytes], layout: Layout, name: str, deadline: float
) -> None:
    """Wait until something is ready; raise with the end of a log where it is not to be."""
    while not ready():
        if supervisor.poll() is not None:
            raise UserError(f"The supervisor ended: {tail(layout.log('supervisor'))}")
        if time.monotonic() > deadline:
            if b"code: 200" in layout.log(name).read_bytes():
                raise UserError(
                    f"The SuperLink turned {name} away: its key is not registered there; run "
                    f"'simfbo flower admit {name}.pub' on the server."
                )
            raise UserError(f"{name} is not ready after {_READY:g} s: {tail(layout.log(name))}")
        time.sleep(0.2)


def _joined(layout: Layout, name: str) -> bool:
    """Return whether a node has said that the SuperLink took it in."""
    file = layout.log(name)
    return file.exists() and b"SuperNode ID" in file.read_bytes()[-20_000:]


def _register(layout: Layout, key: Path) -> None:
    """Register a node's public key, if it is not."""
    answer = flwr(layout, "supernode", "register", str(key), CONNECTION)
    said = answer.stdout + answer.stderr
    if answer.returncode and "already" not in said:
        raise UserError(f"{key} could not be registered: {' '.join(said.split())[-300:]}")


def _flwr_json(layout: Layout, *words: str) -> dict[str, Any]:
    answer = flwr(layout, *words, "--format", "json")
    try:
        return json.loads(answer.stdout)
    except ValueError:
        said = " ".join((answer.stdout + answer.stderr).split())[-300:]
        raise UserError(f"Flower could not be asked ({' '.join(words)}): {said}") from None


def _stop(layout: Layout) -> bool:
    """Return whether anything was running; nothing is afterwards."""
    state = running(layout)
    if state is not None:
        os.kill(state["supervisor"], signal.SIGTERM)
        deadline = time.monotonic() + 20
        while running(layout) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
    left = _strays(layout)
    stop(left)
    if layout.folder.is_dir():
        layout.state.unlink(missing_ok=True)
    return state is not None or bool(left)


def _strays(layout: Layout) -> list[int]:
    """Return process groups of this federation that a killed supervisor has left behind."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            pid = int(entry.parent.name)
            ours = f"FLWR_HOME={layout.home}".encode() in entry.read_bytes().split(b"\0")
            words = " ".join(_command_line(pid) or [])
            if ours and re.search(r"flower-super|flwr-|simfbo\.deploy", words):
                found.add(os.getpgid(pid))
        except OSError:
            continue
    return sorted(found - {os.getpgrp()})


def tail(file: Path) -> str:
    """Return the end of a log, as one line."""
    said = file.read_text(errors="replace") if file.is_file() else ""
    return " ".join(said.split())[-400:] or "it has said nothing"
