"""`simfbo flower`: certs, up, run, status and down."""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from simfbo.deploy import certificates
from simfbo.deploy.layout import (
    CONNECTION,
    Layout,
    Setup,
    environment,
    local_port,
    write_connection,
)
from simfbo.deploy.supervisor import stop
from simfbo.errors import UserError

OUT = Console(highlight=False, soft_wrap=True)
_NODE_CONFIG = re.compile(r"""\s*([\w-]+=('[^']*'|"[^"]*"|[^\s'"]+)\s*)*""")
_READY = 80.0  # seconds; a node that ended without a word is turned away for 60 of them


def certs(options: argparse.Namespace) -> int:
    """Make certificates and node keys."""
    layout = Layout(options.folder.resolve())
    if (layout.certificates / "ca.crt").exists() and not options.new:
        raise UserError(
            f"{layout.certificates} has certificates already: add --new to replace them; every "
            "node then needs the new ca.crt."
        )
    if running(layout):
        raise UserError("The federation is up: end it with 'simfbo flower down' first.")
    make_all(layout, options.host, options.nodes)
    OUT.print(f"Certificates in {layout.certificates}, for {', '.join(_hosts(options.host))}.")
    OUT.print(f"Keys of {options.nodes} nodes in {layout.folder / 'keys'}.")
    OUT.print("A node's machine needs ca.crt and its own node-K; ca.key and server.key stay here.")
    return 0


def up(options: argparse.Namespace) -> int:
    """Start the processes, supervised, and wait until they are there."""
    layout, setup = Layout(options.folder.resolve()), _setup(options)
    if running(layout):
        raise UserError(f"The federation in {layout.folder} is up already.")
    if setup.link and not setup.insecure and not (layout.certificates / "ca.crt").exists():
        make_all(layout, options.host, len(setup.nodes))
    layout.require_certificates(setup)
    if not layout.secret.exists():
        layout.folder.mkdir(parents=True, exist_ok=True)
        certificates.make_secret(layout.secret)
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
        _stop(layout)
        raise
    where = f"SuperLink at {setup.address}" if setup.link else f"joined to {setup.address}"
    secured = "without TLS" if setup.insecure else "TLS and node keys on"
    OUT.print(f"Up: {where}, {len(setup.nodes)} nodes here, {secured}. Logs in {layout.logs}.")
    return 0


def admit(options: argparse.Namespace) -> int:
    """Let a node join: keep its public key, and register it if the SuperLink is up."""
    layout = Layout(options.folder.resolve())
    layout.read_setup()
    if not options.key.is_file() or not options.key.name.endswith(".pub"):
        raise UserError(f"{options.key} is no public key: give a file such as node-4.pub.")
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
        command = Path(f"/proc/{state['supervisor']}/cmdline")
        os.kill(state["supervisor"], 0)
    except (OSError, ValueError, KeyError):
        return None
    if command.parent.parent.exists() and str(layout.folder) not in command.read_text():
        return None  # another process has its number now
    return state


def flwr(layout: Layout, *words: str) -> subprocess.CompletedProcess[str]:
    """Return what one of Flower's own commands says."""
    return subprocess.run(
        ["flwr", *words], env=environment(layout), capture_output=True, text=True, check=False
    )


def make_all(layout: Layout, hosts: Sequence[str], nodes: int) -> None:
    """Make certificates, and keys of as many nodes."""
    layout.folder.mkdir(parents=True, exist_ok=True)
    certificates.make_certificates(layout.certificates, _hosts(hosts))
    certificates.make_secret(layout.secret)
    for node in range(1, nodes + 1):
        certificates.make_node_key(layout.key(node))


def _hosts(hosts: Sequence[str]) -> list[str]:
    """Return the names of the server: those given, and this machine's."""
    return [*dict.fromkeys([*hosts, socket.gethostname(), *certificates.LOCAL])]


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
        return Setup(
            address=address, host=host, nodes=nodes, parts=parts, base_port=options.port, **shared
        )
    base = local_port(options.join)
    if options.node is None or options.parts is None or not 1 <= options.node <= options.parts:
        raise UserError("To join, say which node of how many this is: --node 2 --parts 3.")
    return Setup(
        link=False, address=options.join, nodes=[options.node], parts=options.parts,
        base_port=base, **shared,
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
    command = [sys.executable, "-m", "simfbo.deploy.supervisor", str(layout.folder)]
    with open(layout.log("supervisor"), "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _become_ready(layout: Layout, setup: Setup, supervisor: subprocess.Popen[bytes]) -> None:
    """Wait for the SuperLink, admit the nodes, wait for them."""
    deadline = time.monotonic() + _READY
    if setup.link:
        with OUT.status("Starting the SuperLink ..."):
            _wait(lambda: _healthy(layout, setup), supervisor, layout, "superlink", deadline)
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


def _healthy(layout: Layout, setup: Setup) -> bool:
    """Return whether the SuperLink answers."""
    scheme, context = "http", None
    if not setup.insecure:
        scheme = "https"
        context = ssl.create_default_context(cafile=str(layout.certificates / "ca.crt"))
    try:
        url = f"{scheme}://127.0.0.1:{local_port(setup.address)}/health"
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return answer.status == 200
    except OSError:
        return False


def require_superlink(layout: Layout, setup: Setup) -> None:
    """Raise, saying what to do, unless the SuperLink to join can be reached and trusted."""
    host, port = setup.address.rpartition(":")[0], local_port(setup.address)
    host = host.strip("[]")
    context = ssl.create_default_context()
    if setup.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(layout.certificates / "ca.crt")
    try:
        with socket.create_connection((host, port), timeout=5) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
        trusted = True
    except ssl.SSLCertVerificationError as error:
        raise UserError(_distrust(layout, setup, host, error)) from None
    except ssl.SSLError:
        trusted = False
    except OSError as error:
        raise UserError(
            f"Nothing answers at {setup.address} ({error}): is the SuperLink up, with --host, and "
            "its port open?"
        ) from None
    if trusted and setup.insecure:
        raise UserError(f"The SuperLink at {setup.address} speaks TLS: leave --insecure out.")
    if not trusted and not setup.insecure:
        raise UserError(
            f"The SuperLink at {setup.address} does not speak TLS: is it the right port? One "
            "started with --insecure is joined with --insecure."
        )


def _distrust(layout: Layout, setup: Setup, host: str, error: ssl.SSLCertVerificationError) -> str:
    """Return why a certificate was not accepted, and what to do."""
    if "match" in error.verify_message:
        return (
            f"The certificate of the SuperLink is not for '{host}': make it on the server with "
            f"'simfbo flower certs --new --host {host}'."
        )
    return (
        f"The SuperLink at {setup.address} is not the one that {layout.certificates / 'ca.crt'} "
        f"vouches for ({error.verify_message}): copy ca.crt from the server's folder."
    )


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
    layout.state.unlink(missing_ok=True)
    return state is not None or bool(left)


def _strays(layout: Layout) -> list[int]:
    """Return process groups of this federation that a killed supervisor has left behind."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FLWR_HOME={layout.home}\0".encode() in entry.read_bytes() + b"\0":
                group = os.getpgid(int(entry.parent.name))
                if group != os.getpgrp():
                    found.add(group)
        except OSError:
            continue
    return sorted(found)


def tail(file: Path) -> str:
    """Return the end of a log, as one line."""
    said = file.read_text(errors="replace") if file.is_file() else ""
    return " ".join(said.split())[-400:] or "it has said nothing"
