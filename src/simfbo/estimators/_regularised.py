"""Models with a learnt L2 weight for every feature (`simfbo.tasks._regularisation`)."""

from numbers import Real
from typing import Any, Self

import jax
import numpy as np
from sklearn.metrics import d2_tweedie_score
from sklearn.utils import check_scalar

from simfbo.core.data import bucket_size
from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.estimators import _export
from simfbo.estimators._base import FederatedEstimator, check_positive
from simfbo.estimators._columns import take_named
from simfbo.estimators._deployment import Deployable
from simfbo.estimators._docs import documented
from simfbo.estimators._linear import FederatedLinear, LinearClassifier, LinearRegressor
from simfbo.estimators._scaling import Scaled, Table, standardised
from simfbo.estimators._validation import Data, RandomState, numbers, weights
from simfbo.runs.trackers.tracking import Track
from simfbo.tasks import linear
from simfbo.tasks._regularisation import LINEAR, Form, assemble, penalties, scaled
from simfbo.tasks.models import Linear


class Regularised(FederatedEstimator):
    """A model with an L2 weight for every feature; see its subclasses."""

    def __init__(
        self,
        *,
        rounds: int = 1000,
        tol: float = 1e-3,
        steps: str | Point[float] = "auto",
        folds: int = 5,
        floor: float = 0.0005,
        spread: float = 0.5,
        sparsity: float = 0.0,
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
        self.floor = floor
        self.spread = spread
        self.sparsity = sparsity

    def fit(self, X: Data, y: Data, clients: Data = None, sample_weight: Data = None) -> Self:
        """Train on the clients' rows.

        Args:
            X: [N, d], the features: an array, or a DataFrame, which may hold text and gaps.
            y: [N], the target.
            clients: [N], the client that holds each row, or the name of a column of X, which is
                then no feature; a single client by default, with a warning.
            sample_weight: [N], the weight of each row, or the name of a column of X.
        """
        check_positive(self, "floor", "spread")
        check_scalar(self.sparsity, "sparsity", Real, min_val=0)
        table = self._read(X, y, clients, sample_weight=sample_weight)
        weight = weights(table.given["sample_weight"], len(table.target))
        seed, rows = self._seed(), standardised(table, weight=weight)
        folds = self._folds(self.folds, rows.training.strata)
        setting = assemble(
            rows.training,
            folds=folds,
            floor=self.floor,
            sparsity=self.sparsity,
            spread=self.spread,
            batch_size=self.batch_size,
            seed=seed,
            count=bucket_size(len(table.target)),  # equal for tables of similar sizes
            form=self._form(),
        )
        state = self._train(setting, rows, seed)
        self._keep_clients(table, rows)
        self._keep_state(table, rows, state)
        return self

    def _form(self) -> Form:
        """Return the kind of model."""
        raise NotImplementedError

    def _keep_state(self, table: Table, rows: Scaled, state: Any) -> None:
        """Store the model in the last state of a run, and its L2 weights."""
        raise NotImplementedError


class RegularisedLinear(Regularised, FederatedLinear):
    """A linear model with an L2 weight for every feature; see its subclasses."""

    def _form(self) -> Form:
        return LINEAR

    def _keep_state(self, table: Table, rows: Scaled, state: Any) -> None:
        """Store the mean of the folds' models, and the L2 weights."""
        self._keep_model(_model(state.x, state.y), rows.units, rows.target_units, table.classes)
        self.regularisation_ = penalties(np.asarray(state.x, float), self.floor)


@jax.jit
def _model(x: jax.Array, y: Linear) -> Linear:
    """Return the mean of the folds' models in the original units of the features."""
    return scaled(x, linear.averaged(y))


@documented
class FederatedRidge(LinearRegressor, RegularisedLinear, Deployable):
    """Ridge regression that learns an L2 weight for every feature.

    Features and target are standardised in two exchanges with the clients. The L2 weights minimise
    the error of a cross-validation; predictions use the mean of the folds' models.

    Args:
        {training}
        folds: of the cross-validation; fewer if there are fewer rows.
        {penalties}
        {federation}

    Attributes:
        {regressor}
        regularisation_: [d], the L2 weights, relative to the mean of half squared errors of
            standardised rows.
        {results}

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(60, 3))
        >>> y = 2 * X[:, 0] + rng.normal(size=60)
        >>> ridge = FederatedRidge(random_state=0).fit(X, y, clients=np.arange(60) % 3)
        >>> ridge.regularisation_[0] < ridge.regularisation_[1:].min()
        np.True_
    """


@documented
class FederatedLogistic(LinearClassifier, RegularisedLinear, Deployable):
    """Logistic regression that learns an L2 weight for every feature.

    Like `FederatedRidge`, but for classes: with the cross-entropy in place of the squared error.

    Args:
        {training}
        folds: of the cross-validation; fewer if no class has as many rows.
        {penalties}
        {federation}

    Attributes:
        {classifier}
        regularisation_: [d], the L2 weights, relative to the mean cross-entropy of standardised
            rows.
        {results}
    """


FAMILIES = {"poisson": linear.Target.COUNT, "gamma": linear.Target.SIZE}


@documented
class FederatedGLM(LinearRegressor, RegularisedLinear):
    """Regression of counts, rates and positive amounts that learns an L2 weight for every feature.

    Like `FederatedRidge`, with a log link, and with half the deviance in place of half the squared
    error. For rates, pass y = counts / exposure and sample_weight = exposure; for survival with a
    constant hazard, y = event / time and sample_weight = time.

    Args:
        family: "poisson" for counts and rates, "gamma" for positive amounts.
        {training}
        folds: of the cross-validation; fewer if there are fewer rows.
        {penalties}
        {federation}

    Attributes:
        {regressor}
        regularisation_: [d], the L2 weights, relative to half the mean deviance of a target of mean
            one and of standardised rows.
        {results}

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 2))
        >>> y = rng.poisson(np.exp(1 + X[:, 0] / 2))
        >>> model = FederatedGLM(random_state=0).fit(X, y, clients=np.arange(200) % 4)
        >>> bool(abs(model.coef_[0] - 0.5) < 0.1)
        True
    """

    def __init__(
        self,
        *,
        family: str = "poisson",
        rounds: int = 1000,
        tol: float = 1e-3,
        steps: str | Point[float] = "auto",
        folds: int = 5,
        floor: float = 0.0005,
        spread: float = 0.5,
        sparsity: float = 0.0,
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
            folds=folds,
            floor=floor,
            spread=spread,
            sparsity=sparsity,
            cohort=cohort,
            local_steps=local_steps,
            batch_size=batch_size,
            random_state=random_state,
            verbose=verbose,
            track=track,
        )
        self.family = family

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Validate the target; return it as floats with the `Target` of the family."""
        if self.family not in FAMILIES:
            raise UserError(f"family must be 'poisson' or 'gamma', got {self.family!r}.")
        y = numbers("y", y)
        if y.min() < 0 or (self.family == "gamma" and y.min() == 0):
            sign = "positive" if self.family == "gamma" else "zero or positive"
            raise UserError(f"y must be {sign} in every row for family={self.family!r}.")
        return y, FAMILIES[self.family]

    def _plain(self, weights: np.ndarray) -> Any:
        kind = _export.GLMS[self.family]
        return _export.regressor(weights, self.intercept_, self.n_iter_, kind)

    def predict(self, X: Data) -> np.ndarray:
        """Return the expected target of every row."""
        return np.exp(self._scores(X))

    def score(self, X: Data, y: Data, sample_weight: Data = None) -> float:
        """Return D^2, the fraction of deviance explained.

        Args:
            X: [N, d], the features.
            y: [N], the target.
            sample_weight: [N], the weight of each row, or the name of a column of X.
        """
        features, arguments, _ = take_named(X, {"sample_weight": sample_weight})
        power, weight = 1 if self.family == "poisson" else 2, arguments["sample_weight"]
        predicted = self.predict(features)
        return float(d2_tweedie_score(y, predicted, sample_weight=weight, power=power))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags
