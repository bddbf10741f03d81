"""A codec: arrays as few bytes, and back.

A codec works leaf by leaf, in two halves. The first is arithmetic in JAX: `quantise` turns a leaf
into symbols, mostly whole numbers, and `restore` turns symbols into the leaf that the receiver has.
The second is exact and runs on the host: `pack` turns symbols into bytes, `unpack` bytes into the
same symbols. So a simulation needs the first half only: `restore(quantise(leaf))` is what arrives,
to the bit, and `size` is how many bytes it would have taken.

Sender and receiver share a key. Whatever is drawn from it (dither, rotations, subsets) costs no
bytes.
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
        relative: whether what is sent is the difference from the start of the run.
        finer: (share) -> the codec for an array that has this share of the numbers of the largest
            array in the channel. Small arrays, such as kernels and biases, cost few bytes and
            matter much. None if it is the same for all.
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
        """Return the codec for each of some arrays that belong together."""
        if self.finer is None:
            return [self] * len(leaves)
        sizes = [max(1, leaf.size) for leaf in leaves]
        return [self.finer(size / max(sizes)) for size in sizes]

    def encode(self, tree: PyTree, key: jax.Array) -> bytes:
        """Return a tree as bytes.

        Args:
            tree: of arrays of floats.
            key: that the receiver has too; another one for every message.
        """
        leaves = list(map(np.asarray, jax.tree.leaves(tree)))
        rows = enumerate(zip(self.each(leaves), leaves, strict=True))
        return framed([encode_leaf(codec, a, leaf_key(key, j)) for j, (codec, a) in rows])

    def decode(self, data: bytes, key: jax.Array, like: PyTree) -> PyTree:
        """Return the tree in bytes that `encode` made; raise `BadMessage` if they are others.

        Args:
            data: the bytes. Nothing in them is trusted: they cannot make the result larger.
            key: that they were encoded with.
            like: a tree of the same shapes and dtypes, which may be abstract.
        """
        leaves, structure = jax.tree.flatten(like)
        parts = enumerate(zip(self.each(leaves), unframed(data, len(leaves)), leaves, strict=True))
        found = [decode_leaf(codec, d, leaf_key(key, j), a) for j, (codec, d, a) in parts]
        return jax.tree.unflatten(structure, found)


def built_once(build: Callable[P, Codec]) -> Callable[P, Codec]:
    """Let a function return the same codec for the same arguments: programs are kept by codec."""
    kept, form = lru_cache(maxsize=1024)(build), signature(build)

    @wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> Codec:
        bound = form.bind(*args, **kwargs)
        bound.apply_defaults()
        return kept(*bound.args, **bound.kwargs)

    return built


def leaf_key(key: jax.Array, number: int) -> jax.Array:
    """Return the key of a leaf."""
    return jax.random.fold_in(key, number)


def received(
    codec: Codec, leaf: jax.Array, key: jax.Array
) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """Return what arrives of a leaf, and what computes its bytes: encode and decode's twin in JAX.

    A leaf that is not finite arrives as not a number, so that the receiver refuses it.
    """
    narrow = leaf.astype(jnp.float32)
    symbols = codec.quantise(narrow, key)
    found = codec.restore(symbols, key, leaf.shape)
    finite = _is_finite(narrow)

    def count_bytes() -> jax.Array:
        size = jnp.asarray(codec.size(narrow, symbols, key), float)
        return jnp.where(finite, 1 + jnp.minimum(size, 4.0 * leaf.size), 1.0)

    return jnp.where(finite, found, jnp.nan).astype(leaf.dtype), count_bytes


def _is_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(jnp.max(jnp.abs(leaf), initial=0.0))


@partial(jax.jit, static_argnums=0)
def _quantised(codec: Codec, leaf: jax.Array, key: jax.Array) -> tuple[Symbols, jax.Array]:
    return codec.quantise(leaf, key), _is_finite(leaf)


@partial(jax.jit, static_argnums=(0, 3))
def _restored(codec: Codec, symbols: Symbols, key: jax.Array, shape: Shape) -> jax.Array:
    return codec.restore(symbols, key, shape)


def encode_leaf(codec: Codec, leaf: Any, key: jax.Array) -> bytes:
    """Return an array as bytes, at most one more than it has as float32."""
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
    found = np.asarray(_restored(codec, symbols, key, narrow.shape))
    return _RAW + found.astype("<f4").tobytes()


def decode_leaf(codec: Codec, data: bytes, key: jax.Array, like: Any) -> np.ndarray:
    """Return the array that was encoded."""
    mode, body, shape = data[:1], data[1:], tuple(like.shape)
    if mode == _NOT_FINITE and not body:
        return np.full(shape, np.nan, like.dtype)
    if mode == _RAW:
        return floats(body, shape).astype(like.dtype)
    if mode != _CODED:
        raise BadMessage("bytes that are no coded array")
    try:
        symbols = codec.unpack(body, key, shape)
    except (ValueError, IndexError, OverflowError, AssertionError) as error:
        text = str(error) if isinstance(error, BadMessage) else "bytes that cannot be decoded"
        if isinstance(error, MissingExtra):
            text = f"range-coded bytes. {error}"
        raise BadMessage(text) from error
    return np.asarray(_restored(codec, symbols, key, shape)).astype(like.dtype)


def floats(body: bytes, shape: Shape) -> np.ndarray:
    """Return an array of 32-bit floats from its bytes."""
    if len(body) != 4 * int(np.prod(shape, dtype=object)):
        raise BadMessage(f"{len(body)} bytes for an array of shape {shape}")
    return np.frombuffer(body, "<f4").astype(np.float32).reshape(shape)


def varint(number: int) -> bytes:
    """Return a whole number in groups of seven bits, the lowest first.

    Example:
        >>> varint(300).hex()
        'ac02'
    """
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a position, and where it ends."""
    found = 0
    for place in range(5):
        if at + place >= len(data):
            break
        octet = data[at + place]
        found |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return found, at + place + 1
    raise BadMessage("a number that does not end")


def framed(parts: list[bytes]) -> bytes:
    """Return several messages in one, with a checksum."""
    body = b"".join(varint(len(part)) + part for part in parts)
    return body + zlib.crc32(body).to_bytes(4, "little")


def unframed(data: bytes, count: int) -> list[bytes]:
    """Return the messages in one; raise `BadMessage` unless they are `count`."""
    body, check = data[:-4], data[-4:]
    if len(data) < 4 or zlib.crc32(body).to_bytes(4, "little") != check:
        raise BadMessage("bytes whose checksum is wrong")
    parts, at = [], 0
    for _ in range(count):
        length, at = read_varint(body, at)
        if length > len(body) - at:
            raise BadMessage("a message that ends too early")
        parts.append(body[at : at + length])
        at += length
    if at != len(body):
        raise BadMessage("more bytes than a message has")
    return parts


def frame_size(encoded_bytes: Any) -> Any:
    """Return the bytes of a part of a frame, with its length, in JAX."""
    return (
        encoded_bytes
        + sum((encoded_bytes >= 2.0**bits).astype(encoded_bytes.dtype) for bits in (7, 14, 21))
        + 1
    )
