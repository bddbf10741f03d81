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
    """Logistic regression that learns how far to trust labels, from a few known to be correct.

    Rows with trusted labels are used for validation and, in `folds`, also for training. Features
    are standardised, by two exchanges over the clients.

    Args:
        {training}
        trust: "network" for a trust in every row, based on how well its label fits the others;
            "clients" for one trust in each client's labels, or in those of each of its periods.
        penalty: the L2 weight, relative to the mean cross-entropy of standardised rows.
        folds: of a cross-validation over the trusted rows, so that they train as well; fewer if no
            class has as many. The network then judges labels by a model of the trusted rows, so it
            also sees mistakes that all clients make. It costs as many models, and trust is small
            wherever the trusted rows suffice. With None these only validate, and the network judges
            by a model of the others.
        {federation}

    Attributes:
        {classifier}
        trust_: [N], the trust in every row's label, from 0 to 1; 1 for the trusted rows.
        client_trust_: its mean over each client's other rows; 1 for a client without any.
        periods_: the periods in order of first appearance; None without `periods`.
        period_trust_: [clients, periods], the trust in each client's labels of each period; NaN
            where it has none but trusted ones. None without `periods`.
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
            rounds=rounds, tol=tol, steps=steps, cohort=cohort, local_steps=local_steps,
            batch_size=batch_size, random_state=random_state, verbose=verbose,
            track=track,
        )  # fmt: skip
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
            trusted: [N], True for rows whose labels are known to be correct, or the name of a
                column; not every client needs some. By default a random tenth of every client's
                rows is trusted, with a warning.
            periods: [N], the period that each row's label is from, such as a month, or the name of
                a column. With trust="clients", every client then has a trust for each of its
                periods: for mistakes that come and go. Clients' periods of the same name are
                judged separately.
        """
        self._check_trust(periods)
        table, seed = self._read(X, y, clients, trusted=trusted, periods=periods), self._seed()
        judges, rows = _judges(table, table.given["trusted"], seed), standardised(table)
        cells = _cells(table)
        setting = self._setting(rows.training, judges, cells.cell, seed)
        state = self._train(setting, rows, seed)
        self._keep(table, rows, self._model(state.y))
        found = self._trust_in(state, setting.data.lower.samples, table.classes)
        self._keep_trust(np.where(judges, 1.0, found), ~judges, table, cells)
        return self

    def _check_trust(self, periods: Data) -> None:
        """Raise unless the parameters of the trust are valid and go with the periods."""
        check_positive(self, "penalty")
        if self.trust not in ("network", "clients"):
            raise UserError(f"trust must be 'network' or 'clients', got {self.trust!r}.")
        if periods is not None and self.trust == "network":
            raise UserError(
                "periods= needs trust='clients', one trust for each client and period: the network "
                "judges rows one by one and knows neither. Set trust='clients' or omit periods."
            )

    def _setting(
        self, training: Training, judges: np.ndarray, cells: np.ndarray, seed: int
    ) -> Setting:
        """Assemble the problem, in which trusted rows validate or, with folds, also train."""
        common: Any = {"trust": self.trust, "penalty": self.penalty, "cells": cells,
                       "batch_size": self.batch_size, "seed": seed}  # fmt: skip
        if self.folds is None:
            split = _chosen(training, ~judges), _chosen(training, judges)
            return assemble(training, split, by_row=True, **common)
        folds = self._folds(self.folds, training.target[judges])
        return in_folds.assemble(training, judges, folds=folds, **common)

    def _model(self, y: PyTree) -> Linear:
        """Return the model that makes predictions."""
        return model_of(y) if self.folds is None else linear.averaged(model_of(y))

    def _trust_in(self, state: Any, rows: linear.Batch, classes: int) -> np.ndarray:
        """Return the trust in rows that are not trusted anyway."""
        judge = trust_in if self.folds is None else in_folds.trust_in
        return np.asarray(judge(state.x, state.y, rows[:3], classes), float)

    def _keep_trust(
        self, trust: np.ndarray, judged: np.ndarray, table: Table, cells: "_Cells"
    ) -> None:
        """Store the trust in rows, in clients and in their periods."""
        owner, clients, periods = table.clients.owner, len(table.clients.ids), cells.periods
        self.trust_, self.periods_, self.period_trust_ = trust, periods, None
        means = _means(trust[judged], owner[judged], clients)
        self.client_trust_ = np.where(np.isnan(means), 1.0, means)
        if periods is not None:
            found = _means(trust[judged], cells.place[judged], clients * len(periods))
            self.period_trust_ = found.reshape(clients, len(periods))


class _Cells(NamedTuple):
    """Which rows share a trust.

    Attributes:
        periods: the ids of the periods; None if there are none.
        place: [N], the number of every row's client and period among all pairs of them.
        cell: [N], its number among those that occur.
    """

    periods: np.ndarray | None
    place: np.ndarray
    cell: np.ndarray


def _cells(table: Table) -> _Cells:
    """Number the pairs of client and period that occur; one period if the user names none."""
    given, owner = table.given["periods"], table.clients.owner
    found = members("periods", given, len(owner))
    place = owner.astype(np.int64) * len(found.ids) + found.owner
    cell = np.unique(place, return_inverse=True)[1].astype(np.int32)
    return _Cells(None if given is None else found.ids, place, cell)


def _judges(table: Table, trusted: Data, seed: int) -> np.ndarray:
    """Return which rows are trusted; a random tenth if the user does not say."""
    if trusted is not None:
        found = mask("trusted", trusted, len(table.target))
        if found.all() or not found.any():
            raise UserError("trusted must be True for some rows and False for others.")
        return found
    warnings.warn(
        "No rows are known to be correct, so a random tenth of every client's rows is trusted. "
        "Pass trusted= to fit.",
        UserWarning,
        stacklevel=3,
    )
    rng, found = seed_rng(seed, Purpose.TRUSTED_ROWS), np.zeros(len(table.target), bool)
    for rows in table.parts:
        found[rng.permutation(rows)[: min(-(-len(rows) // 10), len(rows) - 1)]] = True
    if not found.any():
        raise UserError("No client has two rows, so none can be trusted: pass trusted=.")
    return found


def _chosen(training: Training, chosen: np.ndarray) -> Rows:
    """Return the chosen ones of each client's rows."""
    return [rows[chosen[rows]] for rows in training.parts]


def _means(values: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Return the mean of the values at each place; NaN for places without any."""
    total, count = np.bincount(place, values, size), np.bincount(place, minlength=size)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
