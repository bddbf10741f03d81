"""Tables with mistakes of several kinds in their labels: who holds which row, and what it says."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.feature_selection import f_classif
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

CLIENTS, PERIODS, TRUSTED = 6, 4, 0.1
TABLES = {
    "wine": (load_wine, 120),
    "breast cancer": (load_breast_cancer, 300),
    "digits": (load_digits, 600),
}


class Table(NamedTuple):
    """A table whose columns have mean 0 and deviation 1 over the training rows.

    Attributes:
        inputs: [N, d], of the training rows.
        truth: [N], their right labels.
        clients: [N], who holds them.
        periods: [N], when they were labelled.
        trusted: [N], whether their labels are known to be right.
        test_inputs: the test rows.
        test_truth: their right labels.
    """

    inputs: np.ndarray
    truth: np.ndarray
    clients: np.ndarray
    periods: np.ndarray
    trusted: np.ndarray
    test_inputs: np.ndarray
    test_truth: np.ndarray

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return int(self.truth.max()) + 1


def load(name: str, seed: int) -> Table:
    """Draw training and test rows, clients, periods and trusted rows, all anew for each seed."""
    read, count = TABLES[name]
    X, y = read(return_X_y=True)
    split = train_test_split(X, y, train_size=count, stratify=y, random_state=seed)
    scaler = StandardScaler().fit(split[0])
    rng, places = np.random.default_rng(seed), np.arange(count)
    clients, periods = rng.permutation(places % CLIENTS), rng.permutation(places % PERIODS)
    trusted = _tenth(split[2], rng)
    inputs, test_inputs = scaler.transform(split[0]), scaler.transform(split[1])
    return Table(inputs, split[2], clients, periods, trusted, test_inputs, split[3])


def _tenth(truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return which rows are trusted: a tenth of every class, and at least three of each."""
    found = np.zeros(len(truth), bool)
    for label in np.unique(truth):
        own = rng.permutation(np.flatnonzero(truth == label))
        found[own[: max(3, round(TRUSTED * len(own)))]] = True
    return found


def labelled(kind: str, table: Table, seed: int) -> np.ndarray:
    """Return the labels that the clients hold: those of trusted rows are right."""
    said = KINDS[kind](table, np.random.default_rng([seed, 1]))
    return np.where(table.trusted, table.truth, said)


def _next(table: Table) -> np.ndarray:
    """Return the class after the right one."""
    return (table.truth + 1) % table.classes


def _random(table: Table, rng: np.random.Generator) -> np.ndarray:
    count = len(table.truth)
    other = (table.truth + rng.integers(1, table.classes, count)) % table.classes
    return np.where(rng.permutation(count) < count / 3, other, table.truth)


def _confused(share: float, clients: int) -> Callable:
    """Return the mistake of calling one class another, in a share of its rows, at some clients."""

    def said(table: Table, rng: np.random.Generator) -> np.ndarray:
        wrong = (table.truth == rng.integers(table.classes)) & (table.clients < clients)
        return np.where(wrong & (rng.random(len(wrong)) < share), _next(table), table.truth)

    return said


def _boundary(table: Table, rng: np.random.Generator) -> np.ndarray:
    """Return the runner-up for the quarter of the rows where a pooled model is least sure."""
    model = LogisticRegression(C=0.1, max_iter=1000).fit(table.inputs, table.truth)
    odds = model.predict_log_proba(table.inputs)
    own = np.take_along_axis(odds, table.truth[:, None], 1)[:, 0]
    np.put_along_axis(odds, table.truth[:, None], -np.inf, 1)
    margin = np.abs(own - odds.max(1))
    return np.where(margin < np.quantile(margin, 0.25), odds.argmax(1), table.truth)


def _quantile(table: Table, rng: np.random.Generator) -> np.ndarray:
    """Return the next class for the quarter of the rows where the most telling feature is large."""
    scores = f_classif(table.inputs, table.truth)[0]
    feature = table.inputs[:, np.nanargmax(scores)]
    return np.where(feature > np.quantile(feature, 0.75), _next(table), table.truth)


def _reversed(table: Table, rng: np.random.Generator) -> np.ndarray:
    return np.where(table.clients == 0, _next(table), table.truth)


def _drifted(table: Table, rng: np.random.Generator) -> np.ndarray:
    """Return the next class in one or two of each client's four periods."""
    bad = np.zeros((CLIENTS, PERIODS), bool)
    for i in range(CLIENTS):
        bad[i, rng.permutation(PERIODS)[: 1 + i % 2]] = True
    return np.where(bad[table.clients, table.periods], _next(table), table.truth)


KINDS = {
    "random": _random,
    "often": _confused(0.6, CLIENTS),
    "always": _confused(1.0, CLIENTS),
    "half": _confused(1.0, CLIENTS // 2),
    "boundary": _boundary,
    "quantile": _quantile,
    "reversed": _reversed,
    "drifted": _drifted,
}
