"""Linear models for the group that fares worst (`simfbo.tasks._fair`)."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._simfbo import Steps
from simfbo.estimators._base import (
    FederatedClassifier,
    FederatedLinear,
    FederatedRegressor,
    Scaled,
    Table,
    check_positive,
    standardised,
)
from simfbo.estimators._scaling import one_hot
from simfbo.estimators._validation import Members, members
from simfbo.tasks import linear
from simfbo.tasks._fair import first, group_means, held_out, problem
from simfbo.tasks.models import Linear


class Fair(FederatedLinear):
    """A linear model with weights for groups; see its subclasses."""

    groups_: np.ndarray
    group_weights_: np.ndarray
    group_loss_: np.ndarray

    def __init__(
        self,
        *,
        rounds: int = 300,
        steps: str | Steps = "auto",
        folds: int = 5,
        penalty: float = 0.003,
        sharpness: float = 20.0,
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
        self.folds = folds
        self.penalty = penalty
        self.sharpness = sharpness

    def fit(self, X: Any, y: Any, clients: Any = None, groups: Any = None) -> Self:
        """Return the estimator itself, fitted.

        Args:
            X: [N, d], the features.
            y: [N], the target.
            clients: [N], who holds each row; one client holds all where it is left out.
            groups: [N], the group of each row; the clients where it is left out.
        """
        check_positive(self, "penalty", "sharpness")
        table, seed = self._read(X, y, clients), self._seed()
        group = table.clients if groups is None else members("groups", groups, len(table.target))
        rows = standardised(table, one_hot(group.owner, len(group.ids)))
        strata = group.owner if not table.classes else group.owner * table.classes + table.target
        folds = self._folds(self.folds, strata)
        own = (rows.features, rows.target, group.owner, linear.assign_folds(strata, folds, seed))
        data = linear.held(own, table.parts, self.batch_size)
        settings = tuple(rows.shares.tolist()), table.classes, folds, self.penalty, self.sharpness
        start = first(rows.shares, rows.features.shape[1], table.classes, folds)
        state = self._train((problem, settings), data, start, rows.ledger, seed)
        self._keep(table, rows, linear.averaged(state.y.models))
        self.groups_ = group.ids
        self.group_weights_ = np.asarray(jax.nn.softmax(state.x), float) / rows.shares
        self.group_loss_ = _losses(table, rows, group, own, state.y.models)
        return self


class FairClassifier(FederatedClassifier, Fair):
    """Logistic regression that serves the group with the largest loss.

    Every group has a weight in training, learnt so that the largest of the groups' losses in a
    cross-validation falls; what predicts is the mean of the folds' models. Features are brought to
    mean 0 and deviation 1, by one exchange over the clients.

    Args:
        rounds: of the training; each is one exchange with the clients.
        steps: "auto" finds step sizes in some 15 exchanges more; or `simfbo.Steps`.
        folds: of the cross-validation; fewer where no class of a group has as many rows.
        penalty: the L2 weight, beside a mean of cross-entropies of standardised rows.
        sharpness: how closely the training looks at the largest loss alone.
        cohort: how many clients take part in a round; all by default.
        local_steps: how many steps a client takes in a round.
        batch_size: rows in a client's minibatch; all its rows by default.
        random_state: of the folds, and of cohorts and minibatches.
        verbose: 1 prints how the training goes.

    Attributes:
        classes_: the classes, sorted.
        coef_: [C, d], or [1, d] for two classes, in the units of X.
        intercept_: [C], or [1] for two classes.
        groups_: the groups, in the order in which rows name them first.
        group_weights_: how much a row of each group counts; one on average over the rows.
        group_loss_: the mean cross-entropy of each group, every row judged by the model of the fold
            that did not train on it.
        clients_: the clients' ids, in the order in which rows name them first.
        history_: the `simfbo.History` of the training, with the upper loss.
        ledger_: the `simfbo.Ledger`: what was sent, the exchange for the scales and the search for
            step sizes included.
        n_iter_: the rounds.
        n_features_in_: d.
        feature_names_in_: the names of X's columns, where it has some.
    """


class FairRegressor(FederatedRegressor, Fair):
    """Ridge regression that serves the group with the largest error.

    The same as `FairClassifier`, for numbers; the target too is brought to mean 0 and deviation 1.

    Args:
        rounds: of the training; each is one exchange with the clients.
        steps: "auto" finds step sizes in some 15 exchanges more; or `simfbo.Steps`.
        folds: of the cross-validation; fewer where no group has as many rows.
        penalty: the L2 weight, beside a mean of half squared errors of standardised rows.
        sharpness: how closely the training looks at the largest loss alone.
        cohort: how many clients take part in a round; all by default.
        local_steps: how many steps a client takes in a round.
        batch_size: rows in a client's minibatch; all its rows by default.
        random_state: of the folds, and of cohorts and minibatches.
        verbose: 1 prints how the training goes.

    Attributes:
        coef_: [d], in the units of X and y.
        intercept_: a number.
        groups_: the groups, in the order in which rows name them first.
        group_weights_: how much a row of each group counts; one on average over the rows.
        group_loss_: the mean squared error of each group in the units of y, every row judged by the
            model of the fold that did not train on it.
        clients_: the clients' ids, in the order in which rows name them first.
        history_: the `simfbo.History` of the training, with the upper loss.
        ledger_: the `simfbo.Ledger`: what was sent, the exchange for the scales and the search for
            step sizes included.
        n_iter_: the rounds.
        n_features_in_: d.
        feature_names_in_: the names of X's columns, where it has some.
    """


def _losses(table: Table, rows: Scaled, group: Members, own: tuple, models: Linear) -> np.ndarray:
    """Return each group's loss in the folds, where it is squared error in the units of y."""
    own = tuple(map(jnp.asarray, own))
    found = group_means(held_out(models, own, table.classes), own[2], len(group.ids))
    return np.asarray(found, float) * (1.0 if table.classes else 2 * rows.target_units[1] ** 2)
