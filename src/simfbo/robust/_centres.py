"""Rules that move a centre towards stacked messages, for `simfbo.robust.aggregation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from simfbo.core.problem import Scalar
from simfbo.robust._coordinates import by_blocks, flat, middle, weighted_sum

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Step = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def moved_centre(
    step: Step,
    iterations: int,
    leaves: list[Float[Array, "clients ..."]],
    weights: Float[Array, " clients"],
) -> list[Float[Array, "..."]]:
    """Return sum_i w_i times the centre c after the iteration c <- c + sum_i b_i (z_i - c).

    Args:
        step: (distances of the messages, their median at the start, unit of both) -> b_i.
        iterations: the number of steps.
        leaves: of one channel, stacked client by client.
        weights: of the clients.
    """
    wide = [leaf.astype(weights.dtype) for leaf in leaves]
    start = [by_blocks(middle, leaf, weights) for leaf in wide]
    unit = or_one(_median_of(_largest(wide, start), weights))
    median_distance = _median_of(_distances(wide, start, unit), weights)

    def move(_: Scalar, centre: list[jax.Array]) -> list[jax.Array]:
        pull = step(_distances(wide, centre, unit), median_distance, unit)
        pulled, rest = weighted_sum(wide, pull), 1 - jnp.sum(pull)
        return [sums + rest * c for sums, c in zip(pulled, centre, strict=True)]

    centre = jax.lax.fori_loop(0, iterations, move, start)
    total, pairs = jnp.sum(weights), zip(centre, leaves, strict=True)
    return [(total * c).astype(leaf.dtype) for c, leaf in pairs]


def _distances(
    leaves: list[Float[Array, "clients ..."]], centre: list[Float[Array, "..."]], unit: Scalar
) -> Float[Array, " clients"]:
    """Return ||z_i - c|| over all leaves, divided by a unit that keeps squares from overflowing."""
    pairs = zip(leaves, centre, strict=True)
    return jnp.sqrt(sum(jnp.sum(jnp.square(flat(z - c) / unit), 1) for z, c in pairs))


def _largest(
    leaves: list[Float[Array, "clients ..."]], centre: list[Float[Array, "..."]]
) -> Float[Array, " clients"]:
    """Return the largest coordinate of each |z_i - c|, over all leaves."""
    pairs = zip(leaves, centre, strict=True)
    gaps = [jnp.max(jnp.abs(flat(z - c)), 1, initial=0) for z, c in pairs]
    return jnp.max(jnp.stack(gaps), 0)


def _median_of(
    values: Float[Array, " clients"], weights: Float[Array, " clients"]
) -> Float[Array, ""]:
    return middle(values[:, None], weights)[0]


def shrink(distances: Float[Array, " clients"], limit: Scalar) -> Float[Array, " clients"]:
    """Return min(1, limit / distance), defined as 1 where both are zero."""
    far = distances > limit
    return jnp.where(far, limit / jnp.where(far, distances, 1), 1)


def or_one(value: Float[Array, ""]) -> Float[Array, ""]:
    """Replace zero by one, for divisions."""
    return jnp.where(value > 0, value, 1)
