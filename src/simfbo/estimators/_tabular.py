"""A transformer of tables with text and missing values into numbers, learnt over clients."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain, count
from numbers import Integral
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.utils import check_scalar
from sklearn.utils.validation import (
    _check_feature_names_in,  # pyright: ignore[reportPrivateUsage]
    check_is_fitted,
    validate_data,
)

from simfbo.core.ledger import Ledger
from simfbo.core.partition import Rows, by_user
from simfbo.errors import UserError
from simfbo.estimators._agreement import (
    Counts,
    agree_on_categories,
    agree_on_kinds,
    agree_on_means,
    agree_on_medians,
    agree_on_units,
    federated_numbers,
    local_counts,
)
from simfbo.estimators._columns import (
    DATE,
    MISSING,
    NUMBER,
    OTHER,
    TEXT,
    Column,
    array_of,
    columns_of,
    is_frame,
    take_named,
    without,
)
from simfbo.estimators._export import transformer
from simfbo.estimators._validation import Data, members, warn_of_one_client

_FEW = 20  # rows, up to which there is no warning of identifiers


class FederatedTabular(TransformerMixin, BaseEstimator):
    """Convert a table with text and missing values to numbers, without pooling the clients' rows.

    Text is one-hot encoded, with the sorted categories of all clients. Missing numbers are replaced
    by the median or mean over all clients, then numbers are standardised; True and False are 1 and
    0. In a text column, missing values are a separate category if they occurred in `fit`; unknown
    categories are encoded as zeros.

    The parameters are learnt in exchanges that the ledger records: one for the kinds of columns,
    one for the categories, eight for medians or one for means, one for the scales. The server
    learns the number of rows of each category on each client; numbers are only summed over the
    clients.

    Args:
        impute: "median" or "mean".
        scale: True to standardise numeric columns; one-hot columns are never standardised.
        min_rows: categories with fewer rows, over all clients, share the column `infrequent`.

    Attributes:
        categories_: the categories of each text column, by its name; None for missing.
        infrequent_: the categories with fewer than `min_rows` rows, by the column's name.
        numeric_: the names of the numeric columns.
        fill_: the imputed numbers, in the order of `numeric_`.
        mean_: of the imputed columns; None without `scale`.
        scale_: their standard deviations, 1 for a constant column; None without `scale`.
        clients_: the clients' ids, in order of first appearance in the rows.
        ledger_: the `simfbo.Ledger` of the exchanges.
        n_features_in_: the number of columns, without the column of clients.
        feature_names_in_: the names of X's columns, if it has any.

    Example:
        >>> X = np.array([[40, "surgery"], [None, "surgery"], [60, "medicine"]], object)
        >>> tabular = FederatedTabular(scale=False).fit(X, clients=["a", "a", "b"])
        >>> tabular.transform(X)
        array([[40.,  0.,  1.],
               [50.,  0.,  1.],
               [60.,  1.,  0.]])
        >>> tabular.get_feature_names_out().tolist()
        ['x0', 'x1_medicine', 'x1_surgery']
    """

    categories_: dict[str, list[str | None]]
    infrequent_: dict[str, list[str | None]]
    numeric_: list[str]
    fill_: np.ndarray
    mean_: np.ndarray | None
    scale_: np.ndarray | None
    clients_: np.ndarray
    ledger_: Ledger

    def __init__(
        self,
        *,
        impute: Literal["median", "mean"] = "median",
        scale: bool = True,
        min_rows: int = 1,
    ) -> None:
        """Store the parameters; `fit` validates them."""
        self.impute = impute
        self.scale = scale
        self.min_rows = min_rows

    def fit(self, X: Data, y: Data = None, clients: Data = None) -> Self:
        """Learn categories, medians and scales from the clients' rows.

        Args:
            X: [N, d], a DataFrame or an array.
            y: ignored.
            clients: [N], the client that holds each row, or the name of a column of X, which is
                then no feature; a single client by default, with a warning.
        """
        check_scalar(self.min_rows, "min_rows", Integral, min_val=1)
        if self.impute not in ("median", "mean"):
            raise UserError(f"impute must be 'median' or 'mean', got {self.impute!r}.")
        features, arguments, self._named = take_named(X, {"clients": clients})
        columns = self._columns(features, reset=True)
        owners = members("clients", arguments["clients"], len(columns[0].values))
        if clients is None:
            warn_of_one_client()
        self.clients_, self.ledger_ = owners.ids, Ledger()
        self._inputs = [column.name for column in columns]
        self._learn(columns, by_user(owners.owner))
        for name, categories in self.categories_.items():
            if 2 * len(categories) > len(owners.owner) > _FEW:
                _warn_of_identifiers(name, len(categories), len(owners.owner))
        return self

    def transform(self, X: Data) -> np.ndarray:
        """Convert a table to numbers; the column of clients is optional."""
        check_is_fitted(self, "fill_")
        columns = self._columns(without(X, self._named), reset=False)
        pairs = zip(self._inputs, columns, strict=True)
        return np.hstack([self._encoded(name, column) for name, column in pairs])

    def export(self) -> ColumnTransformer:
        """Convert to a fitted `ColumnTransformer` of scikit-learn, which does not need simfbo.

        It selects the columns of a DataFrame by name, in any order, and drops columns that were
        not features in `fit`. A number and its text are different categories.
        """
        check_is_fitted(self, "fill_")
        return transformer(self)

    def get_feature_names_out(self, input_features: Data = None) -> np.ndarray:
        """Return the names of the transformed columns, such as `age` and `ward_surgery`.

        Args:
            input_features: the names of X's columns, if X had none in `fit`.
        """
        check_is_fitted(self, "fill_")
        names: Any = _check_feature_names_in(self, input_features)
        return _distinct(
            output
            for name, fitted in zip(names, self._inputs, strict=True)
            for output in self._output_names(name, fitted)
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = True
        return tags

    @property
    def inputs(self) -> list[str]:
        """The names of the features; x0, x1, ... if they have none."""
        return list(self._inputs)

    def values_of(self, name: str) -> dict[str, Any]:
        """Return the original values of categories that are not strings, by their texts."""
        return getattr(self, "_values", {}).get(name, {})

    def _columns(self, X: Data, reset: bool) -> list[Column]:
        """Validate a table and return its columns."""
        if not is_frame(X):
            array: Any = array_of(X) if isinstance(X, list | tuple) else X
            return columns_of(
                validate_data(self, array, dtype=None, ensure_all_finite=False, reset=reset)
            )
        validate_data(self, X, reset=reset, skip_check_array=True)
        if 0 in X.shape:
            raise UserError(f"X has {X.shape[0]} rows and {X.shape[1]} features: pass some.")
        return columns_of(X)

    def _learn(self, columns: list[Column], parts: Rows) -> None:
        """Learn all parameters in exchanges with the clients."""
        counts = [local_counts(column, parts) for column in columns]
        agreed = agree_on_kinds(columns, counts, parts, self.ledger_)
        for column, kind in zip(columns, agreed.kinds, strict=True):
            _require_one_kind(column, int(kind))
        text = np.flatnonzero(agreed.kinds == TEXT)
        self.categories_, self.infrequent_ = {}, {}
        self._values = {columns[j].name: columns[j].not_text for j in text}
        if len(text):
            sizes = int(agreed.categories.max()), int(agreed.longest.max())
            totals = agree_on_categories([counts[j] for j in text], *sizes, self.ledger_)
            for j, total in zip(text, totals, strict=True):
                self._keep_categories(columns[j].name, total)
        self._learn_numbers([columns[j] for j in np.flatnonzero(agreed.kinds == NUMBER)], parts)

    def _keep_categories(self, name: str, counts: Counts) -> None:
        """Store the categories of a column, sorted, with missing values last."""
        ordered = sorted(counts, key=lambda text: (text is None, text or ""))
        self.categories_[name] = [text for text in ordered if counts[text] >= self.min_rows]
        self.infrequent_[name] = [text for text in ordered if counts[text] < self.min_rows]

    def _learn_numbers(self, columns: list[Column], parts: Rows) -> None:
        """Learn the imputed numbers and the scales."""
        self.numeric_ = [column.name for column in columns]
        self.fill_, self.mean_, self.scale_ = np.zeros(0), None, None
        if not columns:
            return
        numbers = np.stack([column.numbers for column in columns], 1)
        federation = federated_numbers(numbers, parts, self.ledger_)
        agree = agree_on_medians if self.impute == "median" else agree_on_means
        self.fill_ = agree(federation)
        if self.scale:
            self.mean_, self.scale_ = agree_on_units(federation, self.fill_)

    def _encoded(self, name: str, column: Column) -> np.ndarray:
        """Convert a column to one or more columns of numbers."""
        if name in self.categories_:
            return _one_hot(column.texts, self.categories_[name], self.infrequent_[name])
        if (column.kinds & ~NUMBER).any():
            raise UserError(f"Column {name!r} held numbers in fit: convert it to numbers.")
        j = self.numeric_.index(name)
        numbers = np.where(column.kinds, column.numbers, self.fill_[j])
        if self.mean_ is not None and self.scale_ is not None:
            numbers = (numbers - self.mean_[j]) / self.scale_[j]
        return numbers[:, None]

    def _output_names(self, name: str, fitted: str) -> list[str]:
        """Return the output names of a column, which had the name `fitted` in `fit`."""
        if fitted not in self.categories_:
            return [name]
        texts = ["missing" if text is None else text for text in self.categories_[fitted]]
        texts += ["infrequent"] if self.infrequent_[fitted] else []
        return [f"{name}_{text}" for text in texts]


def _warn_of_identifiers(name: str, categories: int, rows: int) -> None:
    warnings.warn(
        f"Column {name!r} has {categories} categories in {rows} rows, all of which the server "
        "learns: drop it if it names people or things, or make it numbers if it holds some.",
        UserWarning,
        stacklevel=2,
    )


def _one_hot(
    texts: Sequence[str | None], frequent: Sequence[str | None], rare: Sequence[str | None]
) -> np.ndarray:
    """Encode texts as a column for each frequent category, and one for all rare categories."""
    indices = {text: m for m, text in enumerate(frequent)} | dict.fromkeys(rare, len(frequent))
    encoded = np.array([indices.get(text, -1) for text in texts])
    return (encoded[:, None] == np.arange(len(frequent) + bool(rare))).astype(float)


def _distinct(names: Iterable[str]) -> np.ndarray:
    """Append numbers to repeated names.

    Example:
        >>> _distinct(["ward_missing", "ward_missing", "age"]).tolist()
        ['ward_missing', 'ward_missing_2', 'age']
    """
    distinct: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{number}" for number in count(2))
        distinct[next(new for new in chain([name], numbered) if new not in distinct)] = None
    return np.array(list(distinct), object)


def _require_one_kind(column: Column, kind: int) -> None:
    """Raise unless the values of a column are all numbers or all strings."""
    name = repr(column.name)
    if kind & OTHER:
        cls = type(column.values[column.kinds == OTHER][0]).__name__
        raise TypeError(f"Column {name} holds a {cls}: an argument must be a string or a number.")
    if kind & DATE:
        raise UserError(
            f"Column {name} holds dates: convert them to numbers, such as years or days since "
            "some date."
        )
    if kind == MISSING:
        raise UserError(f"Column {name} has no values at any client: drop it.")
    if kind == NUMBER | TEXT:
        raise UserError(
            f"Column {name} holds numbers and text, perhaps at different clients: make it one of "
            "them for all, such as with astype(str)."
        )
