"""Aggregators: how the messages of a cohort become one, for each of the channels x, y and v.

The weighted mean is the default, and the only one that estimates sum_i p_i z_i without a bias. The
others bound what a few broken or hostile clients can do, and where honest clients differ they pay
for it with a bias that does not vanish: docs/explanation-aggregators.md measures it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.errors import UserError

Combine = Callable[[list[jax.Array], jax.Array], list[jax.Array]]
Rule = Callable[[jax.Array, jax.Array], jax.Array]
CHANNELS: tuple[str, ...] = ("x", "y", "v")
_BLOCK = 512


class Aggregator(NamedTuple):
    """A way to combine messages.

    Attributes:
        name: as people call it.
        combine: (leaves of one channel, stacked client by client; weights) -> the leaves combined.
            A client of weight zero is not there. None stands for the weighted sum, which needs no
            stack.
    """

    name: str
    combine: Combine | None


def mean() -> Aggregator:
    """Return the weighted mean, sum_i w_i z_i."""
    return Aggregator("mean", None)


def median() -> Aggregator:
    """Return the median of every coordinate, weighted, times sum_i w_i.

    Example:
        >>> import jax.numpy as jnp
        >>> stack, weights = jnp.array([[1.0], [2.0], [90.0]]), jnp.full(3, 1 / 3)
        >>> float(median().combine([stack], weights)[0][0])
        2.0
    """
    return Aggregator("median", _by_coordinate(_median))


def trimmed_mean(share: float) -> Aggregator:
    """Return the weighted mean without the `share` largest and smallest values of a coordinate.

    Of P messages floor(share P) are left out at either end, coordinate by coordinate.
    """
    if not 0 <= share < 0.5:
        raise UserError(f"The share to trim at either end must lie in [0, 0.5), got {share}.")
    return Aggregator("trimmed-mean", _by_coordinate(partial(_trimmed, share)))


def clipped_mean(norm: float | None = None) -> Aggregator:
    """Return the weighted mean of messages scaled down to a norm, over all of the channel.

    Args:
        norm: what a message may weigh at most; by default the median norm of the cohort.

    Returns:
        The aggregator.
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


class Aggregators(NamedTuple):
    """An aggregator for each channel; leaves of a message outside the three are averaged."""

    x: Aggregator = mean()
    y: Aggregator = mean()
    v: Aggregator = mean()

    def need_stack(self, message: PyTree) -> bool:
        """Return whether a message like this must be kept client by client."""
        channels = set(map(channel, _paths(message)))
        return any(getattr(self, c).combine is not None for c in CHANNELS if c in channels)

    def combine(self, stacked: PyTree, weights: np.ndarray) -> Any:
        """Return the messages combined, each channel in its way; weight zero is not there."""
        leaves, structure = jax.tree.flatten(stacked)
        w = jnp.asarray(weights, jnp.result_type(float))
        result, channels = list(leaves), list(map(channel, _paths(stacked)))
        for name in (*CHANNELS, None):
            own = [j for j, of in enumerate(channels) if of == name]
            rule = getattr(self, name or "", mean()).combine or _weighted_sum
            if own:
                for j, leaf in zip(own, rule([leaves[j] for j in own], w), strict=True):
                    result[j] = leaf
        return jax.tree.unflatten(structure, result)


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


def _flat(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(len(leaf), -1)


@jax.jit
def _weighted_sum(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
    return [jnp.tensordot(weights.astype(leaf.dtype), leaf, 1) for leaf in leaves]


def _by_coordinate(rule: Rule) -> Combine:
    """Return the combination of every coordinate by a rule."""

    @jax.jit
    def combine(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        return [_by_blocks(rule, leaf, weights) for leaf in leaves]

    return combine


def _by_blocks(rule: Rule, leaf: jax.Array, weights: jax.Array) -> jax.Array:
    """Return rule(stack, weights) on all coordinates, a block that fits the cache at a time."""
    flat, weights = _flat(leaf), weights.astype(leaf.dtype)
    count, size = flat.shape
    width = max(1, min(_BLOCK, size))
    padded = jnp.pad(flat, ((0, 0), (0, -size % width)))
    blocks = padded.reshape(count, padded.shape[1] // width, width).swapaxes(0, 1)
    found = jax.lax.map(lambda block: rule(block, weights), blocks)
    return found.reshape(-1)[:size].reshape(leaf.shape[1:])


def _median(block: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the weighted median: the middle of the values that split the weight in halves.

    Counted, not sorted: up to a hundred clients XLA's sort on a CPU takes 4 to 20 times as long.
    """
    half = jnp.sum(weights) / 2
    slack = 2e-5 * half  # halves are found up to rounding

    def look(k: Any, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z, (low, high) = block[k], pair
        reached = jnp.sum(jnp.where(block <= z, weights[:, None], 0), 0)
        lower = jnp.where(reached >= half - slack, jnp.minimum(low, z), low)
        return lower, jnp.where(reached > half + slack, jnp.minimum(high, z), high)

    nothing = jnp.full(block.shape[1:], jnp.inf, block.dtype)
    low, high = jax.lax.fori_loop(0, len(block), look, (nothing, nothing))
    return half * (low + high)


def _trimmed(share: float, block: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the weighted mean of what is left after the same number goes at either end."""
    places, here = jnp.arange(len(block))[:, None], weights[:, None] > 0
    # 0.29 * 100 is 28.999999999999996
    cuts = np.array([int(share * count + 1e-9) for count in range(len(block) + 1)])
    count = jnp.sum(here)
    cut = jnp.asarray(cuts, count.dtype)[count]

    def look(k: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        z = block[k]
        rank = jnp.sum(here & ((block < z) | ((block == z) & (places < k))), 0)
        kept = jnp.where((rank >= cut) & (rank < count - cut), weights[k], 0)
        return sums[0] + kept * z, sums[1] + kept

    nothing = jnp.zeros(block.shape[1:], block.dtype)
    total, kept = jax.lax.fori_loop(0, len(block), look, (nothing, nothing))
    return jnp.sum(weights) * total / kept
