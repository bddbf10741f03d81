"""The variables that a run starts from: arrays of floating-point numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.errors import UserError, brief


def variable(tree: PyTree, name: str) -> PyTree:
    """Return an initial variable with numbers, lists of numbers and whole numbers as float arrays.

    Args:
        tree: what the user gave.
        name: what messages call it, "x0" or "y0".

    Example:
        >>> variable([0, 1], "x0").shape
        (2,)
    """
    if isinstance(tree, list) and all(map(_is_number, jax.tree.leaves(tree))):
        tree = _array(tree, name)
    if not jax.tree.leaves(tree):
        raise UserError(f"{name} is {brief(tree)}: give an array, or a pytree of arrays.")
    return jax.tree.map(lambda leaf: _floats(leaf, name), tree)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | np.number)


def _array(numbers: list[Any], name: str) -> np.ndarray:
    """Return nested lists of numbers as an array."""
    try:
        return np.asarray(numbers, jnp.result_type(float))
    except ValueError:
        raise UserError(f"{name} has rows of different lengths: give an array.") from None


def _floats(leaf: Any, name: str) -> Any:
    """Return a leaf as it is if it is of floating-point numbers; converted if it is not."""
    array = leaf if isinstance(leaf, np.ndarray | jax.Array) else np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise UserError(f"{name} holds {brief(leaf)}: give arrays of numbers.")
    if array.dtype.kind in "biu":
        array = np.asarray(array, jnp.result_type(float))
    if not np.isfinite(np.asarray(array)).all():
        raise UserError(f"{name} holds NaN or infinite numbers: start from finite ones.")
    return leaf if array.dtype == getattr(leaf, "dtype", None) else array
