"""A classifier for labels of which some are wrong (`simfbo.tasks._label_cleaning`)."""

import warnings
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._simfbo import Steps
from simfbo.core.data import FederatedData, federate
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.estimators._base import FederatedClassifier, Table, check_positive, standardised
from simfbo.estimators._validation import InputError, mask
from simfbo.tasks._label_cleaning import Trust, first, model_of, problem, trust_in

_TENTH = 17  # purpose of a seed


class NoisyLabelClassifier(FederatedClassifier):
    """Logistic regression that learns how far to trust labels, from a few that are known right.

    Rows with trusted labels judge and do not train. Features are brought to mean 0 and deviation 1,
    by one exchange over the clients.

    Args:
        rounds: of the training; each is one exchange with the clients.
        steps: "auto" finds step sizes in some 15 exchanges more; or `simfbo.Steps`.
        trust: "network" for a trust in every row, from how well its label fits the others;
            "clients" for one trust in each client's labels.
        penalty: the L2 weight, beside a mean of cross-entropies of standardised rows.
        cohort: how many clients take part in a round; all by default.
        local_steps: how many steps a client takes in a round.
        batch_size: rows in a client's minibatch; all its rows by default.
        random_state: of the trusted rows where they are not given, of the network's first weights,
            and of cohorts and minibatches.
        verbose: 1 prints how the training goes.

    Attributes:
        classes_: the classes, sorted.
        coef_: [C, d], or [1, d] for two classes, in the units of X.
        intercept_: [C], or [1] for two classes.
        trust_: [N], the trust in every row's label, from 0 to 1; 1 for the trusted rows.
        client_trust_: its mean over each client's other rows; 1 for a client who has none.
        clients_: the clients' ids, in the order in which rows name them first.
        history_: the `simfbo.History` of the training, with the upper loss.
        ledger_: the `simfbo.Ledger`: what was sent, the exchange for the scales and the search for
            step sizes included.
        n_iter_: the rounds.
        n_features_in_: d.
        feature_names_in_: the names of X's columns, where it has some.
    """

    trust_: np.ndarray
    client_trust_: np.ndarray

    def __init__(
        self,
        *,
        rounds: int = 300,
        steps: str | Steps = "auto",
        trust: Trust = "network",
        penalty: float = 0.01,
        cohort: int | None = None,
        local_steps: int = 1,
        batch_size: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        """Keep the parameters; `fit` looks at them."""
        super().__init__(
            rounds=rounds, steps=steps, cohort=cohort, local_steps=local_steps,
            batch_size=batch_size, random_state=random_state, verbose=verbose,
        )  # fmt: skip
        self.trust = trust
        self.penalty = penalty

    def fit(self, X: Any, y: Any, clients: Any = None, trusted: Any = None) -> Self:
        """Return the estimator itself, fitted.

        Args:
            X: [N, d], the features.
            y: [N], the labels.
            clients: [N], who holds each row; one client holds all where it is left out.
            trusted: [N], True for rows whose labels are known to be right, at some of the clients
                at least. Left out, a random tenth of every client's rows is taken for right, with a
                warning.
        """
        check_positive(self, "penalty")
        if self.trust not in ("network", "clients"):
            raise InputError(f"trust must be 'network' or 'clients', got {self.trust!r}.")
        table, seed = self._read(X, y, clients), self._seed()
        judges, rows = _judges(table, trusted, seed), standardised(table)
        losses = weighed, (self.trust, table.classes, self.penalty)
        own = (rows.features, rows.target, table.clients.owner)
        data = _shared_out(own, table, judges, self.batch_size)
        sizes = len(table.clients.ids), rows.features.shape[1], table.classes
        state = self._train(losses, data, first(self.trust, *sizes, seed), rows.ledger, seed)
        self._keep(table, rows, model_of(state.y))
        found = trust_in(state.x, state.y, tuple(map(jnp.asarray, own)), table.classes)
        self.trust_ = np.where(judges, 1.0, np.asarray(found, float))
        self.client_trust_ = _means(self.trust_, table, ~judges)
        return self


def weighed(trust: Trust, classes: int, penalty: float) -> BilevelProblem:
    """Return the task's losses, on batches (features, label, client, lower and upper factor).

    The factors make sums over clients into means over rows: a client without trusted rows, or with
    no others, weighs nothing at that level.
    """
    plain = problem(trust, classes, penalty)

    def lower(x: PyTree, y: Any, batch: tuple) -> Any:
        return batch[3].mean() * plain.lower(x, y, batch[:3])

    def upper(x: PyTree, y: Any, batch: tuple) -> Any:
        return batch[4].mean() * plain.upper(x, y, batch[:3])

    return BilevelProblem(upper, lower)


def _judges(table: Table, trusted: Any, seed: int) -> np.ndarray:
    """Return which rows are trusted; a tenth at random where the user does not say."""
    if trusted is not None:
        found = mask("trusted", trusted, len(table.target))
        if found.all() or not found.any():
            raise InputError("trusted must be True for some rows and False for others.")
        return found
    warnings.warn(
        "No row is known to be right: a random tenth of every client's rows is taken for right. "
        "Pass trusted= to fit.",
        UserWarning,
        stacklevel=3,
    )
    rng, found = np.random.default_rng([_TENTH, seed]), np.zeros(len(table.target), bool)
    for rows in table.parts:
        found[rng.permutation(rows)[: min(-(-len(rows) // 10), len(rows) - 1)]] = True
    if not found.any():
        raise InputError("No client has two rows, one of which could be trusted: pass trusted=.")
    return found


def _shared_out(
    own: tuple[np.ndarray, ...], table: Table, judges: np.ndarray, batch_size: int | None
) -> FederatedData:
    """Return data in which trusted rows are the upper part, and all others the lower part."""
    owner, parts = table.clients.owner, table.parts
    factors = tuple(_factor(owner, chosen) for chosen in (~judges, judges))
    # Who has no row at a level lends one that weighs nothing.
    lower, upper = (
        [rows[chosen[rows]] if chosen[rows].any() else rows[:1] for rows in parts]
        for chosen in (~judges, judges)
    )
    sizes = np.bincount(owner).tolist()
    return federate((*own, *factors), lower, upper, batch_size=batch_size, p=sizes)


def _factor(owner: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return for every row its client's share of the chosen rows over its share of all."""
    some, everything = np.bincount(owner, chosen), np.bincount(owner)
    return ((some / chosen.sum()) / (everything / len(owner))).astype(np.float32)[owner]


def _means(trust: np.ndarray, table: Table, counted: np.ndarray) -> np.ndarray:
    """Return the mean over each client's counted rows; one where there are none."""
    owner, clients = table.clients.owner[counted], len(table.clients.ids)
    total, count = (np.bincount(owner, w, clients) for w in (trust[counted], None))
    return np.where(count > 0, total / np.maximum(count, 1), 1.0)
