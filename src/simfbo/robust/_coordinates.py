"""Rules that combine stacked messages coordinate by coordinate, for `simfbo.robust.aggregation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import Scalar

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Combine = Callable[[list[jax.Array], jax.Array], list[jax.Array]]
Rule = Callable[[jax.Array, jax.Array], jax.Array]
_BLOCK = 512


def flat(leaf: Float[Array, "clients ..."]) -> Float[Array, "clients size"]:
    """Flatten each client's message to a row."""
    return leaf.reshape(len(leaf), -1)


@jax.jit
def weighted_sum(
    leaves: list[Float[Array, "clients ..."]], weights: Float[Array, " clients"]
) -> list[Float[Array, "..."]]:
    """Return sum_i w_i z_i, leaf by leaf."""
    return [jnp.tensordot(weights.astype(leaf.dtype), leaf, 1) for leaf in leaves]


def by_coordinate(rule: Rule) -> Combine:
    """Apply a rule to every coordinate."""

    @jax.jit
    def combine(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        return [by_blocks(rule, leaf, weights) for leaf in leaves]

    return combine


def by_blocks(
    rule: Rule, leaf: Float[Array, "clients ..."], weights: Float[Array, " clients"]
) -> Float[Array, "..."]:
    """Apply rule(stack, weights) to all coordinates, in blocks that fit the cache."""
    rows, weights = flat(leaf), weights.astype(leaf.dtype)
    count, size = rows.shape
    width = max(1, min(_BLOCK, size))
    padded = jnp.pad(rows, ((0, 0), (0, -size % width)))
    blocks = padded.reshape(count, padded.shape[1] // width, width).swapaxes(0, 1)
    combined = jax.lax.map(lambda block: rule(block, weights), blocks)
    return combined.reshape(-1)[:size].reshape(leaf.shape[1:])


def median(
    block: Float[Array, "clients width"], weights: Float[Array, " clients"]
) -> Float[Array, " width"]:
    """Return sum_i w_i times the weighted median."""
    return jnp.sum(weights) * middle(block, weights)


def middle(
    block: Float[Array, "clients width"], weights: Float[Array, " clients"]
) -> Float[Array, " width"]:
    """Return the weighted median: the middle of the values that split the weight in halves.

    Computed by counting, which takes a quarter to a twentieth of the time of XLA's sort on a CPU
    for up to a hundred clients.
    """
    half = jnp.sum(weights) / 2
    slack = 2e-5 * half  # for rounding errors of the sums

    def compare(k: Scalar, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z, (low, high) = block[k], pair
        reached = jnp.sum(jnp.where(block <= z, weights[:, None], 0), 0)
        lower = jnp.where(reached >= half - slack, jnp.minimum(low, z), low)
        return lower, jnp.where(reached > half + slack, jnp.minimum(high, z), high)

    unset = jnp.full(block.shape[1:], jnp.inf, block.dtype)
    low, high = jax.lax.fori_loop(0, len(block), compare, (unset, unset))
    return (low + high) / 2


def trimmed(
    share: float, block: Float[Array, "clients width"], weights: Float[Array, " clients"]
) -> Float[Array, " width"]:
    """Return the weighted mean without the same number of smallest and largest values."""
    positions, present = jnp.arange(len(block))[:, None], weights[:, None] > 0
    # 0.29 * 100 is 28.999999999999996
    cuts = np.array([int(share * count + 1e-9) for count in range(len(block) + 1)])
    count = jnp.sum(present)
    cut = jnp.asarray(cuts, count.dtype)[count]

    def add(k: Scalar, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z = block[k]
        rank = jnp.sum(present & ((block < z) | ((block == z) & (positions < k))), 0)
        included = jnp.where((rank >= cut) & (rank < count - cut), weights[k], 0)
        return sums[0] + included * z, sums[1] + included

    zero = jnp.zeros(block.shape[1:], block.dtype)
    total, weight = jax.lax.fori_loop(0, len(block), add, (zero, zero))
    return jnp.sum(weights) * total / weight
