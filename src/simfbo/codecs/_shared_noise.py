"""Noise derived from a shared key, and sums that do not depend on the compiler.

Sender, receiver and simulation compile different programs, but decoded values must be equal to the
bit. Sums are therefore added in a fixed order, and a product that is added to something goes
through `without_fma`, since a compiler may otherwise fuse the two and skip a rounding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = np.uint32(0x9E3779B1)
_LANES = 4096  # numbers that are squared and added side by side


def random_bits(key: jax.Array, count: int) -> jax.Array:
    """Return `count` uint32 numbers of 16 random bits each.

    Keyed counters through the finaliser of MurmurHash3, ten times as fast as JAX's generator. The
    bits need to be uniform and uncorrelated, not secret.
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


def without_fma(product: jax.Array) -> jax.Array:
    """Round a product before it is added to anything, at the cost of a bit of precision."""
    return jax.lax.reduce_precision(product, 8, 22)


def ordered_sum(rows: jax.Array) -> jax.Array:
    """Return the sum over the last axis, added in a fixed order."""
    while rows.shape[-1] > 1:
        half = -(-rows.shape[-1] // 2)
        tail = jnp.pad(rows[..., half:], [(0, 0)] * (rows.ndim - 1) + [(0, rows.shape[-1] % 2)])
        rows = rows[..., :half] + tail
    return rows[..., 0] if rows.shape[-1] else jnp.zeros(rows.shape[:-1], rows.dtype)


def root_mean_square(leaf: jax.Array) -> jax.Array:
    """Return the root mean square of a leaf without overflow; zero for an empty one."""
    flat, width = leaf.reshape(-1), max(1, min(_LANES, leaf.size))
    count, unit = leaf.size // width, power_of_two(jnp.max(jnp.abs(flat), initial=0.0))

    def square(part: jax.Array) -> jax.Array:
        return without_fma((part / unit) * (part / unit))

    def add(k: jax.Array, lanes: jax.Array) -> jax.Array:
        return lanes + square(jax.lax.dynamic_slice_in_dim(flat, k * width, width))

    remainder = flat[count * width :]
    lanes = square(jnp.pad(remainder, (0, width - len(remainder))))
    lanes = jax.lax.fori_loop(0, count, add, lanes) if count else lanes
    # Behind a barrier: otherwise it is recomputed for every number that is divided by it.
    total = jax.lax.optimization_barrier(ordered_sum(lanes))
    return unit * jnp.sqrt(total * np.float32(1 / max(1, leaf.size)))


def power_of_two(largest: jax.Array) -> jax.Array:
    """Return the largest power of two that does not exceed each number; one for zero.

    Dividing by it is exact, and keeps squares from overflowing.
    """
    exponent = jax.lax.bitcast_convert_type(largest, jnp.uint32) & np.uint32(0x7F800000)
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    return jnp.where(power > 0, power, 1.0)


def one_if_zero(step: Any) -> Any:
    """Replace a step of zero by one, so that one can divide by it."""
    return jnp.where(step > 0, step, 1.0)
