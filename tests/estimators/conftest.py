"""Fits without training."""

import jax
import numpy as np
import pytest

from simfbo import ClientScores, History, Point
from simfbo.estimators import _fair, _noisy_labels, _scaling
from simfbo.estimators._base import FederatedEstimator


@pytest.fixture
def random_models(monkeypatch):
    """Replace training by a random draw of the model, and what measures losses and moments."""

    def train(self, setting, rows, seed):
        rng = np.random.default_rng(seed)
        self.history_, self.ledger_, self.n_iter_ = History({}), rows.ledger, self.rounds
        weights = setting.data.p
        self.score_clients_ = ClientScores.of(weights, {"loss": weights}, {"loss": "min"})
        y = jax.tree.map(lambda a: rng.normal(size=a.shape).astype("f4"), setting.y0)
        return Point(x=setting.x0, y=y)

    def measure(columns, parts, ledger, weight=None):
        total = 1.0 if weight is None else weight.mean()
        return _scaling.Units(columns.mean(0), columns.std(0) + 1e-9), total

    monkeypatch.setattr(FederatedEstimator, "_train", train)
    monkeypatch.setattr(_scaling, "measure", measure)
    monkeypatch.setattr(_fair, "_group_losses", lambda models, rows, classes: np.ones(1))
    monkeypatch.setattr(_noisy_labels, "trust_in", lambda x, y, rows, classes: 0.5)
