"""Scikit-learn's own checks: all of them, once per base class; slow tests train every estimator.

Nearly all the time of a fit on a new shape is compilation, and the checks use dozens of shapes: by
default models are random, except in the checks that judge the training.
"""

import pytest
from sklearn import config_context
from sklearn.utils.estimator_checks import parametrize_with_checks

from simfbo import Point
from simfbo.estimators import (
    FairClassifier,
    FairRegressor,
    FederatedGLM,
    FederatedLogistic,
    FederatedMLPClassifier,
    FederatedRidge,
    FederatedTabular,
    LongTailClassifier,
    NoisyLabelClassifier,
)

STEPS = Point(x=0.01, y=0.3, v=0.3)
MODELS = [
    *(
        kind(rounds=10, steps=STEPS, floor=0.01)
        for kind in (FederatedRidge, FederatedLogistic, FederatedGLM, FederatedMLPClassifier)
    ),
    *(
        kind(rounds=10, steps=STEPS)
        for kind in (FairClassifier, FairRegressor, LongTailClassifier, NoisyLabelClassifier)
    ),
]
# As in scikit-learn's own estimators that cross-validate: repeated rows are in several folds.
FOLDS = {
    "check_sample_weight_equivalence_on_dense_data": "the folds of repeated rows differ",
    "check_sample_weight_equivalence_on_sparse_data": "the folds of repeated rows differ",
}
TRAINED = ("check_regressors_train", "check_classifiers_train")

pytestmark = [
    pytest.mark.filterwarnings("ignore:No rows are known to be correct:UserWarning"),
    pytest.mark.filterwarnings("ignore:Without clients:UserWarning"),
    pytest.mark.filterwarnings("ignore:Skipping check check_array_api_input"),
]


@pytest.mark.parametrize("routing", [False, pytest.param(True, marks=pytest.mark.slow)])
@parametrize_with_checks([*MODELS[:2], FederatedTabular()], expected_failed_checks=lambda _: FOLDS)
def test_all_checks(estimator, check, routing, request):
    """Of a linear regressor, a linear classifier, and the transformer of tables."""
    if check.func.__name__ not in TRAINED:
        request.getfixturevalue("random_models")
    with config_context(enable_metadata_routing=routing):
        check(estimator)


@pytest.mark.slow
@parametrize_with_checks(MODELS, expected_failed_checks=lambda _: FOLDS)
def test_all_checks_with_training(estimator, check):
    check(estimator)
