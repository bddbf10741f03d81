"""A table's columns: what their values are, and columns that are named in place of an argument."""

import datetime
import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from simfbo.errors import UserError, brief
from simfbo.estimators._validation import Data

MISSING, NUMBER, TEXT, DATE, OTHER = 0, 1, 2, 4, 8  # the kind of a value; of several, their union
_TYPES = {
    (bool, np.bool_, Real, Decimal): NUMBER,
    (str,): TEXT,
    (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64): DATE,
}


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        name: as the table calls it, or x0, x1, ... in an array.
        values: [N], floats or any objects.
        kinds: [N], what each value is.
    """

    name: str
    values: np.ndarray
    kinds: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        """Return the values as floats, NaN where they are missing."""
        found = self.values
        if found.dtype != float:
            found = np.array([float(v) if k else np.nan for v, k in self._pairs], float)
        if np.isinf(found).any():
            raise UserError(
                f"Column {self.name!r} contains infinity: replace it by a number or NaN."
            )
        return found

    @property
    def texts(self) -> list[str | None]:
        """Return the values as texts, None where they are missing."""
        return [
            (value if type(value) is str else _text(value)) if kind else None
            for value, kind in self._pairs
        ]

    @property
    def not_text(self) -> dict[str, Any]:
        """Return the values that are neither text nor missing, by their texts."""
        return {_text(v): v for v, kind in self._pairs if kind and not isinstance(v, str)}

    @property
    def _pairs(self) -> Iterable[tuple[Any, int]]:
        return zip(self.values, self.kinds, strict=True)


def columns_of(X: Data) -> list[Column]:
    """Return the columns of a frame or of an array with two axes."""
    if not is_frame(X):
        return [_column(f"x{j}", X[:, j]) for j in range(X.shape[1])]
    return [_column(str(label), X[label]) for label in X.columns]


def array_of(X: Data) -> np.ndarray:
    """Return anything but a frame as an array, in which numbers next to texts stay numbers."""
    found = np.asarray(X)
    return np.asarray(X, object) if found.dtype.kind == "U" and not hasattr(X, "dtype") else found


def has_text_or_gaps(X: Data) -> bool:
    """Return whether a table holds anything but numbers."""
    table = X if is_frame(X) else array_of(X)
    if table.ndim != 2:
        return False  # no table: what validates arrays says so
    if not is_frame(X) and table.dtype.kind in "biuf":
        return bool(np.isnan(table).any())
    return not all((column.kinds == NUMBER).all() for column in columns_of(table))


def is_frame(X: Data) -> bool:
    """Return whether this is a table whose columns have names."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def take_named(X: Data, arguments: dict[str, Data]) -> tuple[Data, dict[str, Data], list[str]]:
    """Replace arguments that are columns' names by these columns.

    Args:
        X: the table.
        arguments: values per row, or the name of a column, by the argument's name.

    Returns:
        The table without these columns, the arguments' values, and the names of the columns.
    """
    _require_distinct(X)
    named = {key: value for key, value in arguments.items() if isinstance(value, str)}
    for key, name in named.items():
        _require_column(X, key, name)
    found = {key: np.asarray(X[name]) for key, name in named.items()}
    names = sorted(set(named.values()))
    return without(X, names), {**arguments, **found}, names


def without(X: Data, names: Sequence[str]) -> Data:
    """Return a frame without these columns, as far as it has them; an array as it is."""
    if not is_frame(X) or not set(names) & set(X.columns):
        return X
    return X[[label for label in X.columns if label not in names]]


def _require_distinct(X: Data) -> None:
    """Raise if two columns of a frame have one name."""
    common = Counter(map(str, X.columns)).most_common(1) if is_frame(X) else []
    if common and common[0][1] > 1:
        raise UserError(f"X has several columns named {common[0][0]!r}: rename them.")


def _require_column(X: Data, argument: str, name: str) -> None:
    """Raise unless X has a column of this name."""
    if not is_frame(X):
        raise UserError(
            f"{argument}={brief(name)} names a column, but X has no names: pass a DataFrame, or "
            f"{argument} as one value per row."
        )
    known = [str(label) for label in X.columns]
    if name not in list(X.columns):
        near = difflib.get_close_matches(name, known, 3, 0.5) or known[:10]
        raise UserError(
            f"X has no column {brief(name)}: pass {argument} as one value per row or as the name "
            f"of a column, such as {', '.join(map(repr, near))}."
        )


def _column(name: str, found: Any) -> Column:
    """Return a column of an array, or of a frame by the type that it declares."""
    kind = getattr(found.dtype, "kind", "O")
    if kind in "biuf":
        values = _floats(found)
        return Column(name, values, np.where(np.isnan(values), MISSING, NUMBER))
    values = np.asarray(found, object)
    kinds = _kinds(values) if kind not in "mM" else np.full(len(values), DATE)
    if getattr(found.dtype, "name", "") == "category":  # also of numbers
        kinds = np.where(kinds, TEXT, MISSING)
    return Column(name, values, kinds)


def _floats(found: Any) -> np.ndarray:
    """Return numbers as floats, NaN for the missing of pandas' own types."""
    if hasattr(found, "to_numpy") and not isinstance(found.dtype, np.dtype):
        return found.to_numpy(dtype=float, na_value=np.nan)
    return np.asarray(found, float)


def _kinds(values: np.ndarray) -> np.ndarray:
    """Return what each value is, by its type."""
    types = list(map(type, values))
    known = {one: _kind(one) for one in set(types)}
    found = np.array([known[one] for one in types], int)
    numbers = np.flatnonzero(found == NUMBER)
    found[[j for j in numbers if values[j] != values[j]]] = MISSING
    return found


def _kind(one: type) -> int:
    """Return what the values of a type are."""
    if one is type(None) or one.__name__ in ("NAType", "NaTType"):
        return MISSING
    return next((kind for types, kind in _TYPES.items() if issubclass(one, types)), OTHER)


def _text(value: Any) -> str:
    """Return a category's text; 3 and 3.0 are one category.

    Example:
        >>> _text("surgery"), _text(3.0)
        ('surgery', '3')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)
