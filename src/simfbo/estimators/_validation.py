"""What estimators are given beside X and y: something for every row, checked."""

from typing import Any, NamedTuple

import numpy as np

from simfbo.errors import UserError


class InputError(UserError, ValueError):
    """An argument of `fit` that cannot be used, as scikit-learn's callers expect it."""


class Members(NamedTuple):
    """Who the rows belong to: clients, or groups.

    Attributes:
        ids: as the user calls them, in the order in which rows name them first, so that other
            names change nothing.
        owner: [N], the place in `ids` of every row's.
    """

    ids: np.ndarray
    owner: np.ndarray


def members(name: str, values: Any, count: int) -> Members:
    """Return the members that an argument names; one of all rows where it is None.

    Args:
        name: of the argument.
        values: an id for each row, of any type that can be sorted.
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
    if not len(known) or known[-1] != known[-1]:  # numbers that are none come last
        raise InputError(f"{name} lacks values or mixes types: give every row an id of one type.")
    order = np.argsort(first)
    return Members(known[order], np.argsort(order)[place].astype(np.int32))


def mask(name: str, values: Any, count: int) -> np.ndarray:
    """Return an argument that says yes or no to every row."""
    found = per_row(name, values, count)
    if found.dtype != bool:
        raise InputError(f"{name} must hold True or False for every row, got {found.dtype}.")
    return found


def per_row(name: str, values: Any, count: int) -> np.ndarray:
    """Return an argument that holds one value for every row."""
    found = np.asarray(values)
    if found.shape != (count,):
        shape = len(found) if found.ndim == 1 else f"an array of shape {found.shape}"
        raise InputError(f"{name} must hold one value for each of the {count} rows, got {shape}.")
    return found
