"""The purpose of the other estimators, with numbers against plain models."""

import pickle

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import balanced_accuracy_score, log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from simfbo import Point
from simfbo.estimators import (
    FairClassifier,
    FairRegressor,
    LongTailClassifier,
    NoisyLabelClassifier,
)
from simfbo.tasks.samples import long_tailed


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return X[order], y[order]


def plain(X, y):
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(X, y)


def groups_of(count, seed):
    """Rows of two groups, of which the second is rare and follows another law."""
    rng = np.random.default_rng(seed)
    group, X = (rng.random(count) < 0.15).astype(int), rng.normal(size=(count, 4))
    law = np.array([[2.0, 0, 0, 0], [-0.5, 2, 0, 0]])
    return X, (X * law[group]).sum(1), group, rng


def test_wrong_labels_are_found_and_do_less_harm(digits):
    X, y = digits
    rng, clients = np.random.default_rng(1), np.arange(600) % 5
    trusted, noisy = rng.random(600) < 0.1, y[:600].copy()
    wrong = (rng.random(600) < np.linspace(0, 0.9, 5)[clients]) & ~trusted
    noisy[wrong] = (noisy[wrong] + rng.integers(1, 10, wrong.sum())) % 10
    found = NoisyLabelClassifier(rounds=80, steps=Point(x=1.0, y=0.3, v=0.3), random_state=0)
    found.fit(X[:600], noisy, clients, trusted)
    assert found.score(X[600:], y[600:]) > plain(X[:600], noisy).score(X[600:], y[600:]) + 0.1
    assert (found.trust_[trusted] == 1).all()
    assert found.trust_[~wrong & ~trusted].mean() > found.trust_[wrong].mean() + 0.3
    assert (np.diff(found.client_trust_) < 0).all()
    kept = clients[~trusted]
    means = [found.trust_[~trusted][kept == client].mean() for client in range(5)]
    np.testing.assert_allclose(found.client_trust_, means)


def test_clients_may_have_no_trusted_rows_or_only_trusted_ones():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3))
    y, clients = np.where(X[:, 0] > 0, "yes", "no"), np.repeat(["c", "a", "b"], 30)
    y[:30] = np.where(y[:30] == "yes", "no", "yes")  # all labels of client c are wrong
    steps = Point(x=1.0, y=0.3, v=0.3)
    found = NoisyLabelClassifier(rounds=60, steps=steps, trust="clients", random_state=0)
    found.fit(X, y, clients, trusted=clients == "b")
    assert found.clients_.tolist() == ["c", "a", "b"]
    assert found.client_trust_[2] == 1
    assert found.client_trust_[1] > found.client_trust_[0] + 0.2
    assert found.score(X[30:], y[30:]) > 0.9


@pytest.mark.usefixtures("random_models")
def test_rows_are_trusted_at_random_with_a_warning():
    X = np.random.default_rng(0).normal(size=(45, 2))
    clients = np.repeat([0, 1], [22, 23])
    found = NoisyLabelClassifier(random_state=0)
    with pytest.warns(UserWarning, match="a random tenth"):
        found.fit(X, X[:, 0] > 0, clients)
    assert np.bincount(clients[found.trust_ == 1]).tolist() == [3, 3]


def test_rare_classes_are_found(digits):
    X, y = digits
    rows = long_tailed(y[:1000], 30, seed=0)
    found = LongTailClassifier(rounds=80, steps=Point(x=0.5, y=0.4, v=0.4), random_state=0)
    found.fit(X[rows], y[rows], np.arange(267) % 4)
    better = balanced_accuracy_score(y[1000:], found.predict(X[1000:]))
    assert (
        better > balanced_accuracy_score(y[1000:], plain(X[rows], y[rows]).predict(X[1000:])) + 0.05
    )
    assert found.adjustment_.scale.shape == found.adjustment_.shift.shape == (10,)
    assert (found.adjustment_.scale > 0).all()
    counts = np.bincount(y[rows])
    assert np.corrcoef(found.adjustment_.shift, np.log(counts))[0, 1] > 0.95


def test_the_worst_group_has_a_smaller_loss_than_in_a_plain_classifier():
    def draw(count, seed):
        X, score, group, rng = groups_of(count, seed)
        return X, score + 0.5 * rng.logistic(size=count) > 0, group

    (X, y, group), (inputs, wanted, seen) = draw(600, 0), draw(4000, 1)

    def worst(model):
        p = model.predict_proba(inputs)
        return max(log_loss(wanted[seen == g], p[seen == g]) for g in (0, 1))

    found = FairClassifier(rounds=150, steps=Point(x=0.1, y=0.5, v=0.5), random_state=0)
    found.fit(X, y, np.zeros(600), groups=np.where(group, "rare", "usual"))
    assert worst(found) < 0.6 * worst(LogisticRegression().fit(X, y))
    shares = np.array([np.mean((group == 1) == (name == "rare")) for name in found.groups_])
    assert found.group_weights_ @ shares == pytest.approx(1, abs=1e-5)
    assert np.ptp(found.group_loss_) < 0.1


def test_the_worst_group_has_the_error_of_the_best_weights_in_a_regression():
    def draw(count, seed):
        X, score, group, rng = groups_of(count, seed)
        return X, 10 * (score + 0.3 * rng.normal(size=count)) + 4, group

    X, y, group = draw(600, 0)

    def worst(model):
        squares = (model.predict(X) - y) ** 2
        return max(squares[group == g].mean() for g in (0, 1))

    weighted = [Ridge().fit(X, y, np.where(group, w, 1.0)) for w in np.linspace(1, 15, 57)]
    found = FairRegressor(rounds=150, steps=Point(x=0.1, y=0.3, v=0.3), random_state=0)
    found.fit(X, y, np.zeros(600), groups=group)
    assert worst(found) < 1.1 * min(map(worst, weighted))
    assert worst(found) < 0.5 * worst(weighted[0])
    assert found.group_loss_.max() == pytest.approx(worst(found), rel=0.15)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(found)).predict(X), found.predict(X))
