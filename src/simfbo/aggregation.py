"""Aggregators: how the messages of a cohort become one, for each of the channels x, y and v.

The weighted mean is the default, and the only one that estimates sum_i p_i z_i without a bias. The
others bound what a few broken or hostile clients can do, and where honest clients differ they pay
for it with a bias that does not vanish: docs/explanation-aggregators.md measures it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.errors import UserError
from simfbo.problem import PyTree

Combine = Callable[[list[jax.Array], jax.Array], list[jax.Array]]
CHANNELS: tuple[str, ...] = ("x", "y", "v")


class Aggregator(NamedTuple):
    """A way to combine messages.

    Attributes:
        name: as people call it.
        combine: (leaves of one channel, stacked client by client; weights) -> the leaves combined.
            None stands for the weighted sum, which needs no stack.
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
    return Aggregator("median", jax.jit(lambda leaves, w: [_median(leaf, w) for leaf in leaves]))


def trimmed_mean(share: float) -> Aggregator:
    """Return the weighted mean without the `share` largest and smallest values of a coordinate.

    Of P messages floor(share P) are left out at either end, coordinate by coordinate.
    """
    if not 0 <= share < 0.5:
        raise UserError(f"The share to trim at either end must lie in [0, 0.5), got {share}.")

    @jax.jit
    def combine(leaves: list[jax.Array], weights: jax.Array) -> list[jax.Array]:
        # 0.29 * 100 is 28.999999999999996
        cut = int(share * len(weights) + 1e-9)
        return [_trimmed(leaf, weights, cut) for leaf in leaves]

    return Aggregator("trimmed-mean", combine)


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
        limit = jnp.median(norms) if norm is None else norm
        shrink = jnp.minimum(1.0, limit / jnp.where(norms > 0, norms, 1.0))
        return [jnp.tensordot((weights * shrink).astype(leaf.dtype), leaf, 1) for leaf in leaves]

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
        """Return the messages combined, each channel in its way."""
        leaves, structure = jax.tree.flatten(stacked)
        weights = np.asarray(weights, jnp.result_type(float))
        result = [jnp.tensordot(jnp.asarray(weights, leaf.dtype), leaf, 1) for leaf in leaves]
        channels = list(map(channel, _paths(stacked)))
        for name in CHANNELS:
            own = [j for j, of in enumerate(channels) if of == name]
            rule = getattr(self, name).combine
            if own and rule is not None:
                for j, leaf in zip(own, rule([leaves[j] for j in own], weights), strict=True):
                    result[j] = leaf
        return jax.tree.unflatten(structure, result)


def channel(path: Sequence[Any]) -> str | None:
    """Return the channel of a message's leaf: the first of its names that is x, y or v.

    Example:
        >>> from simfbo.problem import Point
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


def _sorted(leaf: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a stack sorted coordinate by coordinate, and the weights moved alike."""
    order = jnp.argsort(leaf, 0)
    spread = jnp.broadcast_to(weights.reshape(-1, *[1] * (leaf.ndim - 1)), leaf.shape)
    spread = spread.astype(leaf.dtype)
    return jnp.take_along_axis(leaf, order, 0), jnp.take_along_axis(spread, order, 0)


def _median(leaf: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the weighted median: the middle of the values that split the weight in halves."""
    values, spread = _sorted(leaf, weights)
    before, total = jnp.cumsum(spread, 0), jnp.sum(spread, 0)
    slack = 1e-5 * total  # halves are found up to rounding
    low = jnp.argmax(before >= total / 2 - slack, 0)[None]
    high = jnp.argmax(before > total / 2 + slack, 0)[None]
    pair = [jnp.take_along_axis(values, place, 0)[0] for place in (low, high)]
    return total * (pair[0] + pair[1]) / 2


def _trimmed(leaf: jax.Array, weights: jax.Array, cut: int) -> jax.Array:
    """Return the weighted mean of what is left after `cut` values go at either end."""
    values, spread = _sorted(leaf, weights)
    kept = slice(cut, len(values) - cut)
    mean = jnp.sum(values[kept] * spread[kept], 0) / jnp.sum(spread[kept], 0)
    return jnp.sum(spread, 0) * mean
