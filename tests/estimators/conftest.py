"""Fast fits: nearly all their time is compilation, of small programs that need no optimisation."""

import jax
import numpy as np
import pytest

from simfbo import History, Ledger, Point
from simfbo.estimators import _scaling
from simfbo.estimators._base import FederatedLinear


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def random_models(monkeypatch):
    """Replace training by a random draw of the model, and the exchange of moments by NumPy."""

    def train(self, setting, ledger, seed):
        rng = np.random.default_rng(seed)
        self.history_, self.ledger_, self.n_iter_ = History({}), ledger, self.rounds
        y = jax.tree.map(lambda a: rng.normal(size=a.shape).astype("f4"), setting.y0)
        return Point(x=setting.x0, y=y)

    def measure(columns, parts):
        return _scaling.Units(columns.mean(0), columns.std(0) + 1e-9), Ledger()

    monkeypatch.setattr(FederatedLinear, "_train", train)
    monkeypatch.setattr(_scaling, "measure", measure)
