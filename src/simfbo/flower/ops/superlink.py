"""Flower's SuperLink behind a gateway for admitted nodes and operators.

    python -m simfbo.flower.ops.superlink FOLDER ...    # like flower-superlink, for a federation

Flower's own program, with its HTTP server replaced: `simfbo.flower.ops.door` checks every request,
`simfbo.flower.ops.guests` limits unauthenticated connections, and a renewed certificate is used as
soon as it exists. A node can reply in its own name only, and remains the same node when its key is
replaced.
"""

import logging
import ssl
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.superlink.servicer.fleet import fleet_handlers

from simfbo.flower.ops.certificates import node_form
from simfbo.flower.ops.door import LOG, Door, Keys
from simfbo.flower.ops.fast_nodes import replace
from simfbo.flower.ops.folder import Layout
from simfbo.flower.ops.guests import Guests


class Certificate:
    """A server certificate, reloaded when its file changes."""

    def __init__(self, config: uvicorn.Config, file: Path, key: Path) -> None:
        """Take the configuration with the TLS context, and the files."""
        self._config, self._files, self._loaded = config, (file, key), _version(file)

    def refresh(self) -> None:
        """Use a new certificate for new connections if it matches its key."""
        version = _version(self._files[0])
        if version == self._loaded or self._config.ssl is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
        except (OSError, ssl.SSLError):
            return  # partly written: retried later
        self._config.ssl.load_cert_chain(*self._files)
        self._loaded = version
        LOG.warning("Using the new certificate in %s.", self._files[0])


def know_renewed_nodes(layout: Layout, state: Any) -> None:
    """Let the SuperLink identify a node by its current key as well as by its first one."""
    original = state.get_node_id_by_public_key

    def find(key: bytes) -> int | None:
        if (node := original(key)) is not None:
            return node
        files = [file for file in layout.keys.glob("*.pub") if node_form(file) == key]
        return original(node_form(layout.identity(files[0]))) if files else None

    state.get_node_id_by_public_key = find


def require_own_name(original: Any) -> Any:
    """Wrap Flower's procedure for nodes' replies to reject replies in another node's name."""

    def push(*, request: Any, **named: Any) -> Any:
        senders = {message.metadata.src_node_id for message in request.messages_list}
        if senders - {request.node.node_id}:
            code = ApiErrorCode.RUNTIME_AUTHENTICATION_FAILED
            raise FlowerError(code, "A node can reply in its own name only.")
        return original(request=request, **named)

    return push


def serve(layout: Layout, app: Any, host: str, port: int, **named: Any) -> None:
    """Serve the SuperLink's application behind the gateway, until SIGTERM."""
    guests, setup = Guests(host, port), layout.read_setup()
    nodes, state = None if setup.insecure else layout.keys, app.state.linkstate_factory.state()
    know_renewed_nodes(layout, state)
    door = Door(app, Keys(nodes, layout.operators, state.reserve_nonce), guests.welcome)
    config = uvicorn.Config(
        door,
        loop="asyncio",  # it calls accept() of the socket
        http="h11",  # it limits the length of headers
        ws="none",
        proxy_headers=False,
        server_header=False,
        log_config=named["log_config"],
        ssl_certfile=named["ssl_certfile"],
        ssl_keyfile=named["ssl_keyfile"],
        timeout_notify=1,
    )
    certificate = Certificate(
        config, *map(layout.certificates.joinpath, ("server.crt", "server.key"))
    )

    async def maintain() -> None:
        guests.sweep()
        certificate.refresh()

    config.callback_notify = maintain
    server = uvicorn.Server(config)
    server.run(sockets=[guests])
    if not server.started:
        raise SystemExit(3)


def main() -> None:
    """Run a federation's SuperLink."""
    layout = Layout(Path(sys.argv.pop(1)))
    LOG.addHandler(logging.StreamHandler())
    LOG.setLevel(logging.INFO)
    module = sys.modules[flower_superlink.__module__]
    replace(module, "uvicorn", SimpleNamespace(run=partial(serve, layout)))
    replace(fleet_handlers, "push_messages", require_own_name(fleet_handlers.push_messages))
    flower_superlink()


def _version(file: Path) -> tuple[int, int] | None:
    """Return a version of a file that changes when it is replaced; None if it is missing."""
    try:
        return file.stat().st_ino, file.stat().st_mtime_ns
    except OSError:
        return None


if __name__ == "__main__":
    main()
