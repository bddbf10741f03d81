"""Validation of arguments of `fit` that hold one value per row."""

import warnings
from typing import Any, NamedTuple

import numpy as np

from simfbo.errors import UserError, brief

Data = Any  # whatever scikit-learn takes for an array
RandomState = int | np.random.RandomState | None


class Members(NamedTuple):
    """The clients, or groups, that rows belong to.

    Attributes:
        ids: the user's ids in order of first appearance, so that renaming them changes nothing.
        owner: [N], the index in `ids` for every row.
    """

    ids: np.ndarray
    owner: np.ndarray


def members(name: str, values: Data, count: int) -> Members:
    """Return the members that an argument names; a single one if it is None.

    Args:
        name: of the argument.
        values: an id for each row, of any sortable type.
        count: N.

    Example:
        >>> members("clients", ["b", "a", "b"], 3)
        Members(ids=array(['b', 'a'], dtype='<U1'), owner=array([0, 1, 0], dtype=int32))
    """
    ids = per_row(name, np.zeros(count, np.int32) if values is None else values, count)
    try:
        known, first, place = np.unique(ids, return_index=True, return_inverse=True)
    except TypeError:
        known, first, place = ids[:0], ids[:0], ids[:0]
    if not len(known) or known[-1] != known[-1]:  # NaN is sorted last
        raise UserError(f"{name} has missing values or mixes types: give every row an id.")
    order = np.argsort(first)
    return Members(known[order], np.argsort(order)[place].astype(np.int32))


def warn_of_one_client(stacklevel: int = 3) -> None:
    """Warn that no clients were given; the level is that of whoever called `fit`."""
    warnings.warn(
        "Without clients, all rows belong to one client: pass clients= to fit, an id for each row "
        "or the name of a column of X.",
        UserWarning,
        stacklevel=stacklevel,
    )


def mask(name: str, values: Data, count: int) -> np.ndarray:
    """Return an argument that must hold True or False for every row."""
    found = per_row(name, values, count)
    if found.dtype != bool:
        raise UserError(f"{name} must hold True or False for every row, got {found.dtype}.")
    return found


def weights(values: Data, count: int) -> np.ndarray | None:
    """Return the rows' weights; None where all rows count the same."""
    if values is None:
        return None
    each = np.full(count, values) if np.isscalar(values) else values
    found = numbers("sample_weight", per_row("sample_weight", each, count))
    if found.min() < 0 or not found.any():
        raise UserError("sample_weight must be zero or positive in every row, and not all zero.")
    return found


def numbers(name: str, values: np.ndarray) -> np.ndarray:
    """Return an argument that must hold finite numbers, as floats."""
    try:
        found = values.astype(np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name} must hold numbers, got {brief(values.tolist()[0])}.") from None
    if not np.isfinite(found).all():
        raise UserError(f"{name} has missing or infinite values: drop those rows.")
    return found


def per_row(name: str, values: Data, count: int) -> np.ndarray:
    """Return an argument that must hold one value for every row."""
    found = np.asarray(values)
    if found.shape != (count,):
        shape = len(found) if found.ndim == 1 else f"an array of shape {found.shape}"
        raise UserError(f"{name} must hold one value for each of the {count} rows, got {shape}.")
    return found
