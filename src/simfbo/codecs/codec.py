"""A codec: arrays as few bytes, and back.

A codec works leaf by leaf, in two halves. The first is arithmetic in JAX: `quantise` turns a leaf
into symbols, mostly integers, and `restore` turns symbols into the receiver's leaf. The second is
exact and runs on the host: `pack` turns symbols into bytes, and `unpack` bytes into the same
symbols. A simulation therefore needs the first half only: `restore(quantise(leaf))` equals the
decoded message to the bit, and `size` is the number of bytes it would have taken.

Sender and receiver share a key; dither, rotations and subsets drawn from it cost no bytes.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from inspect import signature
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.errors import BadMessage, MissingExtra

Shape = tuple[int, ...]
Symbols = Any
P = ParamSpec("P")
_RAW, _CODED, _NOT_FINITE = b"\0", b"\1", b"\2"


class Codec(NamedTuple):
    """A way to send arrays in few bytes.

    Attributes:
        name: as settings write it, such as "dithered(0.5)".
        unbiased: whether E decode(encode(z)) = z over keys.
        variance: E ||decode(encode(z)) - z||^2 / ||z||^2 over keys, of large arrays; None where it
            depends on z.
        exact_size: whether `size` is exact; otherwise it is the length of an entropy code, which
            the real one exceeds by some bytes.
        quantise: (leaf, key) -> symbols, in JAX; leaves are float32.
        restore: (symbols, key, shape) -> leaf, in JAX.
        pack: (leaf, symbols, key) -> bytes.
        unpack: (bytes, key, shape) -> symbols; raises `BadMessage`.
        size: (leaf, symbols, key) -> the number of bytes, in JAX.
        relative: send the difference from the start of the run.
        finer: (share) -> the codec of an array that has this share of the numbers of the largest
            array in the channel. Small arrays, such as kernels and biases, cost few bytes and
            matter much. None: the same codec for all.
    """

    name: str
    unbiased: bool
    variance: float | None
    exact_size: bool
    quantise: Callable[[jax.Array, jax.Array], Symbols]
    restore: Callable[[Symbols, jax.Array, Shape], jax.Array]
    pack: Callable[[np.ndarray, Symbols, jax.Array], bytes]
    unpack: Callable[[bytes, jax.Array, Shape], Symbols]
    size: Callable[[jax.Array, Symbols, jax.Array], Any]
    relative: bool = False
    finer: Callable[[float], "Codec"] | None = None

    def each(self, leaves: Sequence[Any]) -> list["Codec"]:
        """Return the codec of each array of a channel."""
        if self.finer is None:
            return [self] * len(leaves)
        sizes = [max(1, leaf.size) for leaf in leaves]
        return [self.finer(size / max(sizes)) for size in sizes]

    def encode(self, tree: PyTree, key: jax.Array) -> bytes:
        """Encode a tree of float arrays.

        Args:
            tree: of arrays of floats.
            key: shared with the receiver; a new one for every message.
        """
        leaves = list(map(np.asarray, jax.tree.leaves(tree)))
        rows = enumerate(zip(self.each(leaves), leaves, strict=True))
        return framed([encode_leaf(codec, a, leaf_key(key, j)) for j, (codec, a) in rows])

    def decode(self, data: bytes, key: jax.Array, like: PyTree) -> PyTree:
        """Decode the output of `encode`; raise `BadMessage` for any other bytes.

        Args:
            data: the bytes, not trusted: they cannot make the result larger.
            key: the key they were encoded with.
            like: a tree of the same shapes and dtypes, which may be abstract.
        """
        leaves, structure = jax.tree.flatten(like)
        rows = enumerate(zip(self.each(leaves), unframed(data, len(leaves)), leaves, strict=True))
        decoded = [decode_leaf(codec, body, leaf_key(key, j), a) for j, (codec, body, a) in rows]
        return jax.tree.unflatten(structure, decoded)


def cached_by_arguments(build: Callable[P, Codec]) -> Callable[P, Codec]:
    """Cache a codec's constructor by its arguments, since programs are compiled per codec."""
    cached, parameters = lru_cache(maxsize=1024)(build), signature(build)

    @wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> Codec:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return cached(*bound.args, **bound.kwargs)

    return built


def leaf_key(key: jax.Array, number: int) -> jax.Array:
    """Return the key of a leaf."""
    return jax.random.fold_in(key, number)


def received(
    codec: Codec, leaf: jax.Array, key: jax.Array
) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """Return a leaf as the receiver decodes it, and a function that computes its bytes.

    The equivalent of encode and decode in JAX. A leaf with non-finite numbers becomes NaN, so that
    the receiver rejects it.
    """
    narrow = leaf.astype(jnp.float32)
    symbols = codec.quantise(narrow, key)
    restored = codec.restore(symbols, key, leaf.shape)
    finite = _is_finite(narrow)

    def count_bytes() -> jax.Array:
        size = jnp.asarray(codec.size(narrow, symbols, key), float)
        return jnp.where(finite, 1 + jnp.minimum(size, 4.0 * leaf.size), 1.0)

    return jnp.where(finite, restored, jnp.nan).astype(leaf.dtype), count_bytes


def _is_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(jnp.max(jnp.abs(leaf), initial=0.0))


@partial(jax.jit, static_argnums=0)
def _quantised(codec: Codec, leaf: jax.Array, key: jax.Array) -> tuple[Symbols, jax.Array]:
    return codec.quantise(leaf, key), _is_finite(leaf)


@partial(jax.jit, static_argnums=(0, 3))
def _restored(codec: Codec, symbols: Symbols, key: jax.Array, shape: Shape) -> jax.Array:
    return codec.restore(symbols, key, shape)


def encode_leaf(codec: Codec, leaf: Any, key: jax.Array) -> bytes:
    """Encode an array, in at most one byte more than its float32 form."""
    narrow = np.asarray(leaf, np.float32)
    symbols, finite = _quantised(codec, narrow, key)
    if not finite:
        return _NOT_FINITE
    try:
        body = codec.pack(narrow, jax.tree.map(np.asarray, symbols), key)
        if len(body) < 4 * narrow.size:
            return _CODED + body
    except OverflowError:  # numbers too large for the range coder
        pass
    restored = np.asarray(_restored(codec, symbols, key, narrow.shape))
    return _RAW + restored.astype("<f4").tobytes()


def decode_leaf(codec: Codec, data: bytes, key: jax.Array, like: Any) -> np.ndarray:
    """Decode an array; the inverse of `encode_leaf`."""
    mode, body, shape = data[:1], data[1:], tuple(like.shape)
    if mode == _NOT_FINITE and not body:
        return np.full(shape, np.nan, like.dtype)
    if mode == _RAW:
        return floats(body, shape).astype(like.dtype)
    if mode != _CODED:
        raise BadMessage("bytes that are not a coded array")
    try:
        symbols = codec.unpack(body, key, shape)
    except (ValueError, IndexError, OverflowError, AssertionError) as error:
        text = str(error) if isinstance(error, BadMessage) else "bytes that cannot be decoded"
        if isinstance(error, MissingExtra):
            text = f"range-coded bytes. {error}"
        raise BadMessage(text) from error
    return np.asarray(_restored(codec, symbols, key, shape)).astype(like.dtype)


def floats(body: bytes, shape: Shape) -> np.ndarray:
    """Read an array of 32-bit floats."""
    if len(body) != 4 * int(np.prod(shape, dtype=object)):
        raise BadMessage(f"{len(body)} bytes for an array of shape {shape}")
    return np.frombuffer(body, "<f4").astype(np.float32).reshape(shape)


def varint(number: int) -> bytes:
    """Encode a non-negative integer in groups of seven bits, the lowest first.

    Example:
        >>> varint(300).hex()
        'ac02'
    """
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the integer at a position; return it and the position after it."""
    number = 0
    for offset in range(5):
        if at + offset >= len(data):
            break
        byte = data[at + offset]
        number |= (byte & 0x7F) << 7 * offset
        if byte < 0x80:
            return number, at + offset + 1
    raise BadMessage("an unterminated number")


def framed(parts: list[bytes]) -> bytes:
    """Join messages into one, with a checksum."""
    body = b"".join(varint(len(part)) + part for part in parts)
    return body + zlib.crc32(body).to_bytes(4, "little")


def unframed(data: bytes, count: int) -> list[bytes]:
    """Split a joined message; raise `BadMessage` unless it has `count` parts."""
    body, check = data[:-4], data[-4:]
    if len(data) < 4 or zlib.crc32(body).to_bytes(4, "little") != check:
        raise BadMessage("bytes whose checksum is wrong")
    parts, start = [], 0
    for _ in range(count):
        length, start = read_varint(body, start)
        if length > len(body) - start:
            raise BadMessage("a truncated message")
        parts.append(body[start : start + length])
        start += length
    if start != len(body):
        raise BadMessage("more bytes than a message has")
    return parts


def frame_size(encoded_bytes: Any) -> Any:
    """Return the size of one message inside a frame, with its length prefix, in JAX."""
    return (
        encoded_bytes
        + sum((encoded_bytes >= 2.0**bits).astype(encoded_bytes.dtype) for bits in (7, 14, 21))
        + 1
    )
