"""Entropy coding of integers that follow a Laplace distribution of known mean and scale.

`Writer` and `Reader` use the range coder of the package constriction (extra `codecs`). Without it,
all integers of a stream have the length that the largest needs. `laplace_bits` estimates the range
coder's output in JAX.

Both sides must compute the same probabilities, so scales are sent as integers e: the scale is
2^(e/2).
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.codec import BadMessage, read_varint, varint
from simfbo.errors import MissingExtra, missing

HAS_RANGE_CODER = importlib.util.find_spec("constriction") is not None
LOWEST, HIGHEST = -12, 40  # exponents of scales
_FIXED, _RANGE = b"\0", b"\1"
MOST = 2**20  # the largest number that is range-coded
_CHUNK = 2**16  # numbers whose bits are handled at a time, a multiple of eight
_STEPS = 2**15  # the largest exponent that is sent


def laplace_bits(distance: jax.Array, scale: Any) -> jax.Array:
    """Return the information content, in bits, of integers at these distances from the mean.

    -log2 of the mass of a Laplace distribution between distance - 1/2 and distance + 1/2, summed.
    """
    rate = 1.0 / scale
    z = jnp.abs(distance)
    edge = jnp.exp(-jnp.abs(z - 0.5) * rate)
    far = jnp.exp(-(z + 0.5) * rate)
    mass = jnp.where(z >= 0.5, 0.5 * (edge - far), 1.0 - 0.5 * (edge + far))
    # The difference of exponentials cancels in the tails; constriction's smallest mass is 2^-24.
    return -jnp.sum(jnp.log2(jnp.maximum(mass, 2.0**-24)))


def exponent(mean: jax.Array) -> jax.Array:
    """Return the exponent of the scale for numbers with this mean absolute value, in JAX."""
    rounded = jnp.round(2.0 * jnp.log2(jnp.maximum(mean, 2.0**-20)))
    return jnp.clip(rounded, LOWEST, HIGHEST).astype(jnp.int32)


def scale_of(exponents: jax.Array) -> jax.Array:
    """Convert exponents to scales, in JAX."""
    return jnp.exp2(0.5 * jnp.clip(exponents, LOWEST, HIGHEST).astype(jnp.float32))


def exact_scale(exponents: np.ndarray) -> np.ndarray:
    """Convert exponents to scales on the host, equal on every machine."""
    e = np.clip(np.asarray(exponents, np.int64), LOWEST, HIGHEST)
    return np.ldexp(np.where(e % 2, 2**0.5, 1.0), e // 2)


def side_bits(exponents: jax.Array) -> jax.Array:
    """Estimate the bits that `Writer.exponents` needs, in JAX."""
    steps = jnp.diff(exponents).astype(jnp.float32)
    if not steps.size:
        return jnp.zeros((), jnp.float32)
    return laplace_bits(steps, scale_of(exponent(jnp.mean(jnp.abs(steps)))))


def fixed_length_bytes(numbers: jax.Array) -> jax.Array:
    """Return the number of bytes of fixed-length coding, in JAX."""
    if not numbers.size:
        return jnp.full((), 2.0)
    low, high = jnp.min(numbers), jnp.max(numbers)
    width = 32 - jax.lax.clz((high - low).astype(jnp.int32))
    folded = 2.0 * jnp.abs(low.astype(jnp.float32)) - (low < 0).astype(jnp.float32)
    head = 2 + sum((folded >= 2.0**bits).astype(jnp.float32) for bits in (7, 14, 21))
    return head + jnp.ceil(numbers.size * width.astype(jnp.float32) / 8)


class Writer:
    """Writes single numbers to a head, and many as one stream of bits."""

    def __init__(self, ranged: bool = HAS_RANGE_CODER) -> None:
        """Choose between the range coder and numbers of fixed length."""
        self._ranged, self._head = ranged, bytearray()
        self._coder = _constriction().stream.queue.RangeEncoder() if ranged else None

    def float32(self, number: Any) -> None:
        """Write a float."""
        self._head += np.asarray(number, "<f4").tobytes()

    def whole(self, number: int) -> None:
        """Write a small integer."""
        self._head += varint(_folded(int(number)))

    def exponents(self, exponents: np.ndarray) -> None:
        """Write exponents as differences, which are small."""
        e = np.asarray(exponents, np.int32)
        steps = np.diff(e)
        unit = int(exponent(jnp.asarray(np.abs(steps).mean() if steps.size else 0.0, jnp.float32)))
        self.whole(int(e[0]))
        self.whole(unit)
        self.numbers(steps, 0.0, exact_scale(np.asarray(unit)))

    def numbers(self, numbers: np.ndarray, mean: Any, scale: Any) -> None:
        """Write integers, given the means and scales of their distribution."""
        k = np.ascontiguousarray(numbers, np.int32).reshape(-1)
        if self._coder is None:
            self._head += _fixed(k)
            return
        largest = int(np.abs(k).max(initial=0))
        if largest >= MOST:
            raise OverflowError
        self.whole(largest)
        self._coder.encode(
            k, _laplace(largest), _broadcast(mean, k.size), _broadcast(scale, k.size)
        )

    def finish(self) -> bytes:
        """Return the encoded bytes."""
        if self._coder is None:
            return _FIXED + bytes(self._head)
        stream = self._coder.get_compressed().astype("<u4").tobytes()
        return _RANGE + varint(len(self._head)) + bytes(self._head) + stream


class Reader:
    """Reads the output of a `Writer`, which is not trusted."""

    def __init__(self, data: bytes) -> None:
        """Parse the head."""
        if data[:1] not in (_FIXED, _RANGE):
            raise BadMessage("numbers in an unknown code")
        self._decoder: Any = None
        self._head, self._at = data[1:], 0
        if data[:1] == _RANGE:
            length, at = read_varint(data, 1)
            self._head, stream = data[at : at + length], data[at + length :]
            if len(stream) % 4:
                raise BadMessage("a truncated stream")
            words = np.frombuffer(stream, "<u4").astype(np.uint32)
            self._decoder = _constriction().stream.queue.RangeDecoder(words)

    @property
    def ranged(self) -> bool:
        """Whether numbers are range-coded."""
        return self._decoder is not None

    def _take(self, count: int) -> bytes:
        if count > len(self._head) - self._at:
            raise BadMessage("a truncated message")
        self._at += count
        return self._head[self._at - count : self._at]

    def float32(self) -> np.ndarray:
        """Read a float."""
        return np.frombuffer(self._take(4), "<f4").astype(np.float32)[0]

    def whole(self) -> int:
        """Read a small integer."""
        folded, self._at = read_varint(self._head, self._at)
        return folded >> 1 if folded % 2 == 0 else -(folded >> 1) - 1

    def exponents(self, count: int) -> np.ndarray:
        """Read exponents."""
        first, unit = self.whole(), self.whole()
        steps = self.numbers(count - 1, 0.0, exact_scale(np.asarray(unit)))
        exponents = np.cumsum([first, *steps.tolist()])
        if np.abs(exponents).max() > _STEPS:
            raise BadMessage("invalid scales")
        return exponents.astype(np.int32)

    def numbers(self, count: int, mean: Any, scale: Any) -> np.ndarray:
        """Read integers, given the means and scales of their distribution."""
        if self._decoder is None:
            return self._fixed(count)
        largest = self.whole()
        if not 0 <= largest < MOST:
            raise BadMessage("numbers that are too large")
        model = _laplace(largest)
        return self._decoder.decode(model, _broadcast(mean, count), _broadcast(scale, count))

    def _fixed(self, count: int) -> np.ndarray:
        low, width = self.whole(), self.whole()
        if not 0 <= width <= 32 or abs(low) >= 2**31:
            raise BadMessage("numbers that are too large")
        numbers = low + unpacked(self._take(-(-count * width // 8)), count, width)
        if count and np.abs(numbers).max() >= 2**31:
            raise BadMessage("numbers that are too large")
        return numbers.astype(np.int32)

    def finish(self) -> None:
        """Raise if bytes are left over."""
        done = self._decoder is None or self._decoder.maybe_exhausted()
        if self._at != len(self._head) or not done:
            raise BadMessage("more bytes than a message has")


def _fixed(k: np.ndarray) -> bytes:
    """Encode integers with as many bits each as the largest needs."""
    low = int(k.min()) if k.size else 0
    shifted = k.astype(np.int64) - low
    width = int(shifted.max(initial=0)).bit_length()
    return varint(_folded(low)) + varint(_folded(width)) + packed(shifted, width)


def packed(numbers: np.ndarray, width: int) -> bytes:
    """Encode non-negative integers with `width` bits each.

    Example:
        >>> packed(np.array([1, 2, 3]), 4).hex()
        '2103'
    """
    chunks = []
    for start in range(0, len(numbers), _CHUNK):
        bits = (numbers[start : start + _CHUNK, None] >> np.arange(width)) & 1
        chunks.append(np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes())
    return b"".join(chunks)


def unpacked(data: bytes, count: int, width: int) -> np.ndarray:
    """Decode `count` integers; the inverse of `packed`."""
    numbers = np.zeros(count, np.int64)
    raw = np.frombuffer(data, np.uint8)
    for start in range(0, count, _CHUNK):
        length = min(_CHUNK, count - start)
        chunk = raw[start * width // 8 :][: -(-length * width // 8)]
        bits = np.unpackbits(chunk, bitorder="little")[: length * width].reshape(length, width)
        numbers[start : start + length] = bits @ (1 << np.arange(width, dtype=np.int64))
    return numbers


def _folded(number: int) -> int:
    """Map integers to non-negative ones: 0, -1, 1, -2, ... to 0, 1, 2, 3."""
    return 2 * number if number >= 0 else -2 * number - 1


def _broadcast(value: Any, count: int) -> np.ndarray:
    """Broadcast a value to `count` float64 numbers."""
    flat = np.broadcast_to(np.asarray(value, np.float64).reshape(-1), (count,))
    return np.ascontiguousarray(flat)


def _laplace(largest: int) -> Any:
    return _constriction().stream.model.QuantizedLaplace(-largest - 1, largest + 1)


def _constriction() -> Any:
    try:
        import constriction
    except ImportError:
        raise MissingExtra(missing("constriction", "codecs")) from None
    return constriction
