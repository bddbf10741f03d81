"""Fitted models as plain scikit-learn objects, which do not need simfbo to unpickle or to predict.

Scikit-learn's objects are fitted to a few artificial rows, then their results are replaced. So they
also have the private attributes of the installed version of scikit-learn.
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
    """Create a `LogisticRegression` with coefficients [C, d], or [1, d] for two classes."""
    model = LogisticRegression().fit(np.zeros((len(classes), coef.shape[1])), classes)
    return _with_coefficients(model, coef, intercept, np.array([rounds], np.int32))


def regressor(
    coef: np.ndarray, intercept: float, rounds: int | None = None, kind: Any = Ridge
) -> Any:
    """Create a regressor with these coefficients.

    Args:
        coef: [d].
        intercept: a number.
        rounds: the value of `n_iter_`; None, as in `Ridge`, by default.
        kind: a class of scikit-learn.
    """
    model = kind().fit(np.zeros((2, len(coef))), np.ones(2))
    return _with_coefficients(model, coef, intercept, rounds)


def networks(coefs: Sequence[np.ndarray], intercepts: Sequence[np.ndarray], classes: Any) -> Any:
    """Create a `VotingClassifier` with one `MLPClassifier` for each fold.

    Args:
        coefs: the weights of each layer, [folds, inputs, outputs].
        intercepts: its biases, [folds, outputs].
        classes: the labels.
    """
    folds = range(len(coefs[0]))
    models = [_network([a[k] for a in coefs], [a[k] for a in intercepts]) for k in folds]
    frozen = [(f"fold{k}", FrozenEstimator(model)) for k, model in enumerate(models)]
    rows = np.zeros((len(classes), coefs[0].shape[1]))
    voting = VotingClassifier(frozen, voting="soft", flatten_transform=False).fit(rows, classes)
    voting.estimators = [(f"fold{k}", model) for k, model in enumerate(models)]
    voting.estimators_, voting.named_estimators_ = models, Bunch(**dict(voting.estimators))
    return voting


def _network(coefs: list[np.ndarray], intercepts: list[np.ndarray]) -> MLPClassifier:
    """Create a network, for two classes with one output as in scikit-learn."""
    count = coefs[-1].shape[1]
    if count == 2:
        coefs = [*coefs[:-1], coefs[-1][:, 1:] - coefs[-1][:, :1]]
        intercepts = [*intercepts[:-1], intercepts[-1][1:] - intercepts[-1][:1]]
    sizes = [len(biases) for biases in intercepts[:-1]]
    model = MLPClassifier(sizes, activation="tanh", solver="lbfgs")
    model.fit(np.zeros((count, len(coefs[0]))), np.arange(count))
    model.coefs_, model.intercepts_ = coefs, intercepts
    return model


def _with_coefficients(model: Any, coef: np.ndarray, intercept: Any, rounds: Any) -> Any:
    model.coef_, model.intercept_ = coef.copy(), np.copy(intercept)
    if np.ndim(intercept) == 0:
        model.intercept_ = float(intercept)
    model.n_iter_ = rounds
    return model


def with_names(model: Any, names: Any) -> Any:
    """Set the names of a fitted model's features, if there are any."""
    if names is not None:
        model.feature_names_in_ = np.array(names, object)
    return model


def pipeline(preprocessing: "FederatedTabular", model: Any) -> Pipeline:
    """Create a fitted pipeline of preprocessing and model."""
    return Pipeline([("preprocessing", transformer(preprocessing)), ("model", model)])


def transformer(tabular: "FederatedTabular") -> ColumnTransformer:
    """Create a fitted `ColumnTransformer` that is equivalent to a `FederatedTabular`.

    Columns are selected by name if they have names, and all others are dropped.
    """
    named = hasattr(tabular, "feature_names_in_")
    inputs = tabular.inputs
    columns: dict[str, Any] = {name: name if named else j for j, name in enumerate(inputs)}
    groups = [
        (text, list(names)) for text, names in groupby(inputs, tabular.categories_.__contains__)
    ]
    transformers: list[tuple[str, Any, list[Any]]] = []
    for text, names in groups:
        if text:
            transformers += [(name, _categories(tabular, name), [columns[name]]) for name in names]
        else:
            label, selected = f"numbers{len(transformers)}", [columns[name] for name in names]
            transformers.append((label, _numbers(tabular, names), selected))
    frozen = [
        (f"{j}_{name.replace('__', '_')}", FrozenEstimator(fitted), selected)
        for j, (name, fitted, selected) in enumerate(transformers)
    ]
    row = _table(inputs, np.zeros((1, len(inputs)), object), tabular)  # frozen estimators ignore it
    return ColumnTransformer(frozen, sparse_threshold=0, verbose_feature_names_out=False).fit(row)


def _numbers(tabular: "FederatedTabular", names: Sequence[str]) -> Pipeline:
    """Create the imputation and, if it was learnt, the standardisation of numeric columns."""
    indices = [tabular.numeric_.index(name) for name in names]
    fill = _table(names, tabular.fill_[indices][None], tabular)
    steps: list[Any] = [SimpleImputer(strategy=tabular.impute).fit(fill)]
    if tabular.mean_ is not None and tabular.scale_ is not None:
        scaler: Any = StandardScaler().fit(np.zeros((1, len(names))))
        scaler.mean_, scaler.scale_ = tabular.mean_[indices], tabular.scale_[indices]
        scaler.var_ = scaler.scale_**2
        steps.append(scaler)
    return make_pipeline(*steps)


def _categories(tabular: "FederatedTabular", name: str) -> Pipeline:
    """Create the one-hot encoding of a text column.

    It is fitted to rows in which rare categories are less frequent than `min_frequency`, so that
    they share the last column.
    """
    objects = FunctionTransformer(
        np.asarray, kw_args={"dtype": object}, feature_names_out="one-to-one"
    )
    frequent, rare = _values(tabular, name)
    missing = _placeholder([*frequent, *rare])
    gaps: list[Any] = [np.nan, None]
    if hasattr(tabular, "feature_names_in_"):
        gaps = [require("pandas", "pandas").NA]  # in a DataFrame it equals all missing values
    imputers = [
        SimpleImputer(missing_values=gap, strategy="constant", fill_value=missing) for gap in gaps
    ]
    frequent, rare = ([missing if v is None else v for v in values] for values in (frequent, rare))
    categories: Any = [[*frequent, *rare]]
    encoder = OneHotEncoder(
        categories=categories,
        handle_unknown="ignore",
        sparse_output=False,
        min_frequency=2 if rare else None,
    )
    rows = np.array([*frequent, *frequent, *rare], object)[:, None]
    return make_pipeline(objects, *imputers, encoder).fit(_table([name], rows, tabular))


def _placeholder(categories: Sequence[Any]) -> Any:
    """Return a string or number for missing values that does not occur in tables."""
    present = [value for value in categories if value is not None]
    return -np.inf if present and not isinstance(present[0], str) else _MISSING


def _values(tabular: "FederatedTabular", name: str) -> tuple[list[Any], list[Any]]:
    """Return the original values of a column's frequent and rare categories."""
    originals = tabular.values_of(name)
    frequent, rare = (
        [None if text is None else originals.get(text, text) for text in categories[name]]
        for categories in (tabular.categories_, tabular.infrequent_)
    )
    present = [value for value in (*frequent, *rare) if value is not None]
    if not any(all(isinstance(v, kind) for v in present) for kind in (str, Real | np.bool_)):
        raise UserError(
            f"The categories of column {name!r} are neither all text nor all numbers, so they "
            "cannot be exported: fit on X with this column as text, by astype(str)."
        )
    return frequent, rare


def _table(names: Sequence[str], rows: np.ndarray, tabular: "FederatedTabular") -> Any:
    """Convert rows to a DataFrame if the columns have names."""
    if not hasattr(tabular, "feature_names_in_"):
        return rows
    return require("pandas", "pandas").DataFrame(rows, columns=list(names))
