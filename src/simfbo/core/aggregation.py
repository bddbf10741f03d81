"""Aggregators: how the messages of a cohort are combined, for each of the channels x, y and v.

The weighted mean is the default, and the only one that estimates sum_i p_i z_i without bias. The
others bound the influence of a few broken or hostile clients, at the price of a bias that does not
vanish where honest clients differ: docs/explanation-aggregators.md measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import Point, PyTree, Scalar
from simfbo.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Array, Float

__all__ = ["Aggregator", "clipped_mean", "mean", "median", "trimmed_mean"]

Combine = Callable[[list[jax.Array], jax.Array], list[jax.Array]]
Rule = Callable[[jax.Array, jax.Array], jax.Array]
CHANNELS = Point._fields
_BLOCK = 512


class Aggregator(NamedTuple):
    """A way to combine messages.

    Attributes:
        name: as people call it.
        combine: (leaves of one channel, stacked client by client; weights) -> the combined leaves.
            A client of weight zero counts as absent. None stands for the weighted sum, which needs
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
    return Aggregator("median", _by_coordinate(_median))


def trimmed_mean(share: float) -> Aggregator:
    """Weighted mean of every coordinate, without its largest and smallest values.

    Args:
        share: of P messages, floor(share P) are dropped at either end, coordinate by coordinate.
    """
    if not 0 <= share < 0.5:
        raise UserError(f"The share to trim at either end must lie in [0, 0.5), got {share}.")
    return Aggregator("trimmed-mean", _by_coordinate(partial(_trimmed, share)))


def clipped_mean(norm: float | None = None) -> Aggregator:
    """Weighted mean of messages whose norm, over the whole channel, is clipped first.

    Args:
        norm: the largest norm that a message keeps; by default the median norm of the cohort.
    """
    if norm is not None and not 0 < norm < float("inf"):
        raise UserError(f"The norm to clip to must be positive, got {norm}.")

    @jax.jit
    def combine(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        norms = jnp.sqrt(sum(jnp.sum(jnp.square(_flat(leaf)), 1) for leaf in leaves))
        limit = jnp.nanmedian(jnp.where(weights > 0, norms, jnp.nan)) if norm is None else norm
        shrink = jnp.minimum(1.0, limit / jnp.where(norms > 0, norms, 1.0))
        return _weighted_sum(leaves, weights * shrink)

    return Aggregator("clipped-mean", combine)


def needs_stack(aggregators: Point[Aggregator | None], message: PyTree) -> bool:
    """Return whether messages like this must be kept client by client."""
    channels = set(map(channel, _paths(message)))
    return any(_rule(aggregators, name) is not None for name in channels)


def combine(aggregators: Point[Aggregator | None], stacked: PyTree, weights: np.ndarray) -> PyTree:
    """Combine stacked messages, each channel by its own aggregator; weight zero means absent.

    Channels without an aggregator, and leaves outside the three channels, are summed by weight.
    """
    leaves, structure = jax.tree.flatten(stacked)
    w = jnp.asarray(weights, jnp.result_type(float))
    result, channels = list(leaves), list(map(channel, _paths(stacked)))
    for name in (*CHANNELS, None):
        own = [j for j, of in enumerate(channels) if of == name]
        rule = _rule(aggregators, name) or _weighted_sum
        if own:
            for j, leaf in zip(own, rule([leaves[j] for j in own], w), strict=True):
                result[j] = leaf
    return jax.tree.unflatten(structure, result)


def _rule(aggregators: Point[Aggregator | None], name: str | None) -> Combine | None:
    """Return how a channel is combined; None for the weighted sum."""
    chosen = None if name is None else getattr(aggregators, name)
    return None if chosen is None else chosen.combine


def channel(path: Sequence[Any]) -> str | None:
    """Return the channel of a message's leaf: the first of its names that is x, y or v.

    Example:
        >>> from simfbo.core.problem import Point
        >>> message = (Point(x={"v": 1.0}, v=2.0), 3.0)
        >>> [channel(path) for path, _ in jax.tree.leaves_with_path(message)]
        ['x', 'v', None]
    """
    found = (getattr(key, "name", None) for key in path)
    return next((name for name in found if name in CHANNELS), None)


def _paths(message: PyTree) -> list[Any]:
    return [path for path, _ in jax.tree.leaves_with_path(message)]


def _flat(leaf: Float[Array, "clients ..."]) -> Float[Array, "clients size"]:
    return leaf.reshape(len(leaf), -1)


@jax.jit
def _weighted_sum(
    leaves: list[Float[Array, "clients ..."]], weights: Float[Array, " clients"]
) -> list[Float[Array, "..."]]:
    return [jnp.tensordot(weights.astype(leaf.dtype), leaf, 1) for leaf in leaves]


def _by_coordinate(rule: Rule) -> Combine:
    """Return the combination of every coordinate by a rule."""

    @jax.jit
    def combine(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        return [_by_blocks(rule, leaf, weights) for leaf in leaves]

    return combine


def _by_blocks(
    rule: Rule, leaf: Float[Array, "clients ..."], weights: Float[Array, " clients"]
) -> Float[Array, "..."]:
    """Return rule(stack, weights) on all coordinates, a block that fits the cache at a time."""
    flat, weights = _flat(leaf), weights.astype(leaf.dtype)
    count, size = flat.shape
    width = max(1, min(_BLOCK, size))
    padded = jnp.pad(flat, ((0, 0), (0, -size % width)))
    blocks = padded.reshape(count, padded.shape[1] // width, width).swapaxes(0, 1)
    found = jax.lax.map(lambda block: rule(block, weights), blocks)
    return found.reshape(-1)[:size].reshape(leaf.shape[1:])


def _median(
    block: Float[Array, "clients width"], weights: Float[Array, " clients"]
) -> Float[Array, " width"]:
    """Return the weighted median: the middle of the values that split the weight in halves.

    Counted, not sorted: up to a hundred clients XLA's sort on a CPU takes 4 to 20 times as long.
    """
    half = jnp.sum(weights) / 2
    slack = 2e-5 * half  # halves are found up to rounding

    def look(k: Scalar, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z, (low, high) = block[k], pair
        reached = jnp.sum(jnp.where(block <= z, weights[:, None], 0), 0)
        lower = jnp.where(reached >= half - slack, jnp.minimum(low, z), low)
        return lower, jnp.where(reached > half + slack, jnp.minimum(high, z), high)

    nothing = jnp.full(block.shape[1:], jnp.inf, block.dtype)
    low, high = jax.lax.fori_loop(0, len(block), look, (nothing, nothing))
    return half * (low + high)


def _trimmed(
    share: float, block: Float[Array, "clients width"], weights: Float[Array, " clients"]
) -> Float[Array, " width"]:
    """Return the weighted mean of what is left after the same number goes at either end."""
    places, here = jnp.arange(len(block))[:, None], weights[:, None] > 0
    # 0.29 * 100 is 28.999999999999996
    cuts = np.array([int(share * count + 1e-9) for count in range(len(block) + 1)])
    count = jnp.sum(here)
    cut = jnp.asarray(cuts, count.dtype)[count]

    def look(k: Scalar, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z = block[k]
        rank = jnp.sum(here & ((block < z) | ((block == z) & (places < k))), 0)
        kept = jnp.where((rank >= cut) & (rank < count - cut), weights[k], 0)
        return sums[0] + kept * z, sums[1] + kept

    nothing = jnp.zeros(block.shape[1:], block.dtype)
    total, kept = jax.lax.fori_loop(0, len(block), look, (nothing, nothing))
    return jnp.sum(weights) * total / kept
