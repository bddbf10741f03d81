"""Estimators where the data is: the model of `fit`, in simulation and on Flower messages."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from simfbo import History, Point, UserError, codecs
from simfbo.core.gate import Gate
from simfbo.estimators import FederatedLogistic, FederatedRidge
from simfbo.flower import simulate
from simfbo.flower.app import FlowerFederation, serve
from simfbo.tasks import linear

SIZES = (9, 14, 14, 9)  # the same shapes on either of two nodes
owner = np.repeat(np.arange(4), SIZES)
LABELS = ["no", "yes"]
STEPS = Point(x=0.5, y=0.5, v=0.5)


def table(numbers=False):
    """Return rows in odd units; y depends on the first feature."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(sum(SIZES), 3)) * [5.0, 0.1, 1.0] + [300.0, 0.0, -1.0]
    y = (X[:, 0] - 300) / 5 + 0.5 * rng.normal(size=len(X))
    return X, 10 + 3 * y if numbers else np.where(y > 0, "yes", "no")


def loader(X, y):
    return lambda client, settings: (X[owner == client], y[owner == client])


def deployed(estimator, X, y, **options):
    if isinstance(estimator, FederatedLogistic):
        options = {"classes": LABELS, **options}
    return estimator.deployment(loader(X, y), clients=4, features=3, **options)


@pytest.mark.parametrize(
    ("estimator", "labels"),
    [
        pytest.param(
            FederatedLogistic(rounds=40, tol=0, folds=3, random_state=3),
            {"classes": LABELS},
            marks=pytest.mark.slow,
        ),
        (FederatedRidge(rounds=20, tol=0, folds=3, steps=STEPS, random_state=3), {}),
    ],
)
def test_a_simulated_deployment_is_fit_with_the_clients_own_folds(
    monkeypatch, single_precision, estimator, labels
):
    X, y = table(numbers=not labels)
    history = simulate(deployed(estimator, X, y, client_metrics=True))
    found = estimator.load(history, **labels)
    coef, intercept, penalties = found.coef_, found.intercept_, found.regularisation_
    scores = found.score_clients_
    rounds = history.records[-1]["communication_rounds"]

    def own(strata, folds, seed):
        parts = (linear.own_folds(strata[owner == i], folds, seed, i) for i in range(4))
        return np.concatenate([*parts])

    monkeypatch.setattr(linear, "assign_folds", own)
    fitted = estimator.fit(X, y, owner)
    np.testing.assert_allclose(coef, fitted.coef_, rtol=1e-4, atol=1e-5)
    assert list(scores.values) == list(fitted.score_clients_.values)
    for name, values in fitted.score_clients_.values.items():
        np.testing.assert_allclose(scores.values[name], values, rtol=1e-3)
    np.testing.assert_allclose(intercept, fitted.intercept_, rtol=1e-4)
    np.testing.assert_allclose(penalties, fitted.regularisation_, rtol=1e-3)
    assert rounds == fitted.ledger_.total.rounds


def test_on_flower_it_is_the_simulation_and_its_folder_holds_the_model(
    flower, tmp_path, single_precision
):
    X, y = table()
    X[:, 1] += 1e6  # which single precision alone would not hold
    model = FederatedLogistic(rounds=3, folds=2, steps=STEPS, random_state=1)
    short = Point(*[codecs.bfloat16()] * 3)
    plan = deployed(model, X, y, codecs=codecs.Codecs(short, short))
    grid = flower.Grid(plan, flower.parts(2))
    history = serve(grid, plan, tmp_path, {})
    assert history.refusals == []
    assert [m.metadata.message_type for m in grid.sent].count("train.centred_totals") == 2
    # The units are NumPy's, whatever codes the channels.
    units = history.method_state.units
    mean = np.asarray(units.mean, float).sum(0)
    np.testing.assert_allclose(mean, X.mean(0), rtol=1e-13, atol=1e-6)
    np.testing.assert_allclose(units.deviation, X.std(0), rtol=1e-5)
    assert units.rows == sum(SIZES)
    wanted = model.load(simulate(plan), classes=LABELS).decision_function(X)
    assert np.ptp(wanted) > 0.2
    model = FederatedLogistic().load(tmp_path, classes=LABELS, features=["a", "b", "c"])
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    assert model.n_iter_ == 3
    frame = pytest.importorskip("pandas").DataFrame(X, columns=["a", "b", "c"])
    assert {*model.predict(frame)} == {*LABELS}
    np.testing.assert_allclose(model.decision_function(frame), wanted, atol=1e-5)
    exported = model.export()
    np.testing.assert_array_equal(exported.predict(frame), model.predict(frame))
    # The card is of that run: neither of an earlier fit nor of the estimator's own settings.
    model.score_clients_ = model.clients_ = model.ledger_ = None
    text = model.card()
    assert f"{sum(SIZES)} rows of both levels together." in text
    assert "## Scores of the clients\n\nNot measured." in text
    assert "| `rounds` | 1000 |" not in text
    assert "3 of at most 3 iterations: finished." in text


def test_a_label_that_is_no_class_is_named_with_its_client(flower):
    X, y = table()
    y = np.where(np.arange(len(y)) == 30, "maybe", y)
    plan = deployed(FederatedLogistic(rounds=2), X, y, wait=0.2)
    federation = FlowerFederation(flower.Grid(plan, flower.parts(2)), plan, poll=0.01)
    sentence = r"Client 2 has the label .*maybe.* not among the classes \['no', 'yes'\]"
    with pytest.raises(UserError, match=sentence):
        federation.connect()


def test_wrong_input_ends_in_a_sentence():
    X, y = table()
    logistic, ridge = FederatedLogistic(rounds=2), FederatedRidge(rounds=2)
    for call, sentence in (
        (lambda: logistic.deployment(loader(X, y), clients=4, features=3), "Give all labels as"),
        (lambda: deployed(ridge, X, y, classes=2), "FederatedRidge has no classes: omit"),
        (lambda: simulate(deployed(ridge, X[:, :2], X[:, 2])), "has 2 features instead of 3"),
        (lambda: simulate(deployed(ridge, X / 0.0, y)), "Client 0's rows cannot be used: .*inf"),
        (lambda: deployed(FederatedRidge(cohort=5), X, y), "A cohort of 5 cannot be sampled"),
        (lambda: deployed(FederatedRidge(steps=0.1), X, y), "steps must be 'auto' or"),
        (lambda: deployed(FederatedRidge(random_state=np.random.RandomState(0)), X, y),
         "must be a whole number in a deployment"),
    ):  # fmt: skip
        with np.errstate(all="ignore"), pytest.raises(UserError, match=sentence):
            call()


def test_only_a_finished_run_of_the_same_kind_is_loaded(tmp_path):
    y = SimpleNamespace(weight=np.zeros((2, 3, 1)))
    other = {"state": Point(np.zeros(3), y),
             "method_state": SimpleNamespace(units=SimpleNamespace(mean=np.zeros(4)))}  # fmt: skip
    finished = {"status": "finished"}
    for run, options, sentence in (
        (History({}, end=finished, **other), {"features": ["a"]}, "has 3 features, got 1"),
        (History({}), {}, "The run is unfinished: resume it"),
        (History({}, end=finished), {}, "holds no model"),
    ):
        with pytest.raises(UserError, match=sentence):
            FederatedRidge().load(run, **options)
    with pytest.raises(UserError, match="The run is not of a FederatedLogistic"):
        FederatedLogistic().load(History({}, end=finished, **other))


def test_own_folds_are_balanced_and_each_clients_own():
    strata = np.random.default_rng(0).integers(0, 3, 50)
    found = linear.own_folds(strata, 4, seed=7, client=2)
    for chosen in (strata >= 0, *(strata == k for k in range(3))):
        assert np.ptp(np.bincount(found[chosen], minlength=4)) <= 1
    assert found.tolist() == linear.own_folds(strata, 4, seed=7, client=2).tolist()
    assert found.tolist() != linear.own_folds(strata, 4, seed=7, client=3).tolist()
    firsts = [linear.own_folds(np.zeros(1, int), 4, seed=0, client=i)[0] for i in range(200)]
    assert np.bincount(firsts).min() > 30  # clients of one row fill all folds


def test_columns_are_taken_by_name():
    X, y = table(numbers=True)
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(other=0.0)
    model = FederatedRidge(random_state=0)
    plan = model.deployment(
        lambda client, _: (frame[["other", "c", "b", "a"]], y), clients=1, features=["a", "b", "c"]
    )
    in_two_floats = plan.load_client(0, {})[0][0][..., :3]
    np.testing.assert_allclose(in_two_floats.sum(1, dtype=float), X, rtol=1e-12)
    plan = model.deployment(
        lambda client, _: (frame[["a", "b", "other"]], y), clients=1, features=["a", "b", "c"]
    )
    with pytest.raises(UserError, match="Client 0 has no column 'c'"):
        plan.load_client(0, {})


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"features": "age"}, "features must be a number or a list of names, got 'age'"),
        ({"client_metrics": {"loss": max}}, "must be True or False: it has metrics of its own"),
        ({"gate": Gate(max_norm=100.0)}, "would reject the sums that scale the rows"),
    ],
)
def test_options_that_do_not_fit(wrong, sentence):
    with pytest.raises(UserError, match=sentence):
        FederatedRidge().deployment(loader(*table()), **{"clients": 4, "features": 3, **wrong})


def test_a_loaded_model_has_nothing_of_an_earlier_fit(single_precision):
    X, y = table(numbers=True)
    model = FederatedRidge(rounds=3, folds=2, steps=STEPS, random_state=1)
    history = simulate(deployed(model, X, y))
    model.feature_names_in_, model.score_clients_ = np.array(["a", "b"], object), None
    model.load(history)
    assert model.get_feature_names_out().tolist() == ["x0", "x1", "x2"]
    assert not hasattr(model, "score_clients_")
    assert model.predict(X).shape == y.shape
