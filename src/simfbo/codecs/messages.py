"""Codecs of whole messages: one for each channel and direction.

Up, a client's message names its channels (`Point(x=..., y=...)`). Down, the parts of a payload
stand for x, y and v in this order: `Point(x, y, v)`, `(x, y)`, or `(x, y, p)` with any vector in
third place. Leaves outside the channels are sent unchanged, and so are payloads that differ between
clients.
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

REQUEST_BYTES = 32  # sent with a payload: exchange, client step, tau, three step sizes, key
_CHECKSUM = 4


class Codecs(NamedTuple):
    """How messages are coded, by direction and channel; None sends a channel unchanged.

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
        """The names of the codecs, by direction and channel."""
        return {
            f"{way}.{name}": None if codec is None else codec.name
            for way in self._fields
            for name, codec in getattr(self, way)._asdict().items()
        }

    @property
    def exact_size(self) -> bool:
        """Whether message sizes are known without encoding."""
        return all(codec is None or codec.exact_size for codec in (*self.up, *self.down))


class Coded(NamedTuple):
    """A tree as the receiver decodes it, and a function that computes its bytes."""

    tree: PyTree
    count_bytes: Callable[[], jax.Array]


def relative_to_start(codec: Codec) -> Codec:
    """Send the difference from x0 or y0, which every client derives from the seed; only down.

    Args:
        codec: for the difference.
    """
    return codec._replace(name=f"relative_to_start({codec.name})", relative=True)


def require_consistent(codecs: Codecs) -> None:
    """Raise unless every codec is one, and those up are not relative."""
    values: list[Any] = [*codecs.up, *codecs.down]
    for codec in values:
        if codec is not None and not isinstance(codec, Codec):
            raise UserError(
                f"A codec is needed for each channel, got {codec!r}: use simfbo.codecs, as in "
                "Codecs(up=Point(x=dithered(0.5)))."
            )
    if any(codec is not None and codec.relative for codec in codecs.up):
        raise UserError(
            "relative_to_start is for payloads (down): clients send changes, which have no start."
        )


def up_key(key: jax.Array) -> jax.Array:
    """Return the key for an exchange's messages; each client folds in its own number."""
    return jax.random.fold_in(key, int(Purpose.CODED_UP))


def down_key(key: jax.Array) -> jax.Array:
    """Return the key for an exchange's payload."""
    return jax.random.fold_in(key, int(Purpose.CODED_DOWN))


def code_message(codecs: Codecs, message: PyTree, key: jax.Array) -> Coded:
    """Return a client's message as the server decodes it, in JAX."""
    # Coding must not change how the compiler rounds the message itself.
    message = jax.lax.optimization_barrier(message)
    return _coded(_up(codecs, message), message, key)


def encode_message(codecs: Codecs, message: PyTree, key: jax.Array) -> bytes:
    """Encode a client's message."""
    return _encoded(_up(codecs, message), message, key)


def decode_message(codecs: Codecs, data: bytes, key: jax.Array, like: PyTree) -> PyTree:
    """Decode a client's message; raise `BadMessage` if it is invalid."""
    return _decoded(_up(codecs, like), data, key, like)


def code_payload(codecs: Codecs, payload: PyTree, start: PyTree, key: jax.Array) -> Coded:
    """Return a payload as clients decode it, in JAX; `start` is from `start_of`."""
    rows = _down(codecs, payload)
    coded = _coded(rows, _shifted(payload, start, -1.0), key)
    return coded._replace(tree=_shifted(coded.tree, start, 1.0))


def encode_payload(codecs: Codecs, payload: PyTree, start: PyTree, key: jax.Array) -> bytes:
    """Encode a payload."""
    return _encoded(_down(codecs, payload), _SHIFTED(payload, start, -1.0), key)


def decode_payload(codecs: Codecs, data: bytes, start: PyTree, key: jax.Array, like: PyTree) -> Any:
    """Decode a payload."""
    return _SHIFTED(_decoded(_down(codecs, like), data, key, like), start, 1.0)


def deliver(
    codecs: Codecs, payload: PyTree, start: Point[PyTree] | None, key: jax.Array
) -> tuple[PyTree, bytes, float]:
    """Encode a payload; return its decoded form, its bytes, and how many bytes a client receives.

    Args:
        codecs: the codecs.
        payload: as the method sends it.
        start: x0 and y0, for codecs that are relative to them.
        key: of the exchange.
    """
    payload = jax.tree.map(jnp.asarray, payload)
    payload_key, reference = down_key(key), trees.on_device(start_of(codecs, payload, start))
    data = encode_payload(codecs, payload, reference, payload_key)
    per_client = sum(
        leaf.nbytes // max(1, len(leaf))
        for part in jax.tree.leaves(payload, is_leaf=is_per_client)
        if is_per_client(part)
        for leaf in jax.tree.leaves(part)
    )
    return (
        decode_payload(codecs, data, reference, payload_key, payload),
        data,
        float(len(data) + per_client),
    )


def start_of(codecs: Codecs, payload: PyTree, start: Point[PyTree] | None) -> PyTree:
    """Return the reference that is subtracted from each leaf of a payload; None for no reference.

    Args:
        codecs: some of which may be relative.
        payload: as the method sends it.
        start: x0 and y0; v starts at zero.
    """
    leaves = jax.tree.leaves(payload, is_leaf=is_per_client)
    if not any(codec is not None and codec.relative for codec in codecs.down):
        return [None] * len(leaves)
    if start is None:
        raise UserError(
            "relative_to_start needs the starting point: run the algorithm with simfbo.run, or set "
            "federation.start = Point(x0, y0)."
        )
    references: list[Any] = []
    for j, part in enumerate(payload_parts(payload)):
        part_leaves = jax.tree.leaves(part, is_leaf=is_per_client)
        codec = codecs.down[j] if j < 2 and not any(map(is_per_client, part_leaves)) else None
        reference = [] if codec is None or not codec.relative else jax.tree.leaves(start[j])
        alike = [np.shape(a) for a in part_leaves] == [np.shape(b) for b in reference]
        references += reference if alike else [None] * len(part_leaves)
    return references


def _up(codecs: Codecs, message: PyTree) -> list[Codec | None]:
    paths = [path for path, _ in jax.tree.leaves_with_path(message)]
    return _each([channel(path) for path in paths], codecs.up, jax.tree.leaves(message))


def _down(codecs: Codecs, payload: PyTree) -> list[Codec | None]:
    leaves = jax.tree.leaves(payload, is_leaf=is_per_client)
    return _each(payload_channels(payload), codecs.down, leaves)


def _each(
    names: Sequence[str | None], codecs: Point[Codec | None], leaves: Sequence[Any]
) -> list[Codec | None]:
    """Return the codec of each leaf, by its channel."""
    result: list[Codec | None] = [None] * len(leaves)
    for name in CHANNELS:
        positions = [
            j
            for j, leaf in enumerate(leaves)
            if names[j] == name and jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        codec = getattr(codecs, name)
        if codec is not None:
            chosen = codec.each([leaves[j] for j in positions])
            for j, leaf_codec in zip(positions, chosen, strict=True):
                result[j] = leaf_codec
    return result


def _coded(codecs: list[Codec | None], tree: PyTree, key: jax.Array) -> Coded:
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_per_client)
    decoded, byte_counts, fixed = [], [], float(_CHECKSUM)
    for j, (codec, leaf) in enumerate(zip(codecs, leaves, strict=True)):
        if is_per_client(leaf):
            fixed += sum(_width(row) * row[0].size for row in jax.tree.leaves(leaf))
        elif codec is None:
            fixed += len(varint(_width(leaf) * leaf.size)) + _width(leaf) * leaf.size
        else:
            leaf, count_bytes = received(codec, jnp.asarray(leaf), leaf_key(key, j))
            byte_counts.append(count_bytes)
        decoded.append(leaf)

    def count_all_bytes() -> jax.Array:
        return sum((frame_size(count_bytes()) for count_bytes in byte_counts), jnp.full((), fixed))

    return Coded(jax.tree.unflatten(structure, decoded), count_all_bytes)


def _encoded(codecs: list[Codec | None], tree: PyTree, key: jax.Array) -> bytes:
    leaves = enumerate(jax.tree.leaves(tree, is_leaf=is_per_client))
    return framed(
        [
            _plain(leaf) if codec is None else encode_leaf(codec, leaf, leaf_key(key, j))
            for codec, (j, leaf) in zip(codecs, leaves, strict=True)
            if not is_per_client(leaf)
        ]
    )


def _decoded(codecs: list[Codec | None], data: bytes, key: jax.Array, like: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(like, is_leaf=is_per_client)
    parts = iter(unframed(data, sum(not is_per_client(leaf) for leaf in leaves)))

    def decode(j: int, codec: Codec | None, leaf: Any) -> Any:
        if is_per_client(leaf):
            return leaf
        if codec is None:
            return _unplain(next(parts), leaf)
        return decode_leaf(codec, next(parts), leaf_key(key, j), leaf)

    rows = enumerate(zip(codecs, leaves, strict=True))
    return jax.tree.unflatten(structure, [decode(j, *row) for j, row in rows])


def _plain(leaf: Any) -> bytes:
    """Encode an array without a codec, little-endian."""
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
    """Add `sign` times the reference to each leaf that has one."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_per_client)
    moved = [
        leaf if reference is None else leaf + jnp.asarray(sign * reference, leaf.dtype)
        for leaf, reference in zip(leaves, start, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


_SHIFTED = jax.jit(_shifted)
