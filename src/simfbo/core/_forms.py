"""What clients' samples look like: whether all have one form, and whether all are finite."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.errors import UserError


class _Words(str):
    """A text that shows itself without quotes."""

    __repr__ = str.__str__


def words(samples: PyTree) -> str:
    """Return structure, types and shapes of samples in words; n is their number.

    Example:
        >>> words((np.ones((3, 2)), np.arange(3)))
        '(float64 (n, 2), int64 (n,))'
    """

    def leaf_words(leaf: Any) -> _Words:
        array = _array(leaf)
        shape = ", ".join(map(str, array.shape[1:]))
        return _Words(f"{array.dtype} (n,{' ' * bool(shape)}{shape})")

    return str(jax.tree.map(leaf_words, samples))


def require_arrays(samples: PyTree, whose: str) -> None:
    """Raise unless samples are arrays of numbers, one or more dimensions each."""
    for leaf in jax.tree.leaves(samples):
        array = _array(leaf)
        if array.dtype.kind in "OSUMm":
            raise UserError(f"{whose} hold text, dates or objects: convert them to numbers.")
        if not array.shape:
            raise UserError(
                f"{whose} hold single numbers: give arrays, with the sample along the first axis."
            )


def require_alike(parts: Sequence[PyTree], clients: Sequence[int], name: str) -> None:
    """Raise unless all clients' samples have one structure, kind of numbers and shape.

    Args:
        parts: the clients' samples.
        clients: the clients' numbers.
        name: which samples these are, "lower" or "upper".
    """
    for client, part in zip(clients, parts, strict=False):
        require_arrays(part, f"Client {client}'s {name} samples")
    forms = [_form(part) for part in parts]
    usual = Counter(forms).most_common(1)[0][0]
    for client, part, form in zip(clients, parts, forms, strict=False):
        if form != usual:
            others = words(parts[forms.index(usual)])
            raise UserError(
                f"Client {client}'s {name} samples are {words(part)}, the others' {others}: give "
                "every client the same features, in the same types."
            )


def not_finite(samples: PyTree) -> np.ndarray | None:
    """Return the rows that hold NaN or an infinite number; None, at little cost, if none does."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(samples)]
    bad = [array for array in arrays if array.dtype.kind == "f" and not _is_finite(array)]
    if not bad:
        return None
    rows = (~np.isfinite(array.reshape(len(array), -1)).all(1) for array in bad)
    return np.flatnonzero(np.any(list(rows), axis=0))


def _is_finite(array: np.ndarray) -> bool:
    """Return whether all numbers are finite; the extremes of an array with NaN are NaN."""
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _form(samples: PyTree) -> Hashable:
    """Return what must be the same for all clients."""
    leaves, structure = jax.tree.flatten(samples)
    arrays = map(_array, leaves)
    return structure, tuple((array.dtype.kind, array.shape[1:]) for array in arrays)


def _array(leaf: Any) -> Any:
    """Return an array as it is, anything else as an array."""
    return leaf if isinstance(leaf, np.ndarray | jax.Array) else np.asarray(leaf)
