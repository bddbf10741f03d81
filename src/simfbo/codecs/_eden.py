"""EDEN: Vargaftik, Ben Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher, "EDEN: Communication-
Efficient and Robust Distributed Mean Estimation for Federated Learning", ICML 2022.

A random rotation makes the numbers of a block nearly normal, whatever their distribution; each is
replaced by the nearest of 2^b centroids of the normal distribution, and the block is scaled so that
the estimate is unbiased over rotations:

    z^ = S R^T q(R z),   S = ||z||^2 / <R z, q(R z)>

R is a random sign for each number and a Walsh-Hadamard transform, twice, in blocks of 1,024; once
does not mix messages that have a few large numbers.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs._entropy import packed, unpacked
from simfbo.codecs._shared_noise import ordered_sum, power_of_two, random_bits, without_fma
from simfbo.codecs.codec import BadMessage, Codec, Shape, cached_by_arguments, floats
from simfbo.errors import UserError

# By bits: the positive Lloyd-Max centroids of the standard normal distribution, and the
# relative variance of the estimate, 1 / (explained share) - 1.
_CENTROIDS = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343910, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
_VARIANCE = {1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.00959}
_BLOCK = 1024
_FEWEST = 256  # smaller arrays are not rotated


class Rotated(NamedTuple):
    """Symbols of a leaf: the scale of each block, and the centroid of each number."""

    scales: Any
    nearest: Any


@cached_by_arguments
def eden(bits: int) -> Codec:
    """EDEN with 1 to 4 bits for each number, and one float32 for each block of 1,024.

    The relative variance is 0.57, 0.13, 0.036 and 0.0096 for 1 to 4 bits, for any input. The
    paper's uniform rotations are exactly unbiased; the error of these vanishes as blocks grow but
    is large for short arrays, so arrays of less than 256 numbers are sent as float32.

    Args:
        bits: for each number.
    """
    if bits not in _CENTROIDS:
        raise UserError(f"eden takes 1, 2, 3 or 4 bits, got {bits}.")
    upper = _CENTROIDS[bits]
    centroids = np.array([-c for c in reversed(upper)] + list(upper), np.float32)
    borders = ((centroids[1:] + centroids[:-1]) / 2).astype(np.float32)

    def quantise(leaf: jax.Array, key: jax.Array) -> Any:
        if leaf.size < _FEWEST:
            return leaf
        count, length = _layout(leaf.size)
        z = jnp.pad(leaf.reshape(-1), (0, count * length - leaf.size)).reshape(count, length)
        unit = power_of_two(jnp.max(jnp.abs(z), 1))[:, None]
        z = z / unit
        first, second = _signs(key, z.shape)
        size = z.shape[1] ** 2  # two transforms without factors scale the squared norm by this
        rotated = _hadamard(_hadamard(z * first) * second)
        norm = ordered_sum(without_fma(rotated * rotated))
        deviation = jnp.sqrt(norm / z.shape[1])
        units = rotated / jnp.where(deviation > 0, deviation, 1.0)[:, None]
        nearest = jnp.sum((units[..., None] > borders).astype(jnp.int32), -1)
        along = ordered_sum(without_fma(rotated * _values(centroids, nearest)))
        scale = norm / size / jnp.where(along > 0, along, 1.0)
        return Rotated(jnp.where(deviation > 0, scale * unit[:, 0], 0.0), nearest)

    def restore(symbols: Any, key: jax.Array, shape: Shape) -> jax.Array:
        if math.prod(shape) < _FEWEST:
            return symbols
        values = _values(centroids, jnp.asarray(symbols.nearest))
        first, second = _signs(key, values.shape)
        back = _hadamard(_hadamard(values) * second) * first
        count = int(np.prod(shape))
        scales = jnp.asarray(symbols.scales)[:, None]
        return without_fma(back * scales).reshape(-1)[:count].reshape(shape)

    def encoded_bytes(shape: Shape) -> int:
        if math.prod(shape) < _FEWEST:
            return 4 * math.prod(shape)
        blocks, size = _layout(int(np.prod(shape)))
        return 4 * blocks + -(-blocks * size * bits // 8)

    def pack(leaf: np.ndarray, symbols: Any, key: jax.Array) -> bytes:
        if leaf.size < _FEWEST:
            return leaf.astype("<f4").tobytes()
        body = packed(symbols.nearest.reshape(-1), bits)
        return np.asarray(symbols.scales, "<f4").tobytes() + body

    def unpack(data: bytes, key: jax.Array, shape: Shape) -> Any:
        if math.prod(shape) < _FEWEST:
            return floats(data, shape)
        blocks, size = _layout(int(np.prod(shape)))
        if len(data) != encoded_bytes(shape):
            raise BadMessage(f"{len(data)} bytes for {blocks} blocks of {size}")
        scales = np.frombuffer(data[: 4 * blocks], "<f4").astype(np.float32)
        nearest = unpacked(data[4 * blocks :], blocks * size, bits)
        return Rotated(scales, nearest.astype(np.int32).reshape(blocks, size))

    name = f"eden({bits})"
    return Codec(
        name,
        True,
        _VARIANCE[bits],
        True,
        quantise,
        restore,
        pack,
        unpack,
        lambda leaf, symbols, key: float(encoded_bytes(leaf.shape)),
    )


def _layout(count: int) -> tuple[int, int]:
    """Return the number and size of blocks; the size is a power of two, the last may be padded."""
    size = min(_BLOCK, 1 << max(0, count - 1).bit_length())
    return -(-count // size), size


def _signs(key: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Return two random signs for each number."""
    bits = random_bits(key, int(np.prod(shape))).reshape(shape)
    first, second = bits & np.uint32(1), bits >> np.uint32(1) & np.uint32(1)
    return 1.0 - 2.0 * first.astype(jnp.float32), 1.0 - 2.0 * second.astype(jnp.float32)


def _hadamard(rows: jax.Array) -> jax.Array:
    """Return the Walsh-Hadamard transform of every row, without its factor 1 / sqrt(size)."""
    blocks, size = rows.shape
    width = 1
    while width < size:
        pairs = rows.reshape(blocks, -1, 2, width)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        rows = jnp.stack([a + b, a - b], 2).reshape(blocks, size)
        width *= 2
    return rows


def _values(centroids: np.ndarray, nearest: jax.Array) -> jax.Array:
    return jnp.asarray(centroids)[nearest]
