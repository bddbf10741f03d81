"""Linear models with a learnt L2 weight for every feature (`simfbo.tasks._regularisation`)."""

import math
from numbers import Real
from typing import Any, Self

import numpy as np
from sklearn.utils import check_scalar

from simfbo.algorithms._simfbo import Steps
from simfbo.estimators._base import (
    FederatedClassifier,
    FederatedLinear,
    FederatedRegressor,
    check_positive,
    standardised,
)
from simfbo.tasks import linear
from simfbo.tasks._regularisation import problem, scaled, strengths


class Regularised(FederatedLinear):
    """A linear model with an L2 weight for every feature; see its subclasses."""

    regularisation_: np.ndarray

    def __init__(
        self,
        *,
        rounds: int = 300,
        steps: str | Steps = "auto",
        folds: int = 5,
        floor: float = 0.01,
        sparsity: float = 0.1,
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
        self.floor = floor
        self.sparsity = sparsity

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Return the estimator itself, fitted.

        Args:
            X: [N, d], the features.
            y: [N], the target.
            clients: [N], who holds each row; one client holds all where it is left out.
        """
        check_positive(self, "floor")
        check_scalar(self.sparsity, "sparsity", Real, min_val=0)
        table, seed = self._read(X, y, clients), self._seed()
        rows, count = standardised(table), len(table.target)
        strata = table.target if table.classes else np.zeros(count, np.int32)
        folds, width = self._folds(self.folds, strata), rows.features.shape[1]
        price = self.sparsity * math.log(count) / count
        losses = problem, (table.classes, folds, self.floor, price)
        fold = linear.assign_folds(strata, folds, seed)
        data = linear.held((rows.features, rows.target, fold), table.parts, self.batch_size)
        start = np.zeros(width, np.float32), linear.zeros(width, table.classes, folds)
        state = self._train(losses, data, start, rows.ledger, seed)
        self._keep(table, rows, scaled(state.x, linear.averaged(state.y)))
        self.regularisation_ = strengths(np.asarray(state.x, float), self.floor)
        return self


class FederatedRidge(FederatedRegressor, Regularised):
    """Ridge regression that learns how strongly to regularise every feature.

    Features and target are brought to mean 0 and deviation 1, by one exchange over the clients. The
    L2 weights are those for which a cross-validation has the least error; what predicts is the mean
    of the folds' models.

    Args:
        rounds: of the training; each is one exchange with the clients.
        steps: "auto" finds step sizes in some 15 exchanges more; or `simfbo.Steps`.
        folds: of the cross-validation; fewer where there are fewer rows.
        floor: the least L2 weight.
        sparsity: what a feature must be worth; 0 for the cross-validation's error alone, which
            keeps many of the features that do not matter.
        cohort: how many clients take part in a round; all by default.
        local_steps: how many steps a client takes in a round.
        batch_size: rows in a client's minibatch; all its rows by default.
        random_state: of the folds, and of cohorts and minibatches.
        verbose: 1 prints how the training goes.

    Attributes:
        coef_: [d], in the units of X and y.
        intercept_: a number.
        regularisation_: [d], the L2 weights, beside a mean of half squared errors of standardised
            rows.
        clients_: the clients' ids, in the order in which rows name them first.
        history_: the `simfbo.History` of the training, with the upper loss.
        ledger_: the `simfbo.Ledger`: what was sent, the exchange for the scales and the search for
            step sizes included.
        n_iter_: the rounds.
        n_features_in_: d.
        feature_names_in_: the names of X's columns, where it has some.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> ridge = FederatedRidge(rounds=100, random_state=0).fit(X, 2 * X[:, 0])
        >>> ridge.regularisation_[0] < ridge.regularisation_[1:].min()
        np.True_
    """


class FederatedLogistic(FederatedClassifier, Regularised):
    """Logistic regression that learns how strongly to regularise every feature.

    The same as `FederatedRidge`, for classes: with the cross-entropy in place of the error.

    Args:
        rounds: of the training; each is one exchange with the clients.
        steps: "auto" finds step sizes in some 15 exchanges more; or `simfbo.Steps`.
        folds: of the cross-validation; fewer where no class has as many rows.
        floor: the least L2 weight.
        sparsity: what a feature must be worth; 0 for the cross-validation's error alone, which
            keeps many of the features that do not matter.
        cohort: how many clients take part in a round; all by default.
        local_steps: how many steps a client takes in a round.
        batch_size: rows in a client's minibatch; all its rows by default.
        random_state: of the folds, and of cohorts and minibatches.
        verbose: 1 prints how the training goes.

    Attributes:
        classes_: the classes, sorted.
        coef_: [C, d], or [1, d] for two classes, in the units of X.
        intercept_: [C], or [1] for two classes.
        regularisation_: [d], the L2 weights, beside a mean of cross-entropies of standardised rows.
        clients_: the clients' ids, in the order in which rows name them first.
        history_: the `simfbo.History` of the training, with the upper loss.
        ledger_: the `simfbo.Ledger`: what was sent, the exchange for the scales and the search for
            step sizes included.
        n_iter_: the rounds.
        n_features_in_: d.
        feature_names_in_: the names of X's columns, where it has some.
    """
