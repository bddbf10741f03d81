"""A classifier for classes of very different sizes (`simfbo.tasks._long_tail`)."""

from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np
from sklearn.utils import check_scalar

from simfbo.algorithms._simfbo import Steps
from simfbo.core.problem import BilevelProblem
from simfbo.estimators._base import FederatedClassifier, check_positive, standardised
from simfbo.estimators._scaling import one_hot
from simfbo.tasks import linear
from simfbo.tasks._long_tail import Adjustment, problem


class ClassAdjustment(NamedTuple):
    """What training does to the score of each class: scale * score + shift.

    Attributes:
        scale: [C].
        shift: [C]; the logarithm of the class' share is part of it.
    """

    scale: np.ndarray
    shift: np.ndarray


class LongTailClassifier(FederatedClassifier):
    """Logistic regression in which every class counts alike, however few rows it has.

    Training changes the classes' scores by a scale and a shift each, which are learnt by a
    cross-validation that weighs all classes alike; predictions use the scores alone. Features are
    brought to mean 0 and deviation 1, by one exchange over the clients.

    Args:
        rounds: of the training; each is one exchange with the clients.
        steps: "auto" finds step sizes in some 15 exchanges more; or `simfbo.Steps`.
        folds: of the cross-validation; fewer where no class has as many rows.
        penalty: the L2 weight, beside a mean of cross-entropies of standardised rows.
        prior: how strongly scales and shifts are held to those of logit adjustment, which keeps
            classes of a handful of rows from being overfitted.
        cohort: how many clients take part in a round; all by default.
        local_steps: how many steps a client takes in a round.
        batch_size: rows in a client's minibatch; all its rows by default.
        random_state: of the folds, and of cohorts and minibatches.
        verbose: 1 prints how the training goes.

    Attributes:
        classes_: the classes, sorted.
        coef_: [C, d], or [1, d] for two classes, in the units of X.
        intercept_: [C], or [1] for two classes.
        adjustment_: `scale` and `shift`, an array of a number per class each.
        clients_: the clients' ids, in the order in which rows name them first.
        history_: the `simfbo.History` of the training, with the upper loss.
        ledger_: the `simfbo.Ledger`: what was sent, the exchange for the scales and the search for
            step sizes included.
        n_iter_: the rounds.
        n_features_in_: d.
        feature_names_in_: the names of X's columns, where it has some.
    """

    adjustment_: ClassAdjustment

    def __init__(
        self,
        *,
        rounds: int = 300,
        steps: str | Steps = "auto",
        folds: int = 5,
        penalty: float = 0.003,
        prior: float = 0.03,
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
        self.prior = prior

    def fit(self, X: Any, y: Any, clients: Any = None) -> Self:
        """Return the estimator itself, fitted.

        Args:
            X: [N, d], the features.
            y: [N], the labels.
            clients: [N], who holds each row; one client holds all where it is left out.
        """
        check_positive(self, "penalty")
        check_scalar(self.prior, "prior", Real, min_val=0)
        table, seed = self._read(X, y, clients), self._seed()
        rows, classes = standardised(table, one_hot(table.target, table.classes)), table.classes
        folds, width = self._folds(self.folds, table.target), rows.features.shape[1]
        fold = linear.assign_folds(table.target, folds, seed)
        data = linear.held((rows.features, rows.target, fold), table.parts, self.batch_size)
        zero = np.zeros(classes, np.float32)
        start = Adjustment(zero, zero), linear.zeros(width, classes, folds)
        losses = balanced, (tuple(rows.shares.tolist()), folds, self.penalty, self.prior)
        state = self._train(losses, data, start, rows.ledger, seed)
        self._keep(table, rows, linear.averaged(state.y))
        scale, shift = (np.asarray(part, float) for part in state.x)
        self.adjustment_ = ClassAdjustment(np.exp(scale), np.log(rows.shares) + shift)
        return self


def balanced(shares: tuple[float, ...], folds: int, penalty: float, prior: float) -> BilevelProblem:
    """Return the task's losses, for shares as a tuple."""
    return problem(np.asarray(shares), folds, penalty, prior)
