"""Metrics by class and by group."""

import jax
import jax.numpy as jnp
import numpy as np


def by_class(found: np.ndarray, target: np.ndarray, classes: int) -> np.ndarray:
    """Return the accuracy on every class; NaN for classes without samples.

    Example:
        >>> by_class(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
        [0.5, 1.0]
    """
    correct = np.bincount(target, weights=found == target, minlength=classes)
    count = np.bincount(target, minlength=classes)
    return np.where(count > 0, correct / np.maximum(count, 1), np.nan)


def group_means(values: jax.Array, groups: jax.Array, count: int, empty: float = 0.0) -> jax.Array:
    """Return the mean of the values in every group; `empty` for groups without values."""
    one_hot = jax.nn.one_hot(groups, count, dtype=values.dtype)
    sizes = one_hot.sum(0)
    return jnp.where(sizes > 0, values @ one_hot / jnp.maximum(sizes, 1.0), empty)
