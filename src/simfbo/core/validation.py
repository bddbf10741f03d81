"""Validation of losses, samples and starting points."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.errors import UserError, brief, plain

PyTree = Any
_MAX_SIZES = 6  # tried for each axis
_NOT_NUMBERS = "OSUMm"  # kinds of dtypes: objects, texts, dates


class _Unquoted(str):
    """A string without quotes in the representation of a pytree."""

    __repr__ = str.__str__


def call_loss(loss: Callable[..., Any], x: PyTree, y: PyTree, batch: PyTree) -> Any:
    """Compute `loss(x, y, batch)`; raise with the shapes if it fails or is not a scalar.

    The checks run while the loss is traced, and have no cost in a compiled program.
    """
    name = getattr(loss, "__name__", "<lambda>")
    name = "A loss" if name == "<lambda>" else f"The loss '{name}'"
    try:
        value = loss(x, y, batch)
    except UserError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        reason = plain(str(error).split("\n")[0].rstrip("."), 200)
        if isinstance(error, jax.errors.JAXTypeError):
            reason += " (write it with jax.numpy, on arrays throughout)"
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), (x, y, batch)
        )
        texts = jax.tree.map(lambda a: _Unquoted(f"{a.dtype}{list(a.shape)}"), shapes)
        x_text, y_text, batch_text = (plain(str(text), 150) for text in texts)
        raise UserError(
            f"{name} fails: {reason}. Here x0 is {x_text}, y0 {y_text}, the samples {batch_text}"
            f"{_suggested_shape(loss, *shapes)}."
        ) from error
    if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
        got = f"shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
        raise UserError(f"{name} must return one number, a mean over samples: got {got}.")
    return value


def _suggested_shape(loss: Callable[..., Any], x: PyTree, y: PyTree, batch: PyTree) -> str:
    """Suggest a shape of y0, or else of x0, if there is only one for which a loss is a scalar."""

    def works(x: PyTree, y: PyTree) -> bool:
        try:
            return jax.eval_shape(loss, x, y, batch).shape == ()
        except Exception:  # a user's loss can raise anything
            return False

    sizes = sorted({n for leaf in jax.tree.leaves((x, y, batch)) for n in leaf.shape if n > 1})
    for name, old in (("y0", y), ("x0", x)):
        if not isinstance(old, jax.ShapeDtypeStruct):  # a pytree
            continue
        for axes in dict.fromkeys((min(old.ndim, 2), 1, 2)):
            shapes = list(product(sizes[:_MAX_SIZES], repeat=axes))
            arrays = [jax.ShapeDtypeStruct(shape, old.dtype) for shape in shapes]
            valid = [a.shape for a in arrays if (works(x, a) if name == "y0" else works(a, y))]
            if len(valid) == 1:
                return f": {name} must be of shape {valid[0]}"
    return ""


def require_arrays(samples: PyTree, whose: str) -> None:
    """Raise unless samples are arrays of numbers with at least one axis."""
    for array in map(_as_array, jax.tree.leaves(samples)):
        if array.dtype.kind in _NOT_NUMBERS:
            raise UserError(f"{whose} hold text, dates or objects: convert them to numbers.")
        if not array.shape:
            raise UserError(
                f"{whose} hold single numbers: give arrays, with the sample along the first axis."
            )


def require_alike(parts: Sequence[PyTree], clients: Sequence[int], name: str) -> None:
    """Raise unless all clients' samples have the same structure, kind of numbers and features.

    Args:
        parts: the clients' samples.
        clients: the clients' numbers.
        name: of the samples, "lower" or "upper".
    """

    def form(samples: PyTree) -> Hashable:
        arrays = map(_as_array, jax.tree.leaves(samples))
        kinds = tuple((array.dtype.kind, array.shape[1:]) for array in arrays)
        return jax.tree.structure(samples), kinds

    for client, part in zip(clients, parts, strict=False):
        require_arrays(part, f"Client {client}'s {name} samples")
    forms = [form(part) for part in parts]
    usual = Counter(forms).most_common(1)[0][0]
    for client, part, part_form in zip(clients, parts, forms, strict=False):
        if part_form != usual:
            others = describe_samples(parts[forms.index(usual)])
            raise UserError(
                f"Client {client}'s {name} samples are {describe_samples(part)}, the others' "
                f"{others}: give every client the same features, in the same types."
            )


def describe_samples(samples: PyTree) -> str:
    """Describe the structure, types and shapes of n samples.

    Example:
        >>> describe_samples((np.ones((3, 2)), np.arange(3)))
        '(float64 (n, 2), int64 (n,))'
    """

    def text(leaf: Any) -> _Unquoted:
        array = _as_array(leaf)
        return _Unquoted(f"{array.dtype} {('n', *array.shape[1:])}".replace("'n'", "n"))

    return str(jax.tree.map(text, samples))


def rows_not_finite(samples: PyTree) -> np.ndarray:
    """Find the rows with NaN or infinite numbers; fast if there are none."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(samples)]
    floats = [array for array in arrays if array.dtype.kind == "f" and array.size]
    # The extremes of an array with NaN are NaN.
    bad = [a for a in floats if not (np.isfinite(a.min()) and np.isfinite(a.max()))]
    rows = [~np.isfinite(array.reshape(len(array), -1)).all(1) for array in bad]
    return np.flatnonzero(np.any(rows, axis=0)) if rows else np.zeros(0, int)


def variable(tree: PyTree, name: str) -> PyTree:
    """Convert a starting point to arrays of floating-point numbers.

    Args:
        tree: an array, a number, a list of numbers, or a pytree of arrays and numbers.
        name: of the variable in errors, "x0" or "y0".

    Example:
        >>> variable([0, 1], "x0").shape
        (2,)
    """
    numbers = int | float | np.number
    if isinstance(tree, list) and all(isinstance(a, numbers) for a in jax.tree.leaves(tree)):
        try:
            tree = np.asarray(tree, jnp.result_type(float))
        except ValueError:
            raise UserError(f"{name} has rows of different lengths: give an array.") from None
    if not jax.tree.leaves(tree):
        raise UserError(f"{name} is {brief(tree)}: give an array, or a pytree of arrays.")

    def floats(leaf: Any) -> Any:
        array = _as_array(leaf)
        if array.dtype.kind in _NOT_NUMBERS:
            raise UserError(f"{name} holds {brief(leaf)}: give arrays of numbers.")
        if array.dtype.kind in "biu" or not hasattr(leaf, "dtype"):  # includes Python numbers
            array = np.asarray(array, jnp.result_type(float))
        if not np.isfinite(np.asarray(array)).all():
            raise UserError(f"{name} holds NaN or infinite numbers: start from finite ones.")
        return array

    return jax.tree.map(floats, tree)


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray | jax.Array) else np.asarray(leaf)
