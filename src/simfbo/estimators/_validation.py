"""Validation of arguments of `fit` that hold one value per row."""

import warnings
from typing import Any, NamedTuple

import numpy as np

from simfbo.errors import UserError, brief

Data = Any  # array-like, as in scikit-learn
RandomState = int | np.random.RandomState | None


class Members(NamedTuple):
    """The clients or groups of rows.

    Attributes:
        ids: in order of first appearance, so that results do not depend on their names.
        owner: [N], the index into `ids` of every row.
    """

    ids: np.ndarray
    owner: np.ndarray


def members(name: str, values: Data, count: int) -> Members:
    """Validate an argument with an id for each row; None stands for a single id.

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
        unique, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    except TypeError:
        unique, first, inverse = ids[:0], ids[:0], ids[:0]
    if not len(unique) or unique[-1] != unique[-1]:  # NaN is sorted last
        raise UserError(f"{name} has missing values or mixes types: give every row an id.")
    order = np.argsort(first)
    return Members(unique[order], np.argsort(order)[inverse].astype(np.int32))


def warn_of_one_client(stacklevel: int = 3) -> None:
    """Warn of a `fit` without clients; the stack level is that of the caller of `fit`."""
    warnings.warn(
        "Without clients, all rows belong to one client: pass clients= to fit, an id for each row "
        "or the name of a column of X.",
        UserWarning,
        stacklevel=stacklevel,
    )


def mask(name: str, values: Data, count: int) -> np.ndarray:
    """Validate a boolean argument with one value per row."""
    array = per_row(name, values, count)
    if array.dtype != bool:
        raise UserError(f"{name} must hold True or False for every row, got {array.dtype}.")
    return array


def weights(values: Data, count: int) -> np.ndarray | None:
    """Validate the weights of rows; a scalar is repeated."""
    if values is None:
        return None
    repeated = np.full(count, values) if np.isscalar(values) else values
    array = numbers("sample_weight", per_row("sample_weight", repeated, count))
    if array.min() < 0 or not array.any():
        raise UserError("sample_weight must be zero or positive in every row, and not all zero.")
    return array


def numbers(name: str, values: np.ndarray) -> np.ndarray:
    """Validate an argument of finite numbers and convert it to floats."""
    try:
        floats = values.astype(np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name} must hold numbers, got {brief(values.tolist()[0])}.") from None
    if not np.isfinite(floats).all():
        raise UserError(f"{name} has missing or infinite values: drop those rows.")
    return floats


def per_row(name: str, values: Data, count: int) -> np.ndarray:
    """Validate an argument with one value per row and convert it to an array."""
    array = np.asarray(values)
    if array.shape != (count,):
        shape = len(array) if array.ndim == 1 else f"an array of shape {array.shape}"
        raise UserError(f"{name} must hold one value for each of the {count} rows, got {shape}.")
    return array
