"""A classifier for partly wrong labels (`simfbo.tasks._label_cleaning`)."""

import warnings
from typing import Self

import numpy as np

from simfbo.core.keys import Purpose, seed_rng
from simfbo.core.partition import Rows
from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.estimators._base import check_positive
from simfbo.estimators._docs import documented
from simfbo.estimators._linear import LinearClassifier
from simfbo.estimators._scaling import Table, standardised
from simfbo.estimators._validation import Data, RandomState, mask
from simfbo.runs.trackers.tracking import Track
from simfbo.tasks._label_cleaning import Trust, assemble, model_of, trust_in


@documented
class NoisyLabelClassifier(LinearClassifier):
    """Logistic regression that learns how far to trust labels, from a few known to be correct.

    Rows with trusted labels are used for validation, not for training. Features are standardised,
    by one exchange over the clients.

    Args:
        {training}
        trust: "network" for a trust in every row, based on how well its label fits the others;
            "clients" for one trust in each client's labels.
        penalty: the L2 weight, relative to the mean cross-entropy of standardised rows.
        {federation}

    Attributes:
        {classifier}
        trust_: [N], the trust in every row's label, from 0 to 1; 1 for the trusted rows.
        client_trust_: its mean over each client's other rows; 1 for a client without any.
        {results}
    """

    trust_: np.ndarray
    client_trust_: np.ndarray

    def __init__(
        self,
        *,
        rounds: int = 300,
        tol: float = 1e-3,
        steps: str | Point[float] = "auto",
        trust: Trust = "network",
        penalty: float = 0.01,
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

    def fit(
        self,
        X: Data,
        y: Data,
        clients: Data = None,
        trusted: Data = None,
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
        """
        check_positive(self, "penalty")
        if self.trust not in ("network", "clients"):
            raise UserError(f"trust must be 'network' or 'clients', got {self.trust!r}.")
        table, seed = self._read(X, y, clients, trusted=trusted), self._seed()
        judges, rows = _judges(table, table.given["trusted"], seed), standardised(table)
        split = _chosen(table, ~judges), _chosen(table, judges)
        setting = assemble(
            rows.training, split, trust=self.trust, penalty=self.penalty,
            batch_size=self.batch_size, seed=seed, by_row=True,
        )  # fmt: skip
        state = self._train(setting, rows, seed)
        self._keep(table, rows, model_of(state.y))
        found = trust_in(state.x, state.y, setting.data.lower.samples[:3], table.classes)
        self.trust_ = np.where(judges, 1.0, np.asarray(found, float))
        self.client_trust_ = _means(self.trust_, table, ~judges)
        return self


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


def _chosen(table: Table, chosen: np.ndarray) -> Rows:
    """Return the chosen ones of each client's rows."""
    return [rows[chosen[rows]] for rows in table.parts]


def _means(trust: np.ndarray, table: Table, counted: np.ndarray) -> np.ndarray:
    """Return the mean over each client's counted rows; one for clients without any."""
    owner, clients = table.clients.owner[counted], len(table.clients.ids)
    total, count = (np.bincount(owner, w, clients) for w in (trust[counted], None))
    return np.where(count > 0, total / np.maximum(count, 1), 1.0)
