"""Linear models: conversion to the user's units, and prediction."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from simfbo.core.problem import PyTree
from simfbo.estimators import _clients, _export
from simfbo.estimators._base import FederatedClassifier, FederatedEstimator
from simfbo.estimators._columns import take_named, without
from simfbo.estimators._scaling import Scaled, Table, Units
from simfbo.estimators._validation import Data, numbers
from simfbo.tasks.models import Linear
from simfbo.tasks.task import Outputs


class FederatedLinear(FederatedEstimator):
    """A linear model; see its subclasses."""

    coef_: Any
    intercept_: Any

    def _keep(self, table: Table, rows: Scaled, model: Linear) -> None:
        """Store a model of standardised rows in the user's units."""
        self._keep_clients(table, rows)
        self._keep_model(model, rows.units, rows.target_units, table.classes)

    def _keep_model(
        self, model: Linear, units: Units, target_units: tuple[float, float], classes: int
    ) -> None:
        """Convert a model of rows in these units to the user's units and store it."""
        mean, deviation = target_units
        weight = np.asarray(model.weight, float) / units.deviation[:, None] * deviation
        bias = np.asarray(model.bias, float) * deviation + mean - units.mean @ weight
        if classes == 2:
            weight, bias = weight[:, 1:] - weight[:, :1], bias[1:] - bias[:1]
        self.coef_, self.intercept_ = weight.T, bias
        if classes <= 0:
            self.coef_, self.intercept_ = weight[:, 0], float(bias[0])

    @property
    def _weights(self) -> np.ndarray:
        return self.coef_

    def _predictor(self) -> tuple[Outputs, PyTree]:
        weight, bias = np.atleast_2d(self.coef_).T, np.atleast_1d(self.intercept_)
        if len(getattr(self, "classes_", ())) == 2:  # coef_ has the second class only
            weight, bias = (np.concatenate([np.zeros_like(a), a], axis=-1) for a in (weight, bias))
        return _clients.outputs, Linear(jnp.asarray(weight), jnp.asarray(bias))

    def _scores(self, X: Data) -> np.ndarray:
        """Evaluate the linear function on new rows."""
        check_is_fitted(self, "coef_")
        return self._features(without(X, self._named)) @ self.coef_.T + self.intercept_


class LinearClassifier(FederatedClassifier, FederatedLinear):
    """A linear classifier; see its subclasses."""

    def _plain(self, weights: np.ndarray) -> Any:
        return _export.classifier(weights, self.intercept_, self.classes_, self.n_iter_)

    def decision_function(self, X: Data) -> np.ndarray:
        """Return the scores of every class; for two classes, only those of the second."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Data) -> np.ndarray:
        """Return the probability of every class, in the order of `classes_`."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        odds = np.exp(scores - scores.max(1, keepdims=True))
        return odds / odds.sum(1, keepdims=True)

    def predict(self, X: Data) -> np.ndarray:
        """Return the most likely class of every row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]


class LinearRegressor(RegressorMixin, FederatedLinear):
    """A linear regressor; see its subclasses."""

    def score(self, X: Data, y: Data, sample_weight: Data = None) -> float:
        """Return R^2.

        Args:
            X: [N, d], the features.
            y: [N], the target.
            sample_weight: [N], the weight of each row, or the name of a column of X.
        """
        features, arguments, _ = take_named(X, {"sample_weight": sample_weight})
        return super().score(features, y, arguments["sample_weight"])

    def _plain(self, weights: np.ndarray) -> Any:
        return _export.regressor(weights, self.intercept_)

    def _encoded(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Convert the target to floats; the number of classes is 0."""
        return numbers("y", y), 0

    def predict(self, X: Data) -> np.ndarray:
        """Return the predicted target of every row."""
        return self._scores(X)
