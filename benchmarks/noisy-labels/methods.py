"""The methods that are compared: each returns a fitted classifier."""

from typing import Any

import numpy as np
from mistakes import Table
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold

from simfbo.estimators import NoisyLabelClassifier

STRENGTHS = np.logspace(-3, 2, 6)
WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0)


def fitted(method: str, table: Table, labels: np.ndarray, seed: int) -> Any:
    """Return a method's classifier, trained on labels of which some are wrong."""
    rows = table.trusted
    if method == "trusted":
        return _cross_validated(table.inputs[rows], table.truth[rows])
    if method == "oracle":
        return _cross_validated(table.inputs, table.truth)
    if method == "all":
        return _cross_validated(table.inputs, labels)
    if method == "weighted":
        return _weighted(table, labels)
    return _learnt(method, table, labels, seed)


def _learnt(method: str, table: Table, labels: np.ndarray, seed: int) -> NoisyLabelClassifier:
    """Return the estimator with its defaults, and one trust for each row, client or part of it."""
    name, _, folds = method.partition(", ")
    trust = "network" if name == "network" else "clients"
    periods = table.periods if name == "periods" else None
    model = NoisyLabelClassifier(trust=trust, folds=5 if folds else None, random_state=seed)
    return model.fit(table.inputs, labels, table.clients, table.trusted, periods)


def _cross_validated(inputs: np.ndarray, labels: np.ndarray) -> LogisticRegressionCV:
    folds = max(2, min(5, int(np.bincount(labels).min())))
    model = LogisticRegressionCV(
        Cs=STRENGTHS, cv=StratifiedKFold(folds), scoring="neg_log_loss", max_iter=1000
    )
    return model.fit(inputs, labels)


def _weighted(table: Table, labels: np.ndarray) -> LogisticRegression:
    """Return a model of all rows, where those not trusted count less.

    How much less, and the penalty, are chosen by cross-validation over the trusted rows.
    """
    grid = [(strength, weight) for strength in STRENGTHS for weight in WEIGHTS]
    best = min(grid, key=lambda pair: _trusted_loss(table, labels, *pair))
    return _model(table, labels, np.ones(len(labels), bool), *best)


def _trusted_loss(table: Table, labels: np.ndarray, strength: float, weight: float) -> float:
    """Return the mean loss on trusted rows of models that are trained on all others."""
    rows, total, names = np.flatnonzero(table.trusted), 0.0, np.arange(table.classes)
    for _, fold in StratifiedKFold(3).split(rows, table.truth[rows]):
        kept, held = np.ones(len(labels), bool), rows[fold]
        kept[held] = False
        odds = _model(table, labels, kept, strength, weight).predict_proba(table.inputs[held])
        total += log_loss(table.truth[held], odds, labels=names, normalize=False)
    return total


def _model(
    table: Table, labels: np.ndarray, kept: np.ndarray, strength: float, weight: float
) -> LogisticRegression:
    weights = np.where(table.trusted, 1.0, weight)
    model = LogisticRegression(C=strength, max_iter=1000, tol=1e-3)
    return model.fit(table.inputs[kept], labels[kept], weights[kept])
