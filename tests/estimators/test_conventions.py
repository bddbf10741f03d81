"""Scikit-learn's own checks: all of them for a regressor and a classifier, some for the others.

Nearly all the time of a fit on a new shape is compilation, and the checks use dozens of shapes. So
by default only the checks that judge the training run it; the others get random models.
"""

import pytest
from sklearn.base import clone
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

from simfbo import Point
from simfbo.estimators import (
    FairClassifier,
    FairRegressor,
    FederatedLogistic,
    FederatedRidge,
    LongTailClassifier,
    NoisyLabelClassifier,
)

STEPS = Point(x=0.01, y=0.3, v=0.3)
BOTH = [FederatedRidge(rounds=10, steps=STEPS), FederatedLogistic(rounds=10, steps=STEPS)]
TRAINED = ("check_regressors_train", "check_classifiers_train")
SOME = (
    "check_no_attributes_set_in_init",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimators_unfitted",
    "check_estimators_empty_data_messages",
    "check_estimator_sparse_array",
    "check_complex_data",
    "check_fit2d_1sample",
    "check_get_params_invariance",
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:No rows are known to be correct:UserWarning"),
    pytest.mark.filterwarnings("ignore:Skipping check check_array_api_input"),
]


@parametrize_with_checks(BOTH)
def test_all_checks(estimator, check, request):
    if check.func.__name__ not in TRAINED:
        request.getfixturevalue("random_models")
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(BOTH)
def test_all_checks_with_training(estimator, check):
    check(estimator)


@pytest.mark.parametrize("check", SOME)
@pytest.mark.parametrize(
    "kind", [FairClassifier, FairRegressor, LongTailClassifier, NoisyLabelClassifier]
)
def test_some_checks(kind, check):
    getattr(estimator_checks, check)(kind.__name__, clone(kind(rounds=10, steps=STEPS)))
