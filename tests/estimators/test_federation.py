"""Estimators and their clients: what is counted, what makes no difference, and bad input."""

import importlib
import inspect
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pandas
import pytest
from sklearn.base import clone
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import simfbo
from simfbo import Ledger, Point, UserError
from simfbo.engines.base import PROGRAMS
from simfbo.estimators import (
    FairClassifier,
    FederatedLogistic,
    FederatedRidge,
    NoisyLabelClassifier,
    _scaling,
)
from simfbo.tasks import linear

pytestmark = pytest.mark.filterwarnings("ignore:Without clients:UserWarning")
STEPS = Point(x=0.1, y=0.5, v=0.5)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4))
Y = X @ [1.0, 2.0, 0.0, 0.0] + 0.1 * RNG.normal(size=60)
CLIENTS = RNG.permutation(np.repeat(["a", "b", "c"], [10, 20, 30]))


def same(one, two):
    np.testing.assert_array_equal(one.coef_, two.coef_)
    assert one.intercept_ == two.intercept_


@pytest.fixture(scope="module")
def fitted():
    return FederatedRidge(rounds=20, floor=0.01, random_state=0).fit(X, Y, CLIENTS)


def test_every_exchange_is_counted(fitted):
    counts = {name: sent.rounds for name, sent in fitted.ledger_.by_step.items()}
    probes = counts.pop("curvature")  # mu and L three times, and how y*(x) moves with x
    assert 5 <= probes <= 3 * 5 + 5
    assert counts == {"means": 1, "centred_moments": 1, "response": 1, "simfbo_step": 20,
                      "check": 4, "client_metrics": 1}  # fmt: skip
    probes += counts["check"]
    assert fitted.ledger_.total.rounds == 23 + probes
    assert fitted.ledger_.by_step["means"].floats_up == 3 * (4 + 1)
    assert fitted.ledger_.by_step["centred_moments"].floats_up == 3 * 2 * (4 + 1)
    assert fitted.history_.records[-1]["communication_rounds"] == 23 + probes
    assert fitted.n_iter_ == 20
    losses = fitted.history_.column("upper_loss")
    assert losses[-1] < 0.1 * losses[0]


def test_the_clients_names_make_no_difference(fitted):
    other = clone(fitted).fit(X, Y, pandas.Series(CLIENTS).map({"a": 9, "b": 5, "c": 7}))
    same(fitted, other)
    assert fitted.clients_.tolist() == [{9: "a", 5: "b", 7: "c"}[k] for k in other.clients_]


def test_without_clients_there_is_one_and_a_fit_can_be_repeated(fitted):
    model = clone(fitted).set_params(steps=STEPS)
    together, alone = clone(model).fit(X, Y, CLIENTS), clone(model).fit(X, Y)
    same(alone, clone(model).fit(X, Y, np.zeros(60)))
    same(alone, alone.fit(X, Y))
    # With full batches, who holds the rows changes the order of summation only.
    np.testing.assert_allclose(alone.coef_, together.coef_, atol=1e-5)


def test_training_with_cohorts_minibatches_and_local_steps():
    drawn = FederatedRidge(
        rounds=30, steps=Point(x=0.05, y=0.1, v=0.1), cohort=2, local_steps=3, batch_size=8,
        random_state=0,
    ).fit(X, Y, CLIENTS)  # fmt: skip
    assert drawn.score(X, Y) > 0.9
    assert drawn.ledger_.by_step["simfbo_step"].floats_down == 30 * 2 * (4 + 2 * 5 * 5)


def test_moments_are_those_of_all_rows():
    columns = np.hstack([X, 1e8 + X[:, :1], np.full((60, 1), 0.1)])
    ledger = Ledger()
    parts = [np.arange(7), np.arange(7, 60)]
    units, _ = _scaling.measure(columns, parts, ledger)
    np.testing.assert_allclose(units.mean, columns.mean(0), rtol=1e-12)
    np.testing.assert_allclose(units.deviation[:5], columns.std(0)[:5], rtol=1e-7)
    assert units.deviation[5] == 1  # it is constant
    assert ledger.total.rounds == 2
    weight = np.arange(60) % 4
    units, mean = _scaling.measure(X, parts, ledger, weight.astype(float))
    repeated = np.repeat(X, weight, axis=0)
    np.testing.assert_allclose(units.mean, repeated.mean(0), rtol=1e-12)
    np.testing.assert_allclose(units.deviation, repeated.std(0), rtol=1e-12)
    assert (mean, ledger.total.rounds) == (pytest.approx(1.5), 4)


def test_a_column_far_from_zero_is_as_good_as_any_other():
    """A column of 1e8 + N(0, 1): R2 as of scikit-learn."""
    rng = np.random.default_rng(5)
    far = np.column_stack([1e8 + rng.normal(size=60), rng.normal(size=60)])
    y = 3 * (far[:, 0] - 1e8) + far[:, 1] + rng.normal(size=60)
    ours = FederatedRidge(rounds=200, random_state=0).fit(far, y, CLIENTS)
    theirs = make_pipeline(StandardScaler(), RidgeCV()).fit(far, y)
    assert ours.score(far, y) == pytest.approx(theirs.score(far, y), abs=0.01)


def test_fits_of_one_shape_compile_once(fitted):
    assert {"means", "centred_moments", "curvature", "AutoSteps"} <= set(PROGRAMS.compiled)
    before = len(PROGRAMS.compiled), linear._pooled_upper.cache_info().misses
    again = clone(fitted).set_params(random_state=1).fit(X, Y, CLIENTS)
    assert (len(PROGRAMS.compiled), linear._pooled_upper.cache_info().misses) == before
    assert (again.coef_ != fitted.coef_).all()
    clone(fitted).fit(X[:59], Y[:59], CLIENTS[:59])  # nearly as many rows
    assert (len(PROGRAMS.compiled), linear._pooled_upper.cache_info().misses) == before


def test_fits_in_threads_give_the_same_results(fitted):
    def fit(seed):
        return clone(fitted).set_params(random_state=seed).fit(X, Y, CLIENTS)

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(fit, [0, 1]))
    same(together[0], fitted)
    same(together[1], fit(1))


@pytest.mark.usefixtures("random_models")
def test_frames_and_strings():
    frame = pandas.DataFrame(X, columns=list("pqrs"))
    labels = np.where(Y > 0, "up", "down")
    model = FederatedLogistic(random_state=0)
    assert model.fit(frame, labels, CLIENTS).feature_names_in_.tolist() == list("pqrs")
    assert model.classes_.tolist() == ["down", "up"]
    assert model.coef_.shape == (1, 4)
    probabilities = model.predict_proba(frame)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (model.predict(frame) == model.classes_[probabilities.argmax(1)]).all()


def test_grid_search_in_threads():
    model = FederatedRidge(steps=STEPS, floor=0.01, random_state=0)
    search = GridSearchCV(model, {"rounds": [1, 20]}, cv=2, refit=False, n_jobs=2)
    with joblib.parallel_config("threading"):
        search.fit(X, Y)
    assert search.best_params_ == {"rounds": 20}
    assert search.best_score_ > 0.9


def test_progress_is_printed_on_demand_only(capsys):
    model = FederatedRidge(rounds=4, steps=STEPS, random_state=0).fit(X, Y)
    assert capsys.readouterr().out == ""
    model.set_params(verbose=1).fit(X, Y)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("iteration 4 of 4: upper loss 0.")


@pytest.mark.parametrize(
    ("model", "given", "sentence"),
    [
        (FederatedRidge(), {"clients": [1, 2]}, "clients must hold one value for each of the 60"),
        (FairClassifier(), {"groups": X}, r"groups .* got an array of shape \(60, 4\)"),
        (NoisyLabelClassifier(), {"trusted": [True]}, "trusted must hold one value for each of"),
        (NoisyLabelClassifier(), {"trusted": np.ones(60)}, "trusted must hold True or False"),
        (NoisyLabelClassifier(), {"trusted": np.ones(60, bool)}, "True for some rows and False"),
        (FederatedRidge(), {"clients": [np.nan] * 60}, "clients has missing values or mixes types"),
        (FederatedRidge(), {"clients": [None, *"ab" * 29, 1]}, "clients has missing values"),
        (FederatedRidge(cohort=2), {}, "A cohort of 2 cannot be sampled from 1"),
        (FederatedRidge(steps=0.1), {}, "steps must be 'auto' or simfbo.Point"),
        (NoisyLabelClassifier(trust="all"), {}, "trust must be 'network' or 'clients'"),
    ],
)
def test_bad_input_ends_in_a_sentence(model, given, sentence):
    target = Y if isinstance(model, FederatedRidge) else Y > 0
    with pytest.raises(UserError, match=sentence):
        model.fit(X, target, **given)


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"folds": 1}, {"floor": 0.0}, {"batch_size": 0}, {"sparsity": -1.0}]
)
def test_bad_parameters_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FederatedRidge(**wrong).fit(X, Y)


def test_divergence_says_what_to_do():
    diverging = FederatedRidge(rounds=60, steps=Point(x=50.0, y=50.0, v=50.0), random_state=0)
    with pytest.raises(UserError, match=r"diverged in iteration \d+: .*use steps='auto'\.$"):
        diverging.fit(X, Y)
    assert not hasattr(diverging, "coef_")


def test_two_rows_are_enough():
    model = FederatedLogistic(rounds=5, steps=STEPS, random_state=0)
    assert model.fit([[0.0], [1.0]], ["b", "a"]).predict([[0.0], [1.0]]).shape == (2,)


def test_a_missing_scikit_learn_is_one_sentence(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("simfbo.estimators")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    sentence = "scikit-learn, which is not installed: pip install 'simfbo[estimators]'."
    with pytest.raises(UserError, match=re.escape(sentence)):
        importlib.import_module("simfbo.estimators")


def test_shared_parameters_are_documented_for_every_estimator():
    for name in simfbo.estimators.__all__:
        kind = getattr(simfbo.estimators, name)
        text = inspect.getdoc(kind)
        for parameter in kind().get_params():
            assert f"\n    {parameter}: " in text
        assert "\n    ledger_: " in text
        assert "{" not in text
