"""The scores of clients: by models that did not see the rows, in the user's units."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error

from simfbo import Ledger, Point, UserError
from simfbo.estimators import (
    FairRegressor,
    FederatedLogistic,
    FederatedRidge,
    LongTailClassifier,
    NoisyLabelClassifier,
)
from simfbo.estimators._scaling import measure
from simfbo.tasks import linear

STEPS = Point(x=0.1, y=0.5, v=0.5)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)) * [1.0, 10.0, 1.0, 1.0]
Y = 100 * (X @ [1.0, 0.2, 0.0, 0.0] + RNG.normal(size=60))
LABELS = np.where(Y > 30, "yes", "no")
CLIENTS = RNG.permutation(np.repeat(["a", "b", "c"], [10, 20, 30]))
QUICK = {"rounds": 10, "steps": STEPS, "random_state": 0, "tol": 0.0}

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def logistic():
    return FederatedLogistic(**QUICK).fit(X, LABELS, CLIENTS)


@pytest.fixture(scope="module")
def ridge():
    return FederatedRidge(**QUICK).fit(X, Y, CLIENTS)


def each(scores, name):
    return dict(zip(scores.ids.tolist(), scores.values[name].tolist(), strict=True))


def test_rows_are_judged_by_models_that_did_not_see_them(ridge):
    """Clients as groups: the loss of a group is computed on the server, from the same models."""
    fair = FairRegressor(**QUICK).fit(X, Y, CLIENTS)
    np.testing.assert_array_equal(fair.score_clients_.ids, fair.groups_)
    np.testing.assert_allclose(fair.score_clients_.values["mse"], fair.group_loss_, rtol=1e-5)
    # The mean over clients is the upper loss without its price, in the units of y.
    units, _ = measure(Y[:, None], [np.arange(60)], Ledger())
    x = ridge.history_.state.x
    apart = np.log1p(np.exp(np.asarray(x, float)))
    price = 0.5 * ((apart - apart.mean()) ** 2).sum() / (0.5**2 * 64)
    upper = ridge.history_.column("upper_loss")[-1] - price
    mean = ridge.score_clients_.mean("mse")
    assert mean == pytest.approx(2 * units.deviation[0] ** 2 * upper, rel=1e-4)


def test_folds_by_hand(logistic):
    """The same from the folds' models, row by row in NumPy."""
    state = logistic.history_.state
    target = (LABELS == "yes").astype(int)
    fold = linear.assign_folds(target, 5, logistic._seed())
    units, _ = measure(X, [np.arange(60)], Ledger())
    scale = np.sqrt(1 / (1 + np.exp(np.asarray(state.x, float))))
    weight, bias = (np.asarray(part, float) for part in state.y)
    scores = np.stack([
        (row * scale) @ weight[k] + bias[k] for row, k in zip(units(X), fold, strict=True)
    ])  # fmt: skip
    odds = np.exp(scores - scores.max(1, keepdims=True))
    shares = odds / odds.sum(1, keepdims=True)
    for client, found in each(logistic.score_clients_, "loss").items():
        rows = client == CLIENTS
        assert found == pytest.approx(-np.log(shares[rows, target[rows]]).mean(), rel=1e-4)
    for client, found in each(logistic.score_clients_, "accuracy").items():
        rows = client == CLIENTS
        assert found == pytest.approx((shares.argmax(1) == target)[rows].mean())


def test_new_rows_are_scored_as_scikit_learn_scores_them(logistic, ridge):
    new, other = X[::-1] * 1.1, np.where(np.arange(60) < 7, "new", CLIENTS)
    found = ridge.score_clients(new, Y, other)
    assert set(found.ids) == {"new", "a", "b", "c"}
    for client, error in each(found, "mse").items():
        rows = other == client
        assert error == pytest.approx(mean_squared_error(Y[rows], ridge.predict(new[rows])))
    assert found.mean() == pytest.approx(mean_squared_error(Y, ridge.predict(new)))
    found = logistic.score_clients(new, LABELS, other)
    for client in found.ids:
        rows = other == client
        wanted = log_loss(LABELS[rows], logistic.predict_proba(new[rows]), labels=["no", "yes"])
        assert each(found, "loss")[client] == pytest.approx(wanted)
        right = accuracy_score(LABELS[rows], logistic.predict(new[rows]))
        assert each(found, "accuracy")[client] == pytest.approx(right)
    assert found.mean("accuracy") == pytest.approx(logistic.score(new, LABELS))
    assert found.goals == {"loss": "min", "accuracy": "max"}
    assert logistic.score_clients(new, LABELS).ids.tolist() == [0]
    with pytest.raises(UserError, match="classes that the estimator was not fitted with"):
        logistic.score_clients(new, np.where(other == "a", "maybe", LABELS))


def test_more_than_two_classes(random_models):
    labels = np.digitize(Y, [-50, 50])
    fitted = LongTailClassifier(**QUICK).fit(X, labels, CLIENTS)
    found = fitted.score_clients(X, labels, CLIENTS)
    assert found.mean("accuracy") == pytest.approx(fitted.score(X, labels))
    assert found.mean("loss") == pytest.approx(log_loss(labels, fitted.predict_proba(X)))


def test_a_client_without_trusted_rows_is_unknown():
    trusted = CLIENTS != "c"
    trusted[:10] = False
    fitted = NoisyLabelClassifier(folds=None, **QUICK).fit(X, LABELS, CLIENTS, trusted=trusted)
    assert fitted.score_clients_.missing == ["c"]
    right = fitted.predict(X) == LABELS
    for client in "ab":
        rows = trusted & (client == CLIENTS)
        found = each(fitted.score_clients_, "accuracy")[client]
        assert found == pytest.approx(right[rows].mean())
