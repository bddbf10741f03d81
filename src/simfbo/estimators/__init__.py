"""Estimators that follow scikit-learn's conventions, with the clients as an argument of `fit`."""

from simfbo.errors import require

require("sklearn", "estimators")  # raises a UserError before the ImportError of a module below

from simfbo.estimators._fair import FairClassifier, FairRegressor  # noqa: E402
from simfbo.estimators._long_tail import LongTailClassifier  # noqa: E402
from simfbo.estimators._mlp import FederatedMLPClassifier  # noqa: E402
from simfbo.estimators._noisy_labels import NoisyLabelClassifier  # noqa: E402
from simfbo.estimators._regularised import (  # noqa: E402
    FederatedGLM,
    FederatedLogistic,
    FederatedRidge,
)
from simfbo.estimators._tabular import FederatedTabular  # noqa: E402

__all__ = [
    "FairClassifier",
    "FairRegressor",
    "FederatedGLM",
    "FederatedLogistic",
    "FederatedMLPClassifier",
    "FederatedRidge",
    "FederatedTabular",
    "LongTailClassifier",
    "NoisyLabelClassifier",
]
