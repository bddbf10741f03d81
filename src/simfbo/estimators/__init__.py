"""Estimators in scikit-learn's conventions: `fit(X, y, clients)`, and the rest as ever."""

from simfbo.estimators._fair import FairClassifier, FairRegressor
from simfbo.estimators._long_tail import LongTailClassifier
from simfbo.estimators._noisy_labels import NoisyLabelClassifier
from simfbo.estimators._regularised import FederatedLogistic, FederatedRidge

__all__ = [
    "FairClassifier",
    "FairRegressor",
    "FederatedLogistic",
    "FederatedRidge",
    "LongTailClassifier",
    "NoisyLabelClassifier",
]
