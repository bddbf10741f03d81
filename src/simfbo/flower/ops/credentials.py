"""Creation, admission and renewal of certificates and keys in a federation's folder."""

import itertools
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from simfbo.errors import UserError
from simfbo.flower.ops import certificates, control_api, operators, supervisor
from simfbo.flower.ops.folder import Layout
from simfbo.runs.files import write_atomic


def create_certificates(
    folder: Path, hosts: Sequence[str] = (), nodes: int = 3, new: bool = False
) -> list[str]:
    """Create the certificates and keys that are missing; return their names.

    Args:
        folder: of the federation.
        hosts: names and addresses by which nodes reach the server.
        nodes: the number of node keys.
        new: replace the existing ones.
    """
    layout = Layout(folder.resolve())
    certificates.require_names(hosts)
    if new:
        if supervisor.running(layout):
            raise UserError(
                "The federation is running: stop it with 'simfbo flower down' first, or replace "
                "certificates and keys while it runs with --renew."
            )
        old = (
            layout.certificates.glob("*"),
            layout.keys.glob("node-*"),
            layout.operators.glob("*"),
        )
        for file in (*itertools.chain(*old), *layout.folder.glob("superlink.db*")):
            file.unlink()  # the database contains the old keys
    created = create_missing(layout, hosts, nodes)
    sync_nodes(layout)
    return created


def renew(folder: Path) -> list[str]:
    """Replace the certificates and keys used here, even during a run; return their names.

    A running SuperLink uses the new server certificate immediately. The authority's certificate is
    replaced if it would expire before the server's, by one with the same key: nodes trust the
    server as long as theirs is valid.
    """
    layout = Layout(folder.resolve())
    setup = layout.read_setup() if layout.setup.exists() else None
    renewed = _renew_certificates(layout) if (layout.certificates / "ca.key").exists() else []
    for operator in sorted(layout.operators.glob("*.pub")):
        if (key := operator.with_suffix("")).exists():
            certificates.make_key(key)
            renewed.append(f"operator {key.name}")
    for node in setup.nodes if setup is not None and setup.link and not setup.insecure else []:
        _renew_node(layout, layout.key(node))
        renewed.append(f"node-{node}")
    if not renewed:
        raise UserError(
            f"{layout.folder} has nothing to renew. To give a node on this machine a new key, "
            "create one elsewhere, admit its public key on the server, then move it here."
        )
    return renewed


def _renew_node(layout: Layout, key: Path) -> None:
    """Replace the key of a node on the server's machine, which uses it from then on."""
    with tempfile.TemporaryDirectory(dir=layout.folder) as folder:
        new = Path(folder) / key.name
        certificates.make_key(new)
        _keep(layout, key.with_name(f"{key.name}.pub"), Path(f"{new}.pub").read_bytes())
        os.replace(new, key)


def _renew_certificates(layout: Layout) -> list[str]:
    """Replace the server's certificate, and the authority's if it would expire before."""
    folder, renewed = layout.certificates, ["server.crt"]
    if certificates.days_left(folder / "ca.crt") < certificates.DAYS:
        until = certificates.last_day(folder / "ca.crt")
        renewed.append(f"ca.crt (copy it to the nodes before {until})")
        certificates.renew_authority(folder)
    server = folder / "server.crt"
    names = certificates.names_of(server) if server.is_file() else [socket.gethostname()]
    certificates.make_server_certificate(folder, names)
    return renewed


def admit(folder: Path, key: Path) -> str:
    """Admit a node: save its public key, and register it if the SuperLink is running.

    A key of the same name is replaced. It stays valid until the node has used the new one, and to
    the SuperLink the node remains the same.
    """
    layout = Layout(folder.resolve())
    if not key.name.endswith(".pub") or certificates.public_key(key) is None:
        raise UserError(
            f"{key} is not a public key: give a file such as node-4.pub, created with "
            "'ssh-keygen -t ecdsa -b 384'."
        )
    create_folder(layout)
    layout.keys.mkdir(exist_ok=True)
    _keep(layout, layout.keys / key.name, key.read_bytes())
    sync_nodes(layout)
    return key.name


def _keep(layout: Layout, file: Path, content: bytes) -> None:
    """Save an admitted node's public key, and the one it replaces."""
    if file.exists() and file.read_bytes() != content:
        previous = file.read_bytes()
        if layout.identity(file) == file:
            write_atomic(file.with_suffix(".first"), previous)
        write_atomic(file.with_suffix(".old.pub"), previous)
    write_atomic(file, content)


def sync_nodes(layout: Layout) -> None:
    """Update the admitted nodes of a SuperLink that is running here."""
    if supervisor.running(layout) is not None:
        setup = layout.read_setup()
        if setup.link and not setup.insecure:
            control_api.sync_nodes(layout)


def create_missing(layout: Layout, hosts: Sequence[str], nodes: int) -> list[str]:
    """Create an authority, a server certificate, an operator and node keys, unless they exist.

    A server certificate is replaced if it lacks one of the hosts.
    """
    created, server = [], layout.certificates / "server.crt"
    create_folder(layout)
    if not (layout.certificates / "ca.crt").exists():
        certificates.make_authority(layout.certificates)
        created.append("ca.crt")
    current_names = (
        [] if "ca.crt" in created or not server.is_file() else certificates.names_of(server)
    )
    if not current_names or not {*hosts} <= {*current_names}:
        names = [
            *dict.fromkeys([*hosts, *current_names, socket.gethostname(), *certificates.LOCAL])
        ]
        certificates.make_server_certificate(layout.certificates, names)
        created.append(f"server.crt for {', '.join(names)}")
    created += operators.create_first(layout.operators)
    admitted = {key.name for key in layout.public_keys()}
    for node in range(1, nodes + 1):
        if not layout.key(node).exists() and f"node-{node}.pub" not in admitted:
            certificates.make_key(layout.key(node))
            created.append(f"node-{node}")
    return created


def create_folder(layout: Layout) -> None:
    """Create a federation's folder, which only its owner can read."""
    try:
        layout.folder.mkdir(parents=True, exist_ok=True)
        layout.folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"Cannot use {layout.folder} as a folder: {error}.") from None
