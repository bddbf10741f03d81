"""The gateway of a SuperLink: unauthorised requests are rejected before their content is read.

Flower's SuperLink answers on one port: to nodes (`/v1/fleet`), to operators (`/v1/control`) and to
the processes of a run (`/v1/runtime`). By default it checks nodes only after reading their
requests, and operators and processes not at all. Here, before a request's content is read and
before Flower sees it:

- a node's must be signed by an admitted key, and must not be a replay;
- all others must come from this machine;
- an operator's must be signed by an operator's key (`simfbo.flower.ops.operators`).
"""

import asyncio
import base64
import binascii
import datetime
import hashlib
import ipaddress
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from simfbo.errors import plain
from simfbo.flower.ops import certificates, operators
from simfbo.flower.ops.operators import Reserve

LOG = logging.getLogger("simfbo.door")
LARGEST = 256 * 2**20  # bytes of a node's request; Flower sends arrays in parts of 5 MB
LARGEST_CONTROL = 64 * 2**20  # bytes of an operator's request; an app has at most 10 MB
OVERLAP = 60.0  # seconds for which a node's old key is valid besides the new one
EARLY, LATE = 5.0, 300.0  # seconds by which a node's clock may differ, as in Flower
_PUBLIC, _TIME, _SIGNATURE = b"flwr-public-key", b"flwr-timestamp", b"flwr-signature"
_NOT_ACTIVATED = 2004  # Flower's code, which its SuperNode shows

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Headers = dict[bytes, list[bytes]]


class Refusal(Exception):
    """The rejection of a request: an HTTP status, a sentence, and Flower's code if there is one."""

    def __init__(self, status: int, text: str, code: int | None = None) -> None:
        """Take status, sentence and code."""
        super().__init__(text)
        self.status, self.code = status, code


class Keys(NamedTuple):
    """The accepted keys, and the record of requests.

    Attributes:
        nodes: folder of the admitted nodes' public keys; None to accept every node.
        operators: folder of the operators' public keys.
        reserve: records a random number until a time; False if it is already recorded.
    """

    nodes: Path | None
    operators: Path
    reserve: Reserve


class Door:
    """An ASGI application in front of the SuperLink's."""

    def __init__(self, app: App, keys: Keys, welcome: Callable[[Any], None]) -> None:
        """Take the SuperLink, the keys, and a callback for addresses of authenticated senders."""
        self._app, self._keys, self._welcome = app, keys, welcome

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        try:
            if scope["type"] != "http":
                raise Refusal(404, "Not found.")
            receive, send = await self._checked(scope, receive, send)
        except Refusal as refusal:
            LOG.warning("Refused %s from %s: %s", plain(scope["path"]), scope["client"], refusal)
            return await _answer(send, refusal)
        await self._app(scope, receive, send)

    async def _checked(self, scope: Message, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Return receiver and sender of an authorised request; raise `Refusal` for others."""
        headers: Headers = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        if not re.fullmatch(rb"[\w.:\[\]-]*", b"".join(headers.get(b"host", []))):
            raise Refusal(400, "The host is not a name or address.")
        if re.fullmatch(r"/v1/fleet/[a-z-]+", scope["path"]):
            return await self._from_node(scope, headers, receive), send
        if not _is_local(scope):
            raise Refusal(404, "Not found.")
        if scope["path"].startswith("/v1/control"):
            return await self._from_operator(scope, headers, receive, send)
        return receive, send

    async def _from_node(self, scope: Message, headers: Headers, receive: Receive) -> Receive:
        """Authenticate a node's request."""
        if self._keys.nodes is not None:
            joins = scope["path"].endswith("/activate-node")
            await asyncio.to_thread(_require_node, self._keys, headers, joins)
            self._welcome(scope["client"])
        return _limited(receive, LARGEST)

    async def _from_operator(
        self, scope: Message, headers: Headers, receive: Receive, send: Send
    ) -> tuple[Receive, Send]:
        """Authenticate an operator's request; its content is read after the signature check."""
        header = b" ".join(headers.get(operators.HEADER.encode(), [])).decode("latin-1")
        folder, reserve = self._keys.operators, self._keys.reserve
        request = folder, header, scope["method"], scope["path"], reserve
        try:
            claim = await asyncio.to_thread(operators.verify, *request)
        except ValueError as error:
            raise Refusal(401, f"Only operators may do this: {error}.") from None
        body = await _whole(_limited(receive, LARGEST_CONTROL))
        if hashlib.sha256(body).hexdigest() != claim.digest:
            raise Refusal(401, "Only operators may do this: the content is not what was signed.")
        LOG.info("Operator %s: %s", claim.name, scope["path"])
        return _replayed(body, receive), _until_revoked(claim, send)


def _require_node(keys: Keys, headers: Headers, joins: bool) -> None:
    """Raise `Refusal` unless a request is signed by an admitted node and not a replay."""
    try:
        (key,), (signed,), (signature,) = (headers[name] for name in (_PUBLIC, _TIME, _SIGNATURE))
        pem, signed_at = base64.b64decode(key, validate=True), signed.decode("ascii")
        then = datetime.datetime.fromisoformat(signed_at)
        age = (datetime.datetime.now(datetime.UTC) - then).total_seconds()
        node = _admitted(keys.nodes).get(pem)
        if node is None:
            text = "This node's key is not admitted: run 'simfbo flower admit' on the server."
            raise Refusal(412 if joins else 401, text, _NOT_ACTIVATED)
        proof = base64.b64decode(signature, validate=True)
        node.key.verify(proof, signed, ec.ECDSA(hashes.SHA256()))
    except (KeyError, ValueError, TypeError, binascii.Error, InvalidSignature):
        raise Refusal(401, "The request is not signed by a node.") from None
    if not -EARLY < age < EARLY + LATE:
        raise Refusal(401, f"The node's clock is wrong by {age:.0f} s.")
    purpose = "simfbo node " + hashlib.sha256(pem).hexdigest()
    try:
        is_new = keys.reserve(purpose, signed_at, then.timestamp() + 2 * LATE)
    except Exception:  # any error of the database: the node tries again
        raise Refusal(503, "The SuperLink is busy.") from None
    if not is_new:
        raise Refusal(401, "The request was sent before.")
    _forget_old_key(node.file)


class _Node(NamedTuple):
    """An admitted node: its public key, the key's file, and the key in the node's format."""

    key: ec.EllipticCurvePublicKey
    file: Path
    sent: bytes


def _admitted(folder: Path | None) -> dict[bytes, _Node]:
    """Return the admitted nodes by their public keys, in the format of the requests."""
    assert folder is not None
    nodes = [_node(file, *_version(file)) for file in folder.glob("*.pub")]
    return {node.sent: node for node in nodes if node is not None}


def _version(file: Path) -> tuple[int, int]:
    """Return a version of a file that changes when it is replaced; zeros if it is missing."""
    try:
        return file.stat().st_mtime_ns, file.stat().st_ino
    except OSError:
        return 0, 0


@lru_cache(maxsize=4096)
def _node(file: Path, *version: int) -> _Node | None:
    """Return the node with the public key in a file, cached per version of the file."""
    key = certificates.public_key(file)
    return None if key is None else _Node(key, file, certificates.node_form(file))


def _forget_old_key(file: Path) -> None:
    """Remove a node's previous key some time after its replacement."""
    old = file.with_suffix(".old.pub")
    if 0 < _version(old)[0] < (time.time() - OVERLAP) * 1e9:
        old.unlink(missing_ok=True)


def _is_local(scope: Message) -> bool:
    """Check whether a connection came in on this machine's loopback."""
    try:
        address = ipaddress.ip_address(scope["server"][0])
    except (TypeError, ValueError):
        return False
    return address.is_loopback


def _limited(receive: Receive, largest: int) -> Receive:
    """Return a receiver that disconnects if the content is too long."""
    read = 0

    async def limited() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        return message if read <= largest else {"type": "http.disconnect"}

    return limited


async def _whole(receive: Receive) -> bytes:
    """Read a request's content."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(413, "The content is too long, or was cut off.")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that replays the content, then continues with the original."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


def _until_revoked(claim: operators.Claim, send: Send) -> Send:
    """Return a sender that ends a response as soon as its operator is revoked."""
    ended = False

    async def sender(message: Message) -> None:
        nonlocal ended
        if ended:
            return
        if message["type"] == "http.response.body" and not claim.stands:
            ended, message = True, {"type": "http.response.body", "body": b""}
        await send(message)

    return sender


async def _answer(send: Send, refusal: Refusal) -> None:
    """Send the response to a rejected request, and close the connection."""
    content = {"detail": str(refusal)} | ({} if refusal.code is None else {"code": refusal.code})
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
