"""Linear models with a learnt L2 weight for every feature (`simfbo.tasks._regularisation`)."""

from numbers import Real
from typing import Self

import jax
import numpy as np
from sklearn.utils import check_scalar

from simfbo.core.problem import Point
from simfbo.estimators._base import (
    FederatedClassifier,
    FederatedLinear,
    FederatedRegressor,
    check_positive,
)
from simfbo.estimators._docs import documented
from simfbo.estimators._scaling import standardised
from simfbo.estimators._validation import Data, RandomState
from simfbo.runs.trackers.tracking import Track
from simfbo.tasks import linear
from simfbo.tasks._regularisation import assemble, penalties, scaled
from simfbo.tasks.models import Linear


class Regularised(FederatedLinear):
    """A linear model with an L2 weight for every feature; see its subclasses."""

    regularisation_: np.ndarray

    def __init__(
        self,
        *,
        rounds: int = 300,
        tol: float = 1e-3,
        steps: str | Point[float] = "auto",
        folds: int = 5,
        floor: float = 0.01,
        sparsity: float = 0.1,
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
        self.folds = folds
        self.floor = floor
        self.sparsity = sparsity

    def fit(self, X: Data, y: Data, clients: Data = None) -> Self:
        """Train on the clients' rows.

        Args:
            X: [N, d], the features.
            y: [N], the target.
            clients: [N], the client that holds each row; a single client by default.
        """
        check_positive(self, "floor")
        check_scalar(self.sparsity, "sparsity", Real, min_val=0)
        table, seed = self._read(X, y, clients), self._seed()
        rows = standardised(table)
        folds = self._folds(self.folds, rows.training.strata)
        setting = assemble(
            rows.training, folds=folds, floor=self.floor, sparsity=self.sparsity,
            batch_size=self.batch_size, seed=seed,
        )  # fmt: skip
        state = self._train(setting, rows.ledger, seed)
        self._keep(table, rows, _model(state.x, state.y))
        self.regularisation_ = penalties(np.asarray(state.x, float), self.floor)
        return self


@jax.jit
def _model(x: jax.Array, y: Linear) -> Linear:
    """Return the mean of the folds' models, in the features' own units."""
    return scaled(x, linear.averaged(y))


@documented
class FederatedRidge(FederatedRegressor, Regularised):
    """Ridge regression that learns how strongly to regularise every feature.

    Features and target are standardised, by one exchange over the clients. The L2 weights minimise
    the error of a cross-validation; predictions use the mean of the folds' models.

    Args:
        {training}
        folds: of the cross-validation; fewer if there are fewer rows.
        floor: the smallest L2 weight.
        sparsity: how much a feature must improve the cross-validation to be kept; 0 leaves the
            cross-validation alone, which keeps many irrelevant features.
        {federation}

    Attributes:
        {regressor}
        regularisation_: [d], the L2 weights, relative to the mean of half squared errors of
            standardised rows.
        {results}

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> ridge = FederatedRidge(rounds=100, random_state=0).fit(X, 2 * X[:, 0])
        >>> ridge.regularisation_[0] < ridge.regularisation_[1:].min()
        np.True_
    """


@documented
class FederatedLogistic(FederatedClassifier, Regularised):
    """Logistic regression that learns how strongly to regularise every feature.

    Like `FederatedRidge`, but for classes: with the cross-entropy in place of the squared error.

    Args:
        {training}
        folds: of the cross-validation; fewer if no class has as many rows.
        floor: the smallest L2 weight.
        sparsity: how much a feature must improve the cross-validation to be kept; 0 leaves the
            cross-validation alone, which keeps many irrelevant features.
        {federation}

    Attributes:
        {classifier}
        regularisation_: [d], the L2 weights, relative to the mean cross-entropy of standardised
            rows.
        {results}
    """
