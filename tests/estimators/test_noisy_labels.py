"""Trust that changes over time, and trusted rows that also train."""

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from simfbo import Point
from simfbo.errors import UserError
from simfbo.estimators import NoisyLabelClassifier

STEPS = Point(x=1.0, y=0.3, v=0.3)


def model(**options):
    settings = {"rounds": 60, "steps": STEPS, "trust": "clients", "folds": None, "random_state": 0}
    return NoisyLabelClassifier(**{**settings, **options})


@pytest.fixture(scope="module")
def drifted():
    """Rows of three clients in three months; the second client's labels of May are reversed."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(360, 3))
    clients, months = np.repeat(["c", "a", "b"], 120), np.tile(["may", "april", "june"], 120)
    trusted = rng.random(360) < 0.15
    truth = X[:, 0] + 0.5 * rng.normal(size=360) > 0
    bad = (clients == "a") & (months == "may") & ~trusted
    return X, truth, truth ^ bad, clients, trusted, months


def test_trust_falls_in_the_period_and_at_the_client_that_are_wrong(drifted):
    X, _, y, clients, trusted, months = drifted
    found = model().fit(X, y, clients, trusted, periods=months)
    assert found.clients_.tolist() == ["c", "a", "b"]
    assert found.periods_.tolist() == ["may", "april", "june"]
    assert found.period_trust_.shape == (3, 3)
    others = np.delete(found.period_trust_.ravel(), 3)
    assert found.period_trust_[1, 0] < others.min() - 0.3
    for i, client in enumerate(found.clients_):
        for j, month in enumerate(found.periods_):
            own = (clients == client) & (months == month) & ~trusted
            np.testing.assert_allclose(found.trust_[own], found.period_trust_[i, j])
        judged = (clients == client) & ~trusted
        assert found.client_trust_[i] == pytest.approx(found.trust_[judged].mean())
    assert (found.trust_[trusted] == 1).all()


def test_one_period_is_one_trust_per_client(drifted):
    X, _, y, clients, trusted, _ = drifted
    plain = model().fit(X, y, clients, trusted)
    one = model().fit(X, y, clients, trusted, periods=np.full(360, 2026))
    np.testing.assert_array_equal(one.trust_, plain.trust_)
    np.testing.assert_array_equal(one.coef_, plain.coef_)
    np.testing.assert_allclose(one.period_trust_[:, 0], plain.client_trust_)
    assert plain.periods_ is plain.period_trust_ is None


def test_a_period_is_a_client_of_its_own(drifted):
    """A client's trust reaches no other client, so pairs may as well be clients."""
    X, _, y, clients, trusted, months = drifted
    pairs = np.char.add(clients, months)
    apart = model().fit(X, y, pairs, trusted)
    found = model().fit(X, y, clients, trusted, periods=months)
    together = dict(zip(apart.clients_, apart.client_trust_))
    expected = [[together[client + month] for month in found.periods_] for client in found.clients_]
    np.testing.assert_allclose(found.period_trust_, expected, atol=1e-3)
    np.testing.assert_allclose(found.coef_, apart.coef_, atol=1e-3)


@pytest.mark.usefixtures("random_models")
def test_pairs_without_rows_to_judge_have_no_trust(drifted):
    X, _, y, clients, trusted, months = drifted
    kept = (clients != "b") | (months != "june")
    known = trusted | ((clients == "c") & (months == "april"))
    found = model().fit(X[kept], y[kept], clients[kept], known[kept], months[kept])
    missing = np.isnan(found.period_trust_)
    assert np.argwhere(missing).tolist() == [[0, 1], [2, 2]]
    assert (found.period_trust_[~missing] == 0.5).all()


@pytest.mark.usefixtures("random_models")
def test_periods_may_be_a_column_and_are_forgotten_by_the_next_fit(drifted):
    X, _, y, clients, trusted, months = drifted
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(month=months, site=clients)
    found = model().fit(frame, y, "site", trusted, periods="month")
    assert found.get_feature_names_out().tolist() == ["a", "b", "c"]
    assert found.predict(frame.drop(columns=["month", "site"])).shape == (360,)
    assert found.period_trust_.shape == (3, 3)
    found.fit(X, y, clients, trusted)
    assert found.periods_ is found.period_trust_ is None


@pytest.mark.usefixtures("random_models")
def test_periods_are_routed_through_a_pipeline(drifted):
    X, _, y, clients, trusted, months = drifted
    with config_context(enable_metadata_routing=True):
        last = model().set_fit_request(clients=True, trusted=True, periods=True)
        chain = make_pipeline(StandardScaler(), last)
        chain.fit(X, y, clients=clients, trusted=trusted, periods=months)
    assert chain[-1].periods_.tolist() == ["may", "april", "june"]


@pytest.mark.parametrize(
    ("options", "months", "sentence"),
    [
        ({"trust": "network"}, np.zeros(360), "periods= needs trust='clients'"),
        ({}, np.zeros(4), "periods must hold one value for each of the 360 rows, got 4"),
        ({}, np.full(360, np.nan), "periods has missing values or mixes types"),
    ],
)
def test_periods_that_cannot_be_used_are_one_sentence(drifted, options, months, sentence):
    X, _, y, clients, trusted, _ = drifted
    with pytest.raises(UserError, match=sentence):
        model(**options).fit(X, y, clients, trusted, months)


@pytest.mark.slow
def test_a_class_that_only_trusted_rows_have_is_learnt_with_folds():
    """All clients call class 2 class 0; nothing but the trusted rows shows it."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 600)
    X = 2.5 * np.array([[1, 0], [-1, 1], [-1, -1]])[truth] + rng.normal(size=(600, 2))
    train, trusted = np.arange(600) < 300, rng.random(300) < 0.1
    y = np.where((truth[train] == 2) & ~trusted, 0, truth[train])
    for trust in ("network", "clients"):
        plain, better = (
            model(trust=trust, folds=folds, steps="auto", rounds=150).fit(
                X[train], y, np.arange(300) % 4, trusted
            )
            for folds in (None, 3)
        )
        assert plain.score(X[~train], truth[~train]) < 0.75
        assert better.score(X[~train], truth[~train]) > 0.9
        assert (better.trust_[trusted] == 1).all()
        if trust == "network":
            right, found = (y == truth[train])[~trusted], better.trust_[~trusted]
            assert roc_auc_score(right, found) > 0.95 > roc_auc_score(right, plain.trust_[~trusted])


@pytest.mark.usefixtures("random_models")
def test_folds_are_at_least_two(drifted):
    X, _, y, clients, trusted, _ = drifted
    with pytest.raises(ValueError, match="folds == 1, must be >= 2"):
        model(folds=1).fit(X, y, clients, trusted)
    few = np.arange(360) == 4
    assert model(folds=5).fit(X, y, clients, few).trust_[4] == 1
