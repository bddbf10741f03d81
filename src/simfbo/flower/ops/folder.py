"""The folder of a federation on one machine: its files and processes."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simfbo.errors import UserError
from simfbo.flower.memory import MEMORY
from simfbo.flower.ops import certificates


class Setup(BaseModel):
    """The processes on this machine.

    Attributes:
        link: run the SuperLink here.
        address: of the SuperLink, host:port.
        host: the address that the SuperLink listens on.
        nodes: numbers of the nodes here, counted from 1.
        parts: the total number of nodes; node k holds part k of the clients.
        node_config: further settings of the nodes, passed to `load_client`.
        base_port: node k's own service listens on base_port + k, for this machine only.
        insecure: without TLS and node authentication, for this machine only.
        stock: Flower's own programs for the nodes instead of the fast ones.
        only_apps: digests of the apps that the nodes here run; empty for all.
    """

    model_config = ConfigDict(extra="forbid")

    link: bool = True
    address: str
    host: str = "127.0.0.1"
    nodes: list[int] = Field(min_length=0)
    parts: int
    node_config: str = ""
    base_port: int
    insecure: bool = False
    stock: bool = False
    only_apps: list[str] = []


class Process(NamedTuple):
    """A process: its name, and its command."""

    name: str
    command: list[str]


class Layout(NamedTuple):
    """The paths in a federation's folder."""

    folder: Path

    @property
    def certificates(self) -> Path:
        """The folder of certificates."""
        return self.folder / "certificates"

    @property
    def secret(self) -> Path:
        """The secret for authentication between processes on this machine."""
        return self.folder / "superexec.secret"

    @property
    def logs(self) -> Path:
        """The folder of logs."""
        return self.folder / "logs"

    @property
    def home(self) -> Path:
        """Flower's own folder."""
        return self.folder / "flwr"

    @property
    def setup(self) -> Path:
        """The file of the `Setup`."""
        return self.folder / "setup.json"

    @property
    def state(self) -> Path:
        """The supervisor's list of running processes."""
        return self.folder / "state.json"

    @property
    def registered(self) -> Path:
        """A marker file: the node keys are registered."""
        return self.folder / "registered"

    @property
    def keys(self) -> Path:
        """The folder of node keys."""
        return self.folder / "keys"

    @property
    def operators(self) -> Path:
        """The folder of operators' keys."""
        return self.folder / "operators"

    def memory(self, node: int) -> Path:
        """Return the folder of a node's client memory."""
        return self.folder / "memory" / f"node-{node}"

    def key(self, node: int) -> Path:
        """Return a node's private key."""
        return self.keys / f"node-{node}"

    def public_keys(self) -> list[Path]:
        """Return the public keys of all admitted nodes, without those being replaced."""
        files = self.keys.glob("*.pub")
        return sorted(file for file in files if not file.stem.endswith((".old", ".next")))

    def identity(self, key: Path) -> Path:
        """Return the public key that identifies a node to the SuperLink: its first one."""
        name = key.stem.removesuffix(".old").removesuffix(".next")
        first = key.with_name(f"{name}.first")
        return first if first.exists() else key

    def log(self, name: str) -> Path:
        """Return a process's log."""
        return self.logs / f"{name}.log"

    def read_setup(self) -> Setup:
        """Read the setup; raise if there is none."""
        try:
            return Setup.model_validate_json(self.setup.read_bytes())
        except (OSError, ValidationError):
            raise UserError(
                f"No federation in {self.folder}: start one with 'simfbo flower up'."
            ) from None

    def require_certificates(self, setup: Setup) -> None:
        """Raise unless the required certificates and keys exist and are valid."""
        if setup.insecure:
            return
        keys = [self.certificates / "server.key"] if setup.link else []
        for file in (*self._dated(setup.link), *keys, *map(self.key, setup.nodes)):
            if not file.is_file():
                raise UserError(
                    f"{file} is missing: create it with 'simfbo flower certs', or copy it from "
                    "the server."
                )
        for file in self._dated(setup.link):
            if certificates.days_left(file) < 0:
                raise UserError(
                    f"{file} expired on {certificates.last_day(file)}: {_renewal(setup.link)}."
                )

    def expiring(self, link: bool) -> list[str]:
        """Return a sentence for every certificate that expires soon."""
        files = [file for file in self._dated(link) if file.is_file()]
        remaining = {file: certificates.days_left(file) for file in files}
        return [
            f"{file.name} {'expires' if days > 0 else 'expired'} on {certificates.last_day(file)}: "
            f"{_renewal(link)}."
            for file, days in remaining.items()
            if days < certificates.WARN_DAYS
        ]

    def _dated(self, link: bool) -> list[Path]:
        """Return the required certificates."""
        names = ["ca.crt", "server.crt"] if link else ["ca.crt"]
        return [self.certificates / name for name in names]


def _renewal(link: bool) -> str:
    if link:
        return "renew it with 'simfbo flower certs --renew'"
    return "renew it on the server with 'simfbo flower certs --renew', and copy ca.crt here"


def processes(layout: Layout, setup: Setup) -> list[Process]:
    """Return the processes of a setup, in the order in which they start."""
    all_processes = [_superlink(layout, setup), _server_exec(layout, setup)] if setup.link else []
    for node in setup.nodes:
        all_processes += [_supernode(layout, setup, node), _node_exec(layout, setup, node)]
    return all_processes


def environment(layout: Layout, process: str = "") -> dict[str, str]:
    """Return the environment of Flower's programs; those of a node poll often."""
    polling = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"} if process.startswith("node") else {}
    bin_folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", "")]),
        "FLWR_HOME": str(layout.home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_INTERNAL_GRPC_CONTROL_API": "0",  # further ports, without the gateway
        "FLWR_INTERNAL_GRPC_FLEET_API": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "NO_COLOR": "1",
        **polling,
    }


def local_port(address: str) -> int:
    """Parse the port of an address host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(f"'{address}' is not an address: write host:port, such as 10.0.0.5:9300.")
    return int(port)


def _superlink(layout: Layout, setup: Setup) -> Process:
    folder = layout.certificates
    trust = ["--insecure"]
    if not setup.insecure:
        trust = ["--ssl-ca-certfile", str(folder / "ca.crt"), "--enable-supernode-auth"]
        trust += ["--ssl-certfile", str(folder / "server.crt")]
        trust += ["--ssl-keyfile", str(folder / "server.key")]
    address = ["--host", setup.host, "--port", str(local_port(setup.address))]
    storage = ["--isolation", "process", "--database", str(layout.folder / "superlink.db")]
    program = [sys.executable, "-m", "simfbo.flower.ops.superlink", str(layout.folder)]
    return Process("superlink", [*program, *address, *trust, *storage, *_secret(layout)])


def _server_exec(layout: Layout, setup: Setup) -> Process:
    port = f"127.0.0.1:{local_port(setup.address)}"
    address = ["--runtime-api-address", port, *_trust(layout, setup)]
    return Process("superexec", ["flower-superexec", *address, *_secret(layout)])


def _supernode(layout: Layout, setup: Setup, node: int) -> Process:
    trust = _trust(layout, setup)
    if not setup.insecure:
        trust += ["--auth-supernode-private-key", str(layout.key(node))]
    partition = f"partition-id={node - 1} num-partitions={setup.parts}"
    settings = f"{partition} {setup.node_config} {_memory(layout.memory(node))}"
    address = ["--superlink", setup.address, "--host", "127.0.0.1"]
    address += ["--port", str(setup.base_port + node)]
    options = ["--isolation", "process", "--node-config", settings]
    program = _program(setup, "supernode")
    if setup.only_apps:
        program += ["--only-apps", ",".join(setup.only_apps)]
    return Process(f"node-{node}", [*program, *address, *trust, *options, *_secret(layout)])


def _memory(folder: Path) -> str:
    """Return the setting with a node's memory folder, in quotes that the path does not contain."""
    quote = '"' if "'" in str(folder) else "'"
    return f"{MEMORY}={quote}{folder.absolute()}{quote}"


def _node_exec(layout: Layout, setup: Setup, node: int) -> Process:
    address = ["--runtime-api-address", f"127.0.0.1:{setup.base_port + node}", "--insecure"]
    return Process(f"node-{node}-exec", [*_program(setup, "superexec"), *address, *_secret(layout)])


def _program(setup: Setup, role: str) -> list[str]:
    if setup.stock:
        return [f"flower-{role}"]
    return [sys.executable, "-m", "simfbo.flower.ops.fast_nodes", role]


def _trust(layout: Layout, setup: Setup) -> list[str]:
    if setup.insecure:
        return ["--insecure"]
    return ["--root-certificates", str(layout.certificates / "ca.crt")]


def _secret(layout: Layout) -> list[str]:
    return ["--superexec-auth-secret-file", str(layout.secret)]
