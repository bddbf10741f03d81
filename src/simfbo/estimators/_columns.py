"""The columns of a table: the kinds of their values, and columns that are passed by name."""

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
    """A column of a table.

    Attributes:
        name: in the table, or x0, x1, ... in an array.
        values: [N], floats or arbitrary objects.
        kinds: [N], the kind of each value.
    """

    name: str
    values: np.ndarray
    kinds: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        """The values as floats, with NaN for missing ones."""
        numbers = self.values
        if numbers.dtype != float:
            numbers = np.array([float(v) if k else np.nan for v, k in self._pairs], float)
        if np.isinf(numbers).any():
            raise UserError(
                f"Column {self.name!r} contains infinity: replace it by a number or NaN."
            )
        return numbers

    @property
    def texts(self) -> list[str | None]:
        """The values as strings, with None for missing ones."""
        return [
            (value if type(value) is str else _text(value)) if kind else None
            for value, kind in self._pairs
        ]

    @property
    def not_text(self) -> dict[str, Any]:
        """The values that are neither strings nor missing, by their texts."""
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
    """Convert lists to an array in which numbers beside strings stay numbers."""
    array = np.asarray(X)
    return np.asarray(X, object) if array.dtype.kind == "U" and not hasattr(X, "dtype") else array


def has_text_or_gaps(X: Data) -> bool:
    """Check for values that are not numbers."""
    table = X if is_frame(X) else array_of(X)
    if table.ndim != 2:
        return False  # rejected by scikit-learn's validation
    if not is_frame(X) and table.dtype.kind in "biuf":
        return bool(np.isnan(table).any())
    return not all((column.kinds == NUMBER).all() for column in columns_of(table))


def is_frame(X: Data) -> bool:
    """Check for a DataFrame."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def take_named(X: Data, arguments: dict[str, Data]) -> tuple[Data, dict[str, Data], list[str]]:
    """Replace arguments that are names of columns by these columns.

    Args:
        X: the table.
        arguments: by name: a value per row, or the name of a column.

    Returns:
        The table without these columns, the arguments' values, and the names of the columns.
    """
    _require_distinct(X)
    named = {key: value for key, value in arguments.items() if isinstance(value, str)}
    for key, name in named.items():
        _require_column(X, key, name)
    columns = {key: np.asarray(X[name]) for key, name in named.items()}
    names = sorted(set(named.values()))
    return without(X, names), {**arguments, **columns}, names


def without(X: Data, names: Sequence[str]) -> Data:
    """Drop columns from a DataFrame; arrays and missing columns are ignored."""
    if not is_frame(X) or not set(names) & set(X.columns):
        return X
    return X[[label for label in X.columns if label not in names]]


def _require_distinct(X: Data) -> None:
    """Raise if columns of a DataFrame share a name."""
    common = Counter(map(str, X.columns)).most_common(1) if is_frame(X) else []
    if common and common[0][1] > 1:
        raise UserError(f"X has several columns named {common[0][0]!r}: rename them.")


def _require_column(X: Data, argument: str, name: str) -> None:
    """Raise unless X has a column with this name."""
    if not is_frame(X):
        raise UserError(
            f"{argument}={brief(name)} names a column, but X has no names: pass a DataFrame, or "
            f"{argument} as one value per row."
        )
    labels = [str(label) for label in X.columns]
    if name not in list(X.columns):
        similar = difflib.get_close_matches(name, labels, 3, 0.5) or labels[:10]
        raise UserError(
            f"X has no column {brief(name)}: pass {argument} as one value per row or as the name "
            f"of a column, such as {', '.join(map(repr, similar))}."
        )


def _column(name: str, data: Any) -> Column:
    """Create a column of an array, or of a DataFrame, whose dtype determines the kind."""
    dtype_kind = getattr(data.dtype, "kind", "O")
    if dtype_kind in "biuf":
        values = _floats(data)
        return Column(name, values, np.where(np.isnan(values), MISSING, NUMBER))
    values = np.asarray(data, object)
    kinds = _kinds(values) if dtype_kind not in "mM" else np.full(len(values), DATE)
    if getattr(data.dtype, "name", "") == "category":  # includes categories that are numbers
        kinds = np.where(kinds, TEXT, MISSING)
    return Column(name, values, kinds)


def _floats(data: Any) -> np.ndarray:
    """Convert numbers to floats, with NaN for the missing values of pandas' extension types."""
    if hasattr(data, "to_numpy") and not isinstance(data.dtype, np.dtype):
        return data.to_numpy(dtype=float, na_value=np.nan)
    return np.asarray(data, float)


def _kinds(values: np.ndarray) -> np.ndarray:
    """Return the kind of each value by its type; NaN is missing."""
    types = list(map(type, values))
    kind_by_type = {cls: _kind(cls) for cls in set(types)}
    kinds = np.array([kind_by_type[cls] for cls in types], int)
    numbers = np.flatnonzero(kinds == NUMBER)
    kinds[[j for j in numbers if values[j] != values[j]]] = MISSING
    return kinds


def _kind(cls: type) -> int:
    if cls is type(None) or cls.__name__ in ("NAType", "NaTType"):
        return MISSING
    return next((kind for types, kind in _TYPES.items() if issubclass(cls, types)), OTHER)


def _text(value: Any) -> str:
    """Convert a category to a string; 3 and 3.0 are the same category.

    Example:
        >>> _text("surgery"), _text(3.0)
        ('surgery', '3')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)
