"""Codecs of whole messages: one for each channel and direction.

Up, a client's message names its channels (`Point(x=..., y=...)`). Down, the parts of a payload
stand for x, y and v in this order: `Point(x, y, v)`, `(x, y)`, or `(x, y, p)` with any vector in
third place. What belongs to no channel travels as it is, and so do payloads that differ from client
to client.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.codec import (
    BadMessage,
    Codec,
    decode_leaf,
    encode_leaf,
    frame_size,
    framed,
    leaf_key,
    received,
    unframed,
    varint,
)
from simfbo.core import trees
from simfbo.core.keys import Purpose
from simfbo.core.ledger import is_per_client, payload_channels, payload_parts
from simfbo.core.problem import CHANNELS, Point, PyTree, channel
from simfbo.errors import UserError

REQUEST_BYTES = 32  # that travel with a payload: exchange, client step, tau, three step sizes, key
_CHECKSUM = 4


class Codecs(NamedTuple):
    """How messages are coded, by direction and channel; None sends a channel as it is.

    Attributes:
        up: from clients to the server.
        down: from the server to clients.

    Example:
        >>> from simfbo import codecs
        >>> fine = Codecs(up=Point(x=codecs.dithered(0.5)), down=Point(x=codecs.bfloat16()))
        >>> fine.up.x.name, fine.down.y
        ('dithered(0.5)', None)
    """

    up: Point[Codec | None] = Point()
    down: Point[Codec | None] = Point()

    @property
    def names(self) -> dict[str, str | None]:
        """Return the names of the codecs, by direction and channel."""
        return {
            f"{way}.{name}": None if codec is None else codec.name
            for way in self._fields
            for name, codec in getattr(self, way)._asdict().items()
        }

    @property
    def exact_size(self) -> bool:
        """Return whether sizes of messages are known without encoding them."""
        return all(one is None or one.exact_size for one in (*self.up, *self.down))


class Coded(NamedTuple):
    """What arrives of a tree, and what computes in how many bytes."""

    tree: PyTree
    count_bytes: Callable[[], jax.Array]


def relative_to_start(codec: Codec) -> Codec:
    """Send the difference from x0 or y0, which every client makes from the seed; only down.

    Args:
        codec: for the difference.
    """
    return codec._replace(name=f"relative_to_start({codec.name})", relative=True)


def require_consistent(codecs: Codecs) -> None:
    """Raise if codecs cannot be used as they are given."""
    given: list[Any] = [*codecs.up, *codecs.down]
    for one in given:
        if one is not None and not isinstance(one, Codec):
            raise UserError(
                f"A codec is needed for each channel, got {one!r}: use simfbo.codecs, as in "
                "Codecs(up=Point(x=dithered(0.5)))."
            )
    if any(one is not None and one.relative for one in codecs.up):
        raise UserError(
            "relative_to_start is for what goes down: clients send changes, which have no start."
        )


def up_key(key: jax.Array) -> jax.Array:
    """Return the key that an exchange's messages are coded with; each client folds in its own."""
    return jax.random.fold_in(key, int(Purpose.CODED_UP))


def down_key(key: jax.Array) -> jax.Array:
    """Return the key that an exchange's payload is coded with."""
    return jax.random.fold_in(key, int(Purpose.CODED_DOWN))


def code_message(codecs: Codecs, message: PyTree, key: jax.Array) -> Coded:
    """Return what arrives of a client's message, in JAX."""
    # The message must not depend on what is done with it afterwards, not even by rounding.
    message = jax.lax.optimization_barrier(message)
    return _coded(_up(codecs, message), message, key)


def encode_message(codecs: Codecs, message: PyTree, key: jax.Array) -> bytes:
    """Return a client's message as it travels."""
    return _encoded(_up(codecs, message), message, key)


def decode_message(codecs: Codecs, data: bytes, key: jax.Array, like: PyTree) -> PyTree:
    """Return the message in bytes; raise `BadMessage` if there is none."""
    return _decoded(_up(codecs, like), data, key, like)


def code_payload(codecs: Codecs, payload: PyTree, start: PyTree, key: jax.Array) -> Coded:
    """Return what clients receive of a payload, in JAX; `start` is as from `start_of`."""
    rows = _down(codecs, payload)
    found = _coded(rows, _shifted(payload, start, -1.0), key)
    return found._replace(tree=_shifted(found.tree, start, 1.0))


def encode_payload(codecs: Codecs, payload: PyTree, start: PyTree, key: jax.Array) -> bytes:
    """Return a payload as it travels."""
    return _encoded(_down(codecs, payload), _SHIFTED(payload, start, -1.0), key)


def decode_payload(codecs: Codecs, data: bytes, start: PyTree, key: jax.Array, like: PyTree) -> Any:
    """Return the payload in bytes, as clients receive it."""
    return _SHIFTED(_decoded(_down(codecs, like), data, key, like), start, 1.0)


def deliver(
    codecs: Codecs, payload: PyTree, start: Point[PyTree] | None, key: jax.Array
) -> tuple[PyTree, bytes, float]:
    """Encode a payload; return it as clients decode it, its bytes, and how many a client receives.

    Args:
        codecs: how it is coded.
        payload: what is sent.
        start: x0 and y0, for codecs that are relative to them.
        key: of the exchange.
    """
    payload = jax.tree.map(jnp.asarray, payload)
    own, base = down_key(key), trees.on_device(start_of(codecs, payload, start))
    data = encode_payload(codecs, payload, base, own)
    rest = sum(
        leaf.nbytes // max(1, len(leaf))
        for part in jax.tree.leaves(payload, is_leaf=is_per_client) if is_per_client(part)
        for leaf in jax.tree.leaves(part)
    )  # fmt: skip
    return decode_payload(codecs, data, base, own, payload), data, float(len(data) + rest)


def start_of(codecs: Codecs, payload: PyTree, start: Point[PyTree] | None) -> PyTree:
    """Return what is subtracted from the leaves of a payload; None where nothing is.

    Args:
        codecs: some of which are relative.
        payload: what is sent.
        start: x0 and y0; v starts at zero.
    """
    leaves = jax.tree.leaves(payload, is_leaf=is_per_client)
    if not any(one is not None and one.relative for one in codecs.down):
        return [None] * len(leaves)
    if start is None:
        raise UserError(
            "relative_to_start needs to know the start: run the algorithm with simfbo.run, or set "
            "federation.start = Point(x0, y0)."
        )
    found: list[Any] = []
    for j, part in enumerate(payload_parts(payload)):
        own = jax.tree.leaves(part, is_leaf=is_per_client)
        codec = codecs.down[j] if j < 2 and not any(map(is_per_client, own)) else None
        base = [] if codec is None or not codec.relative else jax.tree.leaves(start[j])
        alike = [np.shape(a) for a in own] == [np.shape(b) for b in base]
        found += base if alike else [None] * len(own)
    return found


def _up(codecs: Codecs, message: PyTree) -> list[Codec | None]:
    """Return the codec of each leaf of a message."""
    paths = [path for path, _ in jax.tree.leaves_with_path(message)]
    return _each([channel(path) for path in paths], codecs.up, jax.tree.leaves(message))


def _down(codecs: Codecs, payload: PyTree) -> list[Codec | None]:
    """Return the codec of each leaf of a payload."""
    leaves = jax.tree.leaves(payload, is_leaf=is_per_client)
    return _each(payload_channels(payload), codecs.down, leaves)


def _each(
    names: Sequence[str | None], codecs: Point[Codec | None], leaves: Sequence[Any]
) -> list[Codec | None]:
    """Return the codec of each leaf, by the channel it belongs to."""
    found: list[Codec | None] = [None] * len(leaves)
    for name in CHANNELS:
        own = [
            j for j, of in enumerate(names)
            if of == name and jnp.issubdtype(leaves[j].dtype, jnp.floating)
        ]  # fmt: skip
        codec = getattr(codecs, name)
        if codec is not None:
            for j, one in zip(own, codec.each([leaves[j] for j in own]), strict=True):
                found[j] = one
    return found


def _coded(codecs: list[Codec | None], tree: PyTree, key: jax.Array) -> Coded:
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_per_client)
    found, coded, rest = [], [], float(_CHECKSUM)
    for j, (codec, leaf) in enumerate(zip(codecs, leaves, strict=True)):
        if is_per_client(leaf):
            rest += sum(_width(row) * row[0].size for row in jax.tree.leaves(leaf))
        elif codec is None:
            rest += len(varint(_width(leaf) * leaf.size)) + _width(leaf) * leaf.size
        else:
            leaf, count_bytes = received(codec, jnp.asarray(leaf), leaf_key(key, j))
            coded.append(count_bytes)
        found.append(leaf)

    def weigh_all() -> jax.Array:
        return sum((frame_size(count_bytes()) for count_bytes in coded), jnp.full((), rest))

    return Coded(jax.tree.unflatten(structure, found), weigh_all)


def _encoded(codecs: list[Codec | None], tree: PyTree, key: jax.Array) -> bytes:
    leaves = enumerate(jax.tree.leaves(tree, is_leaf=is_per_client))
    return framed([
        _plain(leaf) if codec is None else encode_leaf(codec, leaf, leaf_key(key, j))
        for codec, (j, leaf) in zip(codecs, leaves, strict=True) if not is_per_client(leaf)
    ])  # fmt: skip


def _decoded(codecs: list[Codec | None], data: bytes, key: jax.Array, like: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(like, is_leaf=is_per_client)
    parts = iter(unframed(data, sum(not is_per_client(leaf) for leaf in leaves)))

    def arrived(j: int, codec: Codec | None, leaf: Any) -> Any:
        if is_per_client(leaf):
            return leaf
        if codec is None:
            return _unplain(next(parts), leaf)
        return decode_leaf(codec, next(parts), leaf_key(key, j), leaf)

    rows = enumerate(zip(codecs, leaves, strict=True))
    return jax.tree.unflatten(structure, [arrived(j, *row) for j, row in rows])


def _plain(leaf: Any) -> bytes:
    """Return an array as it is, little-endian."""
    array = np.asarray(leaf)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _unplain(data: bytes, like: Any) -> np.ndarray:
    if len(data) != _width(like) * like.size:
        raise BadMessage(f"{len(data)} bytes for an array of shape {like.shape}")
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(like.dtype))
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(like.shape)


def _width(leaf: Any) -> int:
    return jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize


def _shifted(tree: PyTree, start: Sequence[Any], sign: float) -> PyTree:
    """Return a tree with its start added or subtracted, where there is one."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_per_client)
    moved = [
        leaf if base is None else leaf + jnp.asarray(sign * base, leaf.dtype)
        for leaf, base in zip(leaves, start, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


_SHIFTED = jax.jit(_shifted)
