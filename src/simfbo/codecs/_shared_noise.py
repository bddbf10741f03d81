"""What sender and receiver draw alike from a key, and sums that are the same everywhere.

Decoded values must not depend on how a program was compiled: sender, receiver and simulation
compile different ones. Sums are therefore added in a fixed order, and a product that is added to
something goes through `settled`, since a compiler may otherwise skip its rounding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = np.uint32(0x9E3779B1)
_LANES = 4096  # numbers that are squared and added side by side


def random_bits(key: jax.Array, count: int) -> jax.Array:
    """Return `count` whole numbers of 16 random bits, in 32.

    Keyed counters through the finaliser of MurmurHash3: a tenth of the time that JAX's generator
    takes. They must not hide anything, only be uniform and uncorrelated.
    """
    words = jax.random.key_data(key).reshape(-1)
    h = (jnp.arange(count, dtype=jnp.uint32) + words[0]) * _GOLDEN ^ words[-1]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h >> np.uint32(16)


def dither(key: jax.Array, shape: tuple[int, ...], bits: int = 16) -> jax.Array:
    """Return numbers uniform over 2^bits levels in (-1/2, 1/2), symmetric around zero."""
    count = int(np.prod(shape))
    levels = random_bits(key, count) >> np.uint32(16 - bits)
    return ((levels.astype(jnp.float32) + 0.5) / 2.0**bits - 0.5).reshape(shape)


def settled(product: jax.Array) -> jax.Array:
    """Return a product, rounded before anything is added to it; a bit less precise."""
    return jax.lax.reduce_precision(product, 8, 22)


def ordered_sum(rows: jax.Array) -> jax.Array:
    """Return the sum over the last axis, added in an order that does not depend on the compiler."""
    while rows.shape[-1] > 1:
        half = -(-rows.shape[-1] // 2)
        tail = jnp.pad(rows[..., half:], [(0, 0)] * (rows.ndim - 1) + [(0, rows.shape[-1] % 2)])
        rows = rows[..., :half] + tail
    return rows[..., 0] if rows.shape[-1] else jnp.zeros(rows.shape[:-1], rows.dtype)


def root_mean_square(leaf: jax.Array) -> jax.Array:
    """Return the root mean square of a leaf, of any size of numbers; zero of an empty one."""
    flat, width = leaf.reshape(-1), max(1, min(_LANES, leaf.size))
    count, unit = leaf.size // width, power_of_two(jnp.max(jnp.abs(flat), initial=0.0))

    def square(part: jax.Array) -> jax.Array:
        return settled((part / unit) * (part / unit))

    def add(k: jax.Array, lanes: jax.Array) -> jax.Array:
        return lanes + square(jax.lax.dynamic_slice_in_dim(flat, k * width, width))

    rest = flat[count * width :]
    lanes = square(jnp.pad(rest, (0, width - len(rest))))
    lanes = jax.lax.fori_loop(0, count, add, lanes) if count else lanes
    # Alone, or compilers compute it again for every number that is divided by it.
    total = jax.lax.optimization_barrier(ordered_sum(lanes))
    return unit * jnp.sqrt(total * np.float32(1 / max(1, leaf.size)))


def power_of_two(largest: jax.Array) -> jax.Array:
    """Return the largest power of two that is not above some numbers; one for zero.

    Dividing by it is exact, however a compiler does it, and keeps squares from overflowing.
    """
    bits = jax.lax.bitcast_convert_type(largest, jnp.uint32) & np.uint32(0x7F800000)
    found = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(found > 0, found, 1.0)


def safe(step: Any) -> Any:
    """Return a step that one can divide by; where it is zero everything else is, too."""
    return jnp.where(step > 0, step, 1.0)
