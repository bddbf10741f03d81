"""A small network with learnt L2 weights (`simfbo.tasks._perceptron`)."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.utils import check_scalar
from sklearn.utils.validation import check_is_fitted

from simfbo.core.problem import Point, PyTree
from simfbo.errors import UserError
from simfbo.estimators import _export
from simfbo.estimators._base import FederatedClassifier
from simfbo.estimators._columns import without
from simfbo.estimators._docs import documented
from simfbo.estimators._regularised import Regularised
from simfbo.estimators._scaling import Scaled, Table
from simfbo.estimators._validation import Data, RandomState
from simfbo.runs.trackers.tracking import Track
from simfbo.tasks import linear
from simfbo.tasks._perceptron import Layers, form, network, scaled
from simfbo.tasks._regularisation import Form, penalties
from simfbo.tasks.models import Linear
from simfbo.tasks.task import Outputs


@documented
class FederatedMLPClassifier(FederatedClassifier, Regularised):
    """A small neural network that learns an L2 weight for every feature or layer.

    Like `FederatedLogistic`, with a network of tanh units for each fold in place of a linear model;
    predictions use the mean of the networks' probabilities. The hypergradient uses the Gauss-Newton
    matrix, which is positive semidefinite, in place of the Hessian.

    Args:
        hidden_layer_sizes: the sizes of the hidden layers; one number for a single layer.
        regularise: "features" for an L2 weight of every feature, and one of every later layer;
            "layers" for one of every layer.
        {training}
        folds: of the cross-validation; fewer if no class has as many rows.
        {penalties}
        {federation}

    Attributes:
        classes_: the classes, sorted.
        coefs_: the weights of each layer, [folds, inputs, outputs]; those of the first are in the
            units of X.
        intercepts_: the biases of each layer, [folds, outputs].
        regularisation_: [d], the L2 weights of the features, or [1] for `regularise="layers"`,
            relative to the mean cross-entropy of standardised rows.
        layer_regularisation_: the L2 weight of each layer but the first.
        {results}
    """

    coefs_: list[np.ndarray]
    intercepts_: list[np.ndarray]

    def __init__(
        self,
        *,
        hidden_layer_sizes: int | Sequence[int] = (16,),
        regularise: Literal["features", "layers"] = "features",
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
        self.hidden_layer_sizes = hidden_layer_sizes
        self.regularise = regularise

    def _form(self) -> Form:
        if self.regularise not in ("features", "layers"):
            raise UserError(f"regularise must be 'features' or 'layers', got {self.regularise!r}.")
        value = self.hidden_layer_sizes
        sizes = (value,) if isinstance(value, Integral) else value
        if isinstance(sizes, str) or not isinstance(sizes, Sequence | np.ndarray) or not len(sizes):
            raise UserError(f"hidden_layer_sizes must be such as 16 or (16, 8), got {value!r}.")
        for size in sizes:
            check_scalar(size, "hidden_layer_sizes", Integral, min_val=1)
        return form(tuple(map(int, sizes)), self.regularise == "features")

    def _keep_state(self, table: Table, rows: Scaled, state: Any) -> None:
        """Store the folds' networks in the user's units, and their L2 weights."""
        first, *later = _networks(state.x, state.y)
        weight = np.asarray(first.weight, float) / rows.units.deviation[:, None]
        bias = np.asarray(first.bias, float) - rows.units.mean @ weight
        pairs = [(np.asarray(a.weight, float), np.asarray(a.bias, float)) for a in later]
        self.coefs_, self.intercepts_ = map(list, zip((weight, bias), *pairs, strict=True))
        l2_weights = penalties(np.asarray(state.x, float), self.floor)
        self.regularisation_, self.layer_regularisation_ = np.split(l2_weights, [-len(later)])

    def predict_proba(self, X: Data) -> np.ndarray:
        """Return the probability of every class, in the order of `classes_`."""
        check_is_fitted(self, "coefs_")
        hidden = self._features(without(X, self._named))[None]
        *layers, (weight_out, bias_out) = zip(self.coefs_, self.intercepts_, strict=True)
        for weight, bias in layers:
            hidden = np.tanh(hidden @ weight + bias[:, None])
        scores = hidden @ weight_out + bias_out[:, None]
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        return (odds / odds.sum(-1, keepdims=True)).mean(0)

    def predict(self, X: Data) -> np.ndarray:
        """Return the most likely class of every row."""
        return self.classes_[self.predict_proba(X).argmax(1)]

    @property
    def _weights(self) -> np.ndarray:
        """The weights of the first layer, [folds, outputs, features]."""
        return self.coefs_[0].swapaxes(1, 2)

    def _plain(self, weights: np.ndarray) -> Any:
        coefs = [weights.swapaxes(1, 2), *self.coefs_[1:]]
        return _export.networks(coefs, self.intercepts_, self.classes_)

    def _predictor(self) -> tuple[Outputs, PyTree]:
        """Return (x, y, batch) -> the log-probabilities, and the networks."""
        pairs = zip(self.coefs_, self.intercepts_, strict=True)
        return _log_probabilities, tuple(Linear(*map(jnp.asarray, pair)) for pair in pairs)


@jax.jit
def _networks(x: jax.Array, y: Layers) -> Layers:
    """Return the folds' networks of standardised rows."""
    return jax.vmap(scaled, (None, 0))(x, y)


def _log_probabilities(x: PyTree, y: Layers, batch: linear.Batch) -> jax.Array:
    by_fold = jax.vmap(lambda layers: jax.nn.log_softmax(network(layers, batch[0])))(y)
    return jax.nn.logsumexp(by_fold, axis=0) - jnp.log(len(by_fold))
