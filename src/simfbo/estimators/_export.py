"""Fitted models as plain scikit-learn objects, which need no simfbo to be unpickled or to predict.

Scikit-learn's objects are fitted to a few rows that lead to the wanted attributes, or whose results
are replaced; so they also have the attributes that a version of scikit-learn keeps to itself.
"""

from collections.abc import Sequence
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import VotingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.linear_model import GammaRegressor, LogisticRegression, PoissonRegressor, Ridge
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.utils import Bunch

from simfbo.errors import UserError, require

if TYPE_CHECKING:
    from simfbo.estimators._tabular import FederatedTabular

GLMS = {"poisson": PoissonRegressor, "gamma": GammaRegressor}
_MISSING = "\0missing"


def classifier(coef: np.ndarray, intercept: np.ndarray, classes: np.ndarray, rounds: int) -> Any:
    """Return a `LogisticRegression` with these coefficients, [C, d], or [1, d] for two classes."""
    model = LogisticRegression().fit(np.zeros((len(classes), coef.shape[1])), classes)
    return _with(model, coef, intercept, np.array([rounds], np.int32))


def regressor(
    coef: np.ndarray, intercept: float, rounds: int | None = None, kind: Any = Ridge
) -> Any:
    """Return a regressor with these coefficients, [d].

    Args:
        coef: [d].
        intercept: a number.
        rounds: becomes `n_iter_`; None, as of a `Ridge`, by default.
        kind: a class of scikit-learn.
    """
    return _with(kind().fit(np.zeros((2, len(coef))), np.ones(2)), coef, intercept, rounds)


def networks(coefs: Sequence[np.ndarray], intercepts: Sequence[np.ndarray], classes: Any) -> Any:
    """Return a `VotingClassifier` of an `MLPClassifier` for each fold.

    Args:
        coefs: the weights of each layer, [folds, inputs, outputs].
        intercepts: its biases, [folds, outputs].
        classes: the labels.
    """
    folds = range(len(coefs[0]))
    each = [_network([a[k] for a in coefs], [a[k] for a in intercepts]) for k in folds]
    frozen = [(f"fold{k}", FrozenEstimator(one)) for k, one in enumerate(each)]
    rows = np.zeros((len(classes), coefs[0].shape[1]))
    found = VotingClassifier(frozen, voting="soft", flatten_transform=False).fit(rows, classes)
    found.estimators = [(name, one) for (name, _), one in zip(frozen, each, strict=True)]
    found.estimators_, found.named_estimators_ = each, Bunch(**dict(found.estimators))
    return found


def _network(coefs: list[np.ndarray], intercepts: list[np.ndarray]) -> MLPClassifier:
    """Return a network; for two classes, as scikit-learn has it, with one output."""
    count = coefs[-1].shape[1]
    if count == 2:
        coefs = [*coefs[:-1], coefs[-1][:, 1:] - coefs[-1][:, :1]]
        intercepts = [*intercepts[:-1], intercepts[-1][1:] - intercepts[-1][:1]]
    sizes = [len(part) for part in intercepts[:-1]]
    model = MLPClassifier(sizes, activation="tanh", solver="lbfgs")
    model.fit(np.zeros((count, len(coefs[0]))), np.arange(count))
    model.coefs_, model.intercepts_ = coefs, intercepts
    return model


def _with(model: Any, coef: np.ndarray, intercept: Any, rounds: Any) -> Any:
    """Return a fitted model with other coefficients."""
    model.coef_, model.intercept_ = coef.copy(), np.copy(intercept)
    if np.ndim(intercept) == 0:
        model.intercept_ = float(intercept)
    model.n_iter_ = rounds
    return model


def with_names(model: Any, names: Any) -> Any:
    """Return a fitted model that knows the names of its features, if there are any."""
    if names is not None:
        model.feature_names_in_ = np.array(names, object)
    return model


def pipeline(preprocessing: "FederatedTabular", model: Any) -> Pipeline:
    """Return a fitted pipeline of what turns a table into numbers, and a fitted model."""
    return Pipeline([("preprocessing", transformer(preprocessing)), ("model", model)])


def transformer(tabular: "FederatedTabular") -> ColumnTransformer:
    """Return a fitted `ColumnTransformer` that does what a `FederatedTabular` does.

    Columns are taken by name where they have names, and all others are dropped.
    """
    named = hasattr(tabular, "feature_names_in_")
    inputs = tabular.inputs
    places: dict[str, Any] = {name: name if named else j for j, name in enumerate(inputs)}
    groups = [
        (text, list(names)) for text, names in groupby(inputs, tabular.categories_.__contains__)
    ]
    parts: list[tuple[str, Any, list[Any]]] = []
    for text, names in groups:
        if text:
            parts += [(name, _categories(tabular, name), [places[name]]) for name in names]
        else:
            numbers = _numbers(tabular, names)
            parts.append((f"numbers{len(parts)}", numbers, [places[name] for name in names]))
    parts = [(f"{j}_{name.replace('__', '_')}", FrozenEstimator(one), columns)
             for j, (name, one, columns) in enumerate(parts)]  # fmt: skip
    whole = ColumnTransformer(parts, sparse_threshold=0, verbose_feature_names_out=False)
    return whole.fit(_one_row(inputs, named))


def _one_row(inputs: Sequence[str], named: bool) -> Any:
    """Return a table with the columns alone that matter: what is fitted to it is frozen."""
    row = np.zeros((1, len(inputs)), object)
    return require("pandas", "pandas").DataFrame(row, columns=list(inputs)) if named else row


def _numbers(tabular: "FederatedTabular", names: Sequence[str]) -> Pipeline:
    """Return what fills the gaps of numeric columns and, if it was learnt, standardises them."""
    places = [tabular.numeric_.index(name) for name in names]
    fill = _table(names, tabular.fill_[places][None], tabular)
    steps: list[Any] = [SimpleImputer(strategy=tabular.impute).fit(fill)]
    if tabular.mean_ is not None and tabular.scale_ is not None:
        scaler: Any = StandardScaler().fit(np.zeros((1, len(names))))
        scaler.mean_, scaler.scale_ = tabular.mean_[places], tabular.scale_[places]
        scaler.var_ = scaler.scale_**2
        steps.append(scaler)
    return make_pipeline(*steps)


def _categories(tabular: "FederatedTabular", name: str) -> Pipeline:
    """Return what turns a column of text into zeros and ones.

    Rows of rare categories are fewer than `min_frequency`, so these share the last column.
    """
    objects = FunctionTransformer(
        np.asarray, kw_args={"dtype": object}, feature_names_out="one-to-one"
    )
    kept, rare = _values(tabular, name)
    missing = _mark([*kept, *rare])
    gaps = [SimpleImputer(missing_values=gap, strategy="constant", fill_value=missing)
            for gap in _gaps(hasattr(tabular, "feature_names_in_"))]  # fmt: skip
    kept, rare = ([missing if v is None else v for v in part] for part in (kept, rare))
    known: Any = [[*kept, *rare]]
    encoder = OneHotEncoder(categories=known, handle_unknown="ignore", sparse_output=False,
                            min_frequency=2 if rare else None)  # fmt: skip
    rows = np.array([*kept, *kept, *rare], object)[:, None]
    return make_pipeline(objects, *gaps, encoder).fit(_table([name], rows, tabular))


def _mark(categories: Sequence[Any]) -> Any:
    """Return what stands for missing values: a text that tables do not hold, or such a number."""
    known = [value for value in categories if value is not None]
    return -np.inf if known and not isinstance(known[0], str) else _MISSING


def _gaps(named: bool) -> list[Any]:
    """Return what missing values are; where there is a frame, pandas' own stands for all."""
    return [require("pandas", "pandas").NA] if named else [np.nan, None]


def _values(tabular: "FederatedTabular", name: str) -> tuple[list[Any], list[Any]]:
    """Return a column's categories as a table holds them, and those that are rare."""
    given = tabular.values_of(name)
    kept, rare = (
        [None if text is None else given.get(text, text) for text in part[name]]
        for part in (tabular.categories_, tabular.infrequent_)
    )
    known = [value for value in (*kept, *rare) if value is not None]
    if not any(all(isinstance(v, one) for v in known) for one in (str, Real | np.bool_)):
        raise UserError(
            f"The categories of column {name!r} are neither all text nor all numbers, so they "
            "cannot be exported: fit on X with this column as text, by astype(str)."
        )
    return kept, rare


def _table(names: Sequence[str], rows: np.ndarray, tabular: "FederatedTabular") -> Any:
    """Return rows as a table with the columns' names, where they have any."""
    if not hasattr(tabular, "feature_names_in_"):
        return rows
    return require("pandas", "pandas").DataFrame(rows, columns=list(names))
