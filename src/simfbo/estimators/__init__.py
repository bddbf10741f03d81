"""Estimators in scikit-learn's conventions: `fit(X, y, clients)`, and the rest as ever."""

from simfbo.estimators.fair import FairClassifier, FairRegressor
from simfbo.estimators.long_tail import LongTailClassifier
from simfbo.estimators.noisy import NoisyLabelClassifier
from simfbo.estimators.regularised import FederatedLogistic, FederatedRidge

__all__ = [
    "FairClassifier",
    "FairRegressor",
    "FederatedLogistic",
    "FederatedRidge",
    "LongTailClassifier",
    "NoisyLabelClassifier",
]
