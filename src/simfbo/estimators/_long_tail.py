"""A classifier for classes of very different sizes (`simfbo.tasks._long_tail`)."""

from numbers import Real
from typing import NamedTuple, Self

import numpy as np
from sklearn.utils import check_scalar

from simfbo.core.problem import Point
from simfbo.estimators._base import check_positive
from simfbo.estimators._docs import documented
from simfbo.estimators._linear import LinearClassifier
from simfbo.estimators._scaling import one_hot, standardised
from simfbo.estimators._validation import Data, RandomState
from simfbo.runs.trackers.tracking import Track
from simfbo.tasks import linear
from simfbo.tasks._long_tail import assemble


class ClassAdjustment(NamedTuple):
    """The adjustment of the score of each class in training: scale * score + shift.

    Attributes:
        scale: [C].
        shift: [C], including the logarithm of the class's share.
    """

    scale: np.ndarray
    shift: np.ndarray


@documented
class LongTailClassifier(LinearClassifier):
    """Logistic regression in which all classes have the same weight, regardless of their sizes.

    Training adjusts the score of each class by a scale and a shift, which are learnt by a
    cross-validation that weights all classes equally; predictions use the unadjusted scores.
    Features are standardised in two exchanges with the clients.

    Args:
        {training}
        folds: of the cross-validation; fewer if no class has as many rows.
        penalty: the L2 weight, relative to the mean cross-entropy of standardised rows.
        prior: the weight of a penalty that pulls scales and shifts towards those of logit
            adjustment, to prevent overfitting to classes with a handful of rows.
        {federation}

    Attributes:
        {classifier}
        adjustment_: `scale` and `shift`, an array with one number per class each.
        {results}
    """

    adjustment_: ClassAdjustment

    def __init__(
        self,
        *,
        rounds: int = 300,
        tol: float = 1e-3,
        steps: str | Point[float] = "auto",
        folds: int = 5,
        penalty: float = 0.003,
        prior: float = 0.03,
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
        self.folds = folds
        self.penalty = penalty
        self.prior = prior

    def fit(self, X: Data, y: Data, clients: Data = None) -> Self:
        """Train on the clients' rows.

        Args:
            X: [N, d], the features: an array, or a DataFrame, which may hold text and gaps.
            y: [N], the labels.
            clients: [N], the client that holds each row, or the name of a column of X, which is
                then no feature; a single client by default, with a warning.
        """
        check_positive(self, "penalty")
        check_scalar(self.prior, "prior", Real, min_val=0)
        table, seed = self._read(X, y, clients), self._seed()
        rows = standardised(table, one_hot(table.target, table.classes))
        setting = assemble(
            rows.training,
            rows.shares,
            folds=self._folds(self.folds, table.target),
            penalty=self.penalty,
            prior=self.prior,
            batch_size=self.batch_size,
            seed=seed,
        )
        state = self._train(setting, rows, seed)
        self._keep(table, rows, linear.averaged(state.y))
        scale, shift = (np.asarray(array, float) for array in state.x)
        self.adjustment_ = ClassAdjustment(np.exp(scale), np.log(rows.shares) + shift)
        return self
