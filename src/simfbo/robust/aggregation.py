"""Aggregators: how the messages of a cohort are combined, for each of the channels x, y and v.

The weighted mean is the default, and the only one that estimates sum_i p_i z_i without bias. The
others bound the influence of a few broken or hostile clients, at the price of a bias that does not
vanish where honest clients differ: docs/explanation-aggregators.md measures it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simfbo.core.problem import CHANNELS, Point, PyTree, channel
from simfbo.errors import UserError
from simfbo.robust import _coordinates
from simfbo.robust._centres import moved_centre, or_one, shrink
from simfbo.robust._coordinates import Combine, by_coordinate, flat, weighted_sum

__all__ = [
    "Aggregator",
    "centred_clipping",
    "clipped_mean",
    "geometric_median",
    "mean",
    "median",
    "trimmed_mean",
]


class Aggregator(NamedTuple):
    """A way to combine messages.

    Attributes:
        name: shown in reports.
        combine: (leaves of one channel, stacked client by client; weights) -> the combined leaves.
            A client of weight zero counts as absent. None: the weighted sum, which needs
            no stack.
    """

    name: str
    combine: Combine | None


def mean() -> Aggregator:
    """Weighted mean, sum_i w_i z_i."""
    return Aggregator("mean", None)


def median() -> Aggregator:
    """Weighted median of every coordinate, times sum_i w_i.

    Example:
        >>> import jax.numpy as jnp
        >>> stack, weights = jnp.array([[1.0], [2.0], [90.0]]), jnp.full(3, 1 / 3)
        >>> float(median().combine([stack], weights)[0][0])
        2.0
    """
    return Aggregator("median", by_coordinate(_coordinates.median))


def trimmed_mean(share: float) -> Aggregator:
    """Weighted mean of every coordinate, without its largest and smallest values.

    Args:
        share: of P messages, floor(share P) are dropped at either end, coordinate by coordinate.
    """
    if not 0 <= share < 0.5:
        raise UserError(f"The share to trim at either end must lie in [0, 0.5), got {share}.")
    return Aggregator("trimmed-mean", by_coordinate(partial(_coordinates.trimmed, share)))


def clipped_mean(norm: float | None = None) -> Aggregator:
    """Weighted mean of messages whose norm, over the whole channel, is clipped first.

    Args:
        norm: the largest norm that a message keeps; by default the median norm of the cohort.
    """
    if norm is not None and not 0 < norm < float("inf"):
        raise UserError(f"The norm to clip to must be positive, got {norm}.")

    @jax.jit
    def combine(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        wide = (flat(leaf).astype(weights.dtype) for leaf in leaves)
        norms = jnp.sqrt(sum(jnp.sum(jnp.square(rows), 1) for rows in wide))
        limit = jnp.nanmedian(jnp.where(weights > 0, norms, jnp.nan)) if norm is None else norm
        return weighted_sum(leaves, weights * shrink(norms, limit))

    return Aggregator("clipped-mean", combine)


def geometric_median(iterations: int = 8, smoothing: float = 1e-6) -> Aggregator:
    """Weighted geometric median of the whole channel, times sum_i w_i.

    It minimises sum_i w_i ||z_i - c|| over c. RFA: Pillutla, Kakade, Harchaoui, "Robust Aggregation
    for Federated Learning", IEEE Transactions on Signal Processing 2022. A step of its smoothed
    Weiszfeld algorithm is

        c <- sum_i b_i z_i / sum_i b_i,     b_i = w_i / max(s, ||z_i - c||)

    The paper starts from the mean; a few steps do not return from there if some messages are huge,
    so c starts from the coordinate-wise median here.

    Args:
        iterations: the number of steps.
        smoothing: s, as a share of the median distance of messages from the start.
    """
    _require_iterations(iterations)
    if not 0 < smoothing < 1:
        raise UserError(f"The smoothing must lie in (0, 1), got {smoothing}.")

    @jax.jit
    def combine(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        def step(distances: jax.Array, median_distance: jax.Array, unit: jax.Array) -> jax.Array:
            pull = weights * shrink(distances, smoothing * median_distance)
            return pull / or_one(jnp.sum(pull))

        return moved_centre(step, iterations, leaves, weights)

    return Aggregator("geometric-median", combine)


def centred_clipping(radius: float | None = None, iterations: int = 8) -> Aggregator:
    """Centre that no message pulls by more than a radius, over the whole channel, times sum_i w_i.

    Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021:

        c <- c + sum_i w_i min(1, r / ||z_i - c||) (z_i - c) / sum_i w_i

    The paper starts from the last round's result. Aggregators are stateless here, so c starts from
    the coordinate-wise median.

    Args:
        radius: r; by default the median distance of messages from the start.
        iterations: the number of steps.
    """
    _require_iterations(iterations)
    if radius is not None and not 0 < radius < float("inf"):
        raise UserError(f"The radius to clip to must be positive, got {radius}.")

    @jax.jit
    def combine(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        def step(distances: jax.Array, median_distance: jax.Array, unit: jax.Array) -> jax.Array:
            limit = median_distance if radius is None else radius / unit
            return weights * shrink(distances, limit) / or_one(jnp.sum(weights))

        return moved_centre(step, iterations, leaves, weights)

    return Aggregator("centred-clipping", combine)


def needs_stack(aggregators: Point[Aggregator | None], message: PyTree) -> bool:
    """Check whether messages of this structure must be kept client by client."""
    channels = set(map(channel, _paths(message)))
    return any(_rule(aggregators, name) is not None for name in channels)


def combine(aggregators: Point[Aggregator | None], stacked: PyTree, weights: Any) -> PyTree:
    """Combine stacked messages, each channel by its own aggregator; weight zero means absent.

    Channels without an aggregator, and leaves outside the channels, are summed by weight.
    """
    leaves, structure = jax.tree.flatten(stacked)
    w = jnp.asarray(weights, jnp.result_type(float))
    result, channels = list(leaves), list(map(channel, _paths(stacked)))
    for name in (*CHANNELS, None):
        positions = [j for j, channel_name in enumerate(channels) if channel_name == name]
        rule = _rule(aggregators, name) or weighted_sum
        if positions:
            for j, leaf in zip(positions, rule([leaves[j] for j in positions], w), strict=True):
                result[j] = leaf
    return jax.tree.unflatten(structure, result)


def _rule(aggregators: Point[Aggregator | None], name: str | None) -> Combine | None:
    """Return the aggregation rule of a channel; None for the weighted sum."""
    chosen = None if name is None else getattr(aggregators, name)
    return None if chosen is None else chosen.combine


def _paths(message: PyTree) -> list[Any]:
    return [path for path, _ in jax.tree.leaves_with_path(message)]


def _require_iterations(iterations: int) -> None:
    if iterations < 1:
        raise UserError(f"The number of iterations must be at least 1, got {iterations}.")
