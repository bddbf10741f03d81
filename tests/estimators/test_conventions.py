"""Scikit-learn's own checks: all of them for a regressor and a classifier, some for the others."""

import pytest
from sklearn.base import clone
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

from simfbo import (
    FairClassifier,
    FairRegressor,
    FederatedLogistic,
    FederatedRidge,
    LongTailClassifier,
    NoisyLabelClassifier,
    Steps,
)

# What a run adds is tested elsewhere: most of the time here is compilation, for dozens of shapes.
QUICK = {"rounds": 20, "steps": Steps(y=0.3, v=0.3, x=0.01)}
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
    pytest.mark.filterwarnings("ignore:No row is known to be right:UserWarning"),
    pytest.mark.filterwarnings("ignore:Skipping check check_array_api_input"),
]


@parametrize_with_checks([FederatedRidge(**QUICK), FederatedLogistic(**QUICK)])
def test_all_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("check", SOME)
@pytest.mark.parametrize(
    "kind", [FairClassifier, FairRegressor, LongTailClassifier, NoisyLabelClassifier]
)
def test_some_checks(kind, check):
    getattr(estimator_checks, check)(kind.__name__, clone(kind(**QUICK)))
