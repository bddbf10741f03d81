"""A classifier for partly wrong labels (`simfbo.tasks._label_cleaning`)."""

import warnings
from typing import Any, NamedTuple, Self

import numpy as np

from simfbo.core.keys import Purpose, seed_rng
from simfbo.core.partition import Rows
from simfbo.core.problem import Point, PyTree
from simfbo.errors import UserError
from simfbo.estimators._base import check_positive
from simfbo.estimators._docs import documented
from simfbo.estimators._linear import LinearClassifier
from simfbo.estimators._scaling import Table, standardised
from simfbo.estimators._validation import Data, RandomState, mask, members
from simfbo.runs.trackers.tracking import Track
from simfbo.tasks import _label_cleaning_folds as in_folds
from simfbo.tasks import linear
from simfbo.tasks._label_cleaning import Trust, assemble, model_of, trust_in
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Training
from simfbo.tasks.task import Setting


@documented
class NoisyLabelClassifier(LinearClassifier):
    """Logistic regression that learns the weights of noisy labels from a few trusted ones.

    Rows with trusted labels are used for validation and, in `folds`, also for training. Features
    are standardised in two exchanges with the clients.

    Args:
        {training}
        trust: "network" for a trust in every row, computed from the fit of its label to a model;
            "clients" for one trust in each client's labels, or in those of each of its periods.
        penalty: the L2 weight, relative to the mean cross-entropy of standardised rows.
        folds: of a cross-validation over the trusted rows, so that they are trained on as well;
            fewer if no class has as many. The network then evaluates labels by a model of the
            trusted rows, so that it detects systematic mistakes of all clients too. One model is
            trained per fold, and trust is small if the trusted rows suffice. With None the trusted
            rows only validate, and the network evaluates labels by a model of the others.
        {federation}

    Attributes:
        {classifier}
        trust_: [N], the trust in every row's label, from 0 to 1; 1 for the trusted rows.
        client_trust_: the mean over each client's rows that are not trusted; 1 if there are none.
        periods_: the periods in order of first appearance; None without `periods`.
        period_trust_: [clients, periods], the mean over the client's rows of each period that are
            not trusted; NaN if there are none. None without `periods`.
        {results}
    """

    trust_: np.ndarray
    client_trust_: np.ndarray
    periods_: np.ndarray | None
    period_trust_: np.ndarray | None

    def __init__(
        self,
        *,
        rounds: int = 300,
        tol: float = 1e-3,
        steps: str | Point[float] = "auto",
        trust: Trust = "network",
        penalty: float = 0.01,
        folds: int | None = 5,
        cohort: int | None = None,
        local_steps: int = 1,
        batch_size: int | None = None,
        random_state: RandomState = None,
        verbose: int = 0,
        track: Track | None = None,
    ) -> None:
        """Store the parameters; `fit` validates them."""
        super().__init__(
            rounds=rounds,
            tol=tol,
            steps=steps,
            cohort=cohort,
            local_steps=local_steps,
            batch_size=batch_size,
            random_state=random_state,
            verbose=verbose,
            track=track,
        )
        self.trust = trust
        self.penalty = penalty
        self.folds = folds

    def fit(
        self,
        X: Data,
        y: Data,
        clients: Data = None,
        trusted: Data = None,
        periods: Data = None,
    ) -> Self:
        """Train on the clients' rows.

        Args:
            X: [N, d], the features: an array, or a DataFrame, which may hold text and gaps.
            y: [N], the labels.
            clients: [N], the client that holds each row, or the name of a column of X, which is
                then no feature; a single client by default, with a warning.
            trusted: [N], True for rows with labels that are known to be correct, or the name of a
                column; clients may have none. By default a random tenth of every client's rows is
                trusted, with a warning.
            periods: [N], the period of each row's label, such as a month, or the name of a column.
                With trust="clients", every client then has a trust for each of its periods, for
                temporary mistakes. Periods with the same name are separate for each client.
        """
        self._check_trust(periods)
        table, seed = self._read(X, y, clients, trusted=trusted, periods=periods), self._seed()
        trusted_rows = _trusted_rows(table, table.given["trusted"], seed)
        rows, cells = standardised(table), _cells(table)
        setting = self._setting(rows.training, trusted_rows, cells.cell, seed)
        state = self._train(setting, rows, seed)
        self._keep(table, rows, self._model(state.y))
        trust = self._trust_in(state, setting.data.lower.samples, table.classes)
        self._keep_trust(np.where(trusted_rows, 1.0, trust), ~trusted_rows, table, cells)
        return self

    def _check_trust(self, periods: Data) -> None:
        """Validate the parameters of the trust and the presence of periods."""
        check_positive(self, "penalty")
        if self.trust not in ("network", "clients"):
            raise UserError(f"trust must be 'network' or 'clients', got {self.trust!r}.")
        if periods is not None and self.trust == "network":
            raise UserError(
                "periods= needs trust='clients', one trust for each client and period: the network "
                "judges rows one by one and knows neither. Set trust='clients' or omit periods."
            )

    def _setting(
        self, training: Training, trusted: np.ndarray, cells: np.ndarray, seed: int
    ) -> Setting:
        """Assemble the problem, in which trusted rows validate or, with folds, also train."""
        common: Any = {
            "trust": self.trust,
            "penalty": self.penalty,
            "cells": cells,
            "batch_size": self.batch_size,
            "seed": seed,
        }
        if self.folds is None:
            split = _selected(training, ~trusted), _selected(training, trusted)
            return assemble(training, split, by_row=True, **common)
        folds = self._folds(self.folds, training.target[trusted])
        return in_folds.assemble(training, trusted, folds=folds, **common)

    def _model(self, y: PyTree) -> Linear:
        """Return the model of predictions."""
        return model_of(y) if self.folds is None else linear.averaged(model_of(y))

    def _trust_in(self, state: Any, rows: linear.Batch, classes: int) -> np.ndarray:
        """Compute the trust in all rows as if none were trusted."""
        compute = trust_in if self.folds is None else in_folds.trust_in
        return np.asarray(compute(state.x, state.y, rows[:3], classes), float)

    def _keep_trust(
        self, trust: np.ndarray, noisy: np.ndarray, table: Table, cells: "_Cells"
    ) -> None:
        """Store the trust in rows, and its means over clients and periods."""
        owner, clients, periods = table.clients.owner, len(table.clients.ids), cells.periods
        self.trust_, self.periods_, self.period_trust_ = trust, periods, None
        means = _means(trust[noisy], owner[noisy], clients)
        self.client_trust_ = np.where(np.isnan(means), 1.0, means)
        if periods is not None:
            means = _means(trust[noisy], cells.pair[noisy], clients * len(periods))
            self.period_trust_ = means.reshape(clients, len(periods))


class _Cells(NamedTuple):
    """Groups of rows with a common trust.

    Attributes:
        periods: the ids of the periods; None if there are none.
        pair: [N], the index of the row's client and period among all pairs.
        cell: [N], the index among the pairs that occur.
    """

    periods: np.ndarray | None
    pair: np.ndarray
    cell: np.ndarray


def _cells(table: Table) -> _Cells:
    """Enumerate the pairs of client and period that occur; there is one period by default."""
    values, owner = table.given["periods"], table.clients.owner
    periods = members("periods", values, len(owner))
    pair = owner.astype(np.int64) * len(periods.ids) + periods.owner
    cell = np.unique(pair, return_inverse=True)[1].astype(np.int32)
    return _Cells(None if values is None else periods.ids, pair, cell)


def _trusted_rows(table: Table, trusted: Data, seed: int) -> np.ndarray:
    """Return a mask of the trusted rows, by default of a random tenth."""
    if trusted is not None:
        selected = mask("trusted", trusted, len(table.target))
        if selected.all() or not selected.any():
            raise UserError("trusted must be True for some rows and False for others.")
        return selected
    warnings.warn(
        "No rows are known to be correct, so a random tenth of every client's rows is trusted. "
        "Pass trusted= to fit.",
        UserWarning,
        stacklevel=3,
    )
    rng, selected = seed_rng(seed, Purpose.TRUSTED_ROWS), np.zeros(len(table.target), bool)
    for rows in table.parts:
        selected[rng.permutation(rows)[: min(-(-len(rows) // 10), len(rows) - 1)]] = True
    if not selected.any():
        raise UserError("No client has two rows, so none can be trusted: pass trusted=.")
    return selected


def _selected(training: Training, selected: np.ndarray) -> Rows:
    """Return the selected rows of each client."""
    return [rows[selected[rows]] for rows in training.parts]


def _means(values: np.ndarray, group: np.ndarray, size: int) -> np.ndarray:
    """Return the mean of the values of each group; NaN for empty groups."""
    total, count = np.bincount(group, values, size), np.bincount(group, minlength=size)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
