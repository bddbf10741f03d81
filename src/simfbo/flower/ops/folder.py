"""The folder of a federation on one machine: its files, and the processes that belong to it."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simfbo.errors import UserError
from simfbo.flower.memory import MEMORY
from simfbo.flower.ops import certificates


class Setup(BaseModel):
    """What runs on this machine.

    Attributes:
        link: whether the SuperLink runs here.
        address: of the SuperLink, host:port.
        host: the address that the SuperLink listens on.
        nodes: numbers of the nodes here, counted from 1.
        parts: the total number of nodes; node k holds part k of the clients.
        node_config: further settings of the nodes, passed to `load_client`.
        base_port: node k's own service listens on base_port + k, for this machine only.
        insecure: without TLS and node authentication, for this machine only.
        stock: Flower's own programs for the nodes instead of the fast ones.
        only_apps: digests of the apps that the nodes here run; all if there are none.
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
    """One of the processes: its name, and the command that starts it."""

    name: str
    command: list[str]


class Layout(NamedTuple):
    """Where the files of a federation are."""

    folder: Path

    @property
    def certificates(self) -> Path:
        """Return the folder of certificates."""
        return self.folder / "certificates"

    @property
    def secret(self) -> Path:
        """Return the file that authenticates processes on this machine to each other."""
        return self.folder / "superexec.secret"

    @property
    def logs(self) -> Path:
        """Return the folder of logs."""
        return self.folder / "logs"

    @property
    def home(self) -> Path:
        """Return Flower's own folder."""
        return self.folder / "flwr"

    @property
    def setup(self) -> Path:
        """Return the file that says what runs here."""
        return self.folder / "setup.json"

    @property
    def state(self) -> Path:
        """Return the file in which the supervisor lists what is running."""
        return self.folder / "state.json"

    @property
    def registered(self) -> Path:
        """Return the file whose presence says that the node keys are registered."""
        return self.folder / "registered"

    @property
    def keys(self) -> Path:
        """Return the folder of node keys."""
        return self.folder / "keys"

    @property
    def operators(self) -> Path:
        """Return the folder of operators' keys."""
        return self.folder / "operators"

    def memory(self, node: int) -> Path:
        """Return the folder in which a node keeps what its clients remember."""
        return self.folder / "memory" / f"node-{node}"

    def key(self, node: int) -> Path:
        """Return a node's private key."""
        return self.keys / f"node-{node}"

    def public_keys(self) -> list[Path]:
        """Return the public keys of all nodes that are admitted, without those being replaced."""
        found = self.keys.glob("*.pub")
        return sorted(file for file in found if not file.stem.endswith((".old", ".next")))

    def identity(self, key: Path) -> Path:
        """Return the public key by which the SuperLink knows a node: the first one it had."""
        name = key.stem.removesuffix(".old").removesuffix(".next")
        first = key.with_name(f"{name}.first")
        return first if first.exists() else key

    def log(self, name: str) -> Path:
        """Return a process's log."""
        return self.logs / f"{name}.log"

    def read_setup(self) -> Setup:
        """Return what runs here; raise if nothing was set up."""
        try:
            return Setup.model_validate_json(self.setup.read_bytes())
        except (OSError, ValidationError):
            raise UserError(
                f"No federation in {self.folder}: start one with 'simfbo flower up'."
            ) from None

    def require_certificates(self, setup: Setup) -> None:
        """Raise unless the certificates and keys that a setup needs exist and are valid."""
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
        """Return a sentence for every certificate that expires soon, on a server or elsewhere."""
        files = [file for file in self._dated(link) if file.is_file()]
        left = {file: certificates.days_left(file) for file in files}
        return [
            f"{file.name} {'expires' if days > 0 else 'expired'} on {certificates.last_day(file)}: "
            f"{_renewal(link)}."
            for file, days in left.items()
            if days < certificates.WARN_DAYS
        ]

    def _dated(self, link: bool) -> list[Path]:
        """Return the certificates that are needed on a server or elsewhere."""
        names = ["ca.crt", "server.crt"] if link else ["ca.crt"]
        return [self.certificates / name for name in names]


def _renewal(link: bool) -> str:
    if link:
        return "renew it with 'simfbo flower certs --renew'"
    return "renew it on the server with 'simfbo flower certs --renew', and copy ca.crt here"


def processes(layout: Layout, setup: Setup) -> list[Process]:
    """Return the processes of a setup, in the order in which they start."""
    found = [_superlink(layout, setup), _server_exec(layout, setup)] if setup.link else []
    for node in setup.nodes:
        found += [_supernode(layout, setup, node), _node_exec(layout, setup, node)]
    return found


def environment(layout: Layout, process: str = "") -> dict[str, str]:
    """Return the environment of Flower's programs; those of a node poll for work often."""
    often = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"} if process.startswith("node") else {}
    bin_folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", "")]),
        "FLWR_HOME": str(layout.home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_INTERNAL_GRPC_CONTROL_API": "0",  # further ports, without the door
        "FLWR_INTERNAL_GRPC_FLEET_API": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "NO_COLOR": "1",
        **often,
    }


def local_port(address: str) -> int:
    """Return the port of an address host:port."""
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
    where = ["--host", setup.host, "--port", str(local_port(setup.address))]
    keep = ["--isolation", "process", "--database", str(layout.folder / "superlink.db")]
    program = [sys.executable, "-m", "simfbo.flower.ops.superlink", str(layout.folder)]
    return Process("superlink", [*program, *where, *trust, *keep, *_secret(layout)])


def _server_exec(layout: Layout, setup: Setup) -> Process:
    address = f"127.0.0.1:{local_port(setup.address)}"
    where = ["--runtime-api-address", address, *_trust(layout, setup)]
    return Process("superexec", ["flower-superexec", *where, *_secret(layout)])


def _supernode(layout: Layout, setup: Setup, node: int) -> Process:
    trust = _trust(layout, setup)
    if not setup.insecure:
        trust += ["--auth-supernode-private-key", str(layout.key(node))]
    own = f"partition-id={node - 1} num-partitions={setup.parts}"
    settings = f"{own} {setup.node_config} {_memory(layout.memory(node))}"
    where = ["--superlink", setup.address, "--host", "127.0.0.1"]
    where += ["--port", str(setup.base_port + node)]
    rest = ["--isolation", "process", "--node-config", settings]
    program = _program(setup, "supernode")
    if setup.only_apps:
        program += ["--only-apps", ",".join(setup.only_apps)]
    return Process(f"node-{node}", [*program, *where, *trust, *rest, *_secret(layout)])


def _memory(folder: Path) -> str:
    """Return the setting that names a node's folder; Flower's settings have two kinds of quotes."""
    mark = '"' if "'" in str(folder) else "'"
    return f"{MEMORY}={mark}{folder.absolute()}{mark}"


def _node_exec(layout: Layout, setup: Setup, node: int) -> Process:
    where = ["--runtime-api-address", f"127.0.0.1:{setup.base_port + node}", "--insecure"]
    return Process(f"node-{node}-exec", [*_program(setup, "superexec"), *where, *_secret(layout)])


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
