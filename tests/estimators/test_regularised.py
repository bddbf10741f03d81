"""Ridge and logistic regression with learnt regularisation, against closed forms."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import GammaRegressor, PoissonRegressor
from sklearn.metrics import mean_gamma_deviance, mean_poisson_deviance

from simfbo import History, Point, UserError
from simfbo.estimators import FederatedGLM, FederatedLogistic, FederatedRidge
from simfbo.estimators._training import warn_unless_converged
from simfbo.tasks.linear import assign_folds

pytestmark = pytest.mark.filterwarnings("ignore:Without clients:UserWarning")
FAR = {"converged": False, "lower": 1.0, "linear": 1.0, "text": "not converged: far"}
WEIGHTS = np.array([3.0, -2.0, 1.0, 0, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 8)) * np.arange(1, 9) + 100 * np.arange(8)
    y = 5 * ((X - X.mean(0)) / X.std(0)) @ WEIGHTS + 40 + 5 * rng.normal(size=120)
    return X, y, rng.integers(0, 6, 120)


def closed_form(X, y, penalties, floor, fold):
    """The mean over folds of ridge regressions on all other rows, in the units of X and y."""
    A, b = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    A, folds = np.hstack([A, np.ones((len(A), 1))]), fold.max() + 1
    scale, models = folds / (folds - 1) / len(A), []
    for k in range(folds):
        rest = A[fold != k]
        hessian = scale * rest.T @ rest + np.diag([*penalties, floor])
        models.append(np.linalg.solve(hessian, scale * rest.T @ b[fold != k]))
    mean = np.mean(models, axis=0)
    coef = mean[:-1] / X.std(0) * y.std()
    return coef, mean[-1] * y.std() + y.mean() - X.mean(0) @ coef


def test_ridge_is_the_mean_of_the_folds_closed_forms(rows):
    X, y, clients = rows
    steps = Point(x=60.0, y=0.7, v=0.7)
    ridge = FederatedRidge(
        rounds=300, steps=steps, floor=0.05, spread=np.inf, sparsity=0.1, random_state=3
    )
    ridge.fit(X, y, clients)
    seed = np.random.RandomState(3).randint(2**31 - 1)
    fold = assign_folds(np.zeros(120, np.int32), 5, seed)
    coef, intercept = closed_form(X, y, ridge.regularisation_, 0.05, fold)
    scale = X.std(0) / y.std()
    np.testing.assert_allclose(ridge.coef_ * scale, coef * scale, atol=2e-4)
    np.testing.assert_allclose(ridge.predict(X), X @ coef + intercept, atol=2e-3 * y.std())
    assert ridge.regularisation_[3:].min() > 5 * ridge.regularisation_[:3].max()
    assert ridge.score(X, y) > 0.85


def test_a_still_upper_variable_leaves_twice_the_floor(rows):
    X, y, clients = rows
    steps = Point(x=0.0, y=0.5, v=0.5)
    ridge = FederatedRidge(rounds=100, tol=0, steps=steps, floor=0.05, random_state=0)
    still = ridge.fit(X, y, clients)
    np.testing.assert_allclose(still.regularisation_, 0.1)
    seed = np.random.RandomState(0).randint(2**31 - 1)
    fold = assign_folds(np.zeros(120, np.int32), 5, seed)
    coef, _ = closed_form(X, y, np.full(8, 0.1), 0.05, fold)
    np.testing.assert_allclose(
        still.coef_ * X.std(0) / y.std(), coef * X.std(0) / y.std(), atol=1e-5
    )
    assert still.ledger_.total.rounds == 100 + 2


def test_logistic_regression_is_the_mean_of_the_folds_minima(rows):
    X, y, _ = rows
    A, labels = (X - X.mean(0))[:, :2] / X.std(0)[:2], np.digitize(y, np.quantile(y, [0.3, 0.6]))
    ours = FederatedLogistic(
        rounds=150, tol=0, steps=Point(x=0.0, y=0.5, v=0.5), floor=0.1, folds=2, random_state=0
    ).fit(X[:, :2], labels)
    fold = assign_folds(labels, 2, np.random.RandomState(0).randint(2**31 - 1))

    def loss(flat, chosen):
        weight, bias = flat[:6].reshape(2, 3), flat[6:]
        scores = A[chosen] @ weight + bias
        own = scores[np.arange(len(scores)), labels[chosen]]
        fit = (logsumexp(scores, axis=1) - own).sum() * 2 / len(A)
        return fit + 0.1 * (weight**2).sum() + 0.05 * (bias**2).sum()

    found = np.mean([minimize(loss, np.zeros(9), (fold != k,)).x for k in (0, 1)], axis=0)
    scores = A @ found[:6].reshape(2, 3) + found[6:]
    np.testing.assert_allclose(ours.predict_proba(X[:, :2]), softmax(scores, axis=1), atol=1e-4)
    np.testing.assert_allclose(
        ours.coef_.T * X.std(0)[:2, None], found[:6].reshape(2, 3), atol=1e-4
    )


def test_a_constant_feature_and_an_offset_do_no_harm(rows):
    X, y, _ = rows
    wide = np.hstack([X, np.full((120, 1), 7.7), 1e5 + X[:, :1]])
    steps = Point(x=0.1, y=0.3, v=0.3)
    ridge = FederatedRidge(rounds=100, steps=steps, random_state=0).fit(wide, y)
    assert abs(ridge.coef_[8]) < 1e-3
    assert ridge.coef_[9] == pytest.approx(ridge.coef_[0], rel=0.01)
    assert ridge.score(wide, y) > 0.85


def test_a_fit_ends_when_nothing_changes(rows):
    """Neither before x has begun to move, nor with tol=0; the result is hardly another."""
    X, y, clients = rows
    fits = {
        tol: FederatedRidge(rounds=400, tol=tol, random_state=0).fit(X, y, clients)
        for tol in (0, 1e-3)
    }
    whole, short = fits[0], fits[1e-3]
    assert whole.n_iter_ == 400
    # Only a fit that took all its rounds says that more are needed.
    early = History({"rounds": 400}, short.history_.records, verdict=FAR)
    warn_unless_converged(early)
    late = History({"rounds": 400}, whole.history_.records, verdict=FAR)
    with pytest.warns(ConvergenceWarning, match="The fit has not converged: far"):
        warn_unless_converged(late)
    assert short.n_iter_ < 300
    assert short.history_.end == {"status": "finished"}
    last, before = short.history_.records[-1], short.history_.records[-3]
    assert abs(last["upper_loss"] - before["upper_loss"]) <= 1e-3 * last["upper_loss"]
    waiting = [record["y_move"] for record in short.history_.records[:2]]
    assert waiting == [1.0, 1.0]
    assert last["upper_loss"] == pytest.approx(whole.history_.records[-1]["upper_loss"], rel=5e-3)
    np.testing.assert_allclose(short.coef_, whole.coef_, atol=0.02 * np.abs(whole.coef_).max())


@pytest.mark.parametrize("bad", [-1e-3, "small"])
def test_wrong_tolerances(rows, bad):
    with pytest.raises((ValueError, TypeError), match="tol"):
        FederatedRidge(tol=bad).fit(*rows[:2])


def test_weights_are_repetitions(rows):
    """At a given x, the folds' models are those of repeated rows, up to the folds they are in."""
    X, y, clients = rows
    weight = np.arange(120) % 3
    model = FederatedRidge(
        rounds=300, tol=0, steps=Point(x=0.0, y=0.5, v=0.5), floor=0.1, random_state=0
    ).fit(X, y, clients, sample_weight=weight)
    seed = np.random.RandomState(0).randint(2**31 - 1)
    fold = assign_folds(np.zeros(120, np.int32), 5, seed)
    repeated = [np.repeat(part, weight, axis=0) for part in (X, y)]
    coef, intercept = closed_form(*repeated, np.full(8, 0.2), 0.1, np.repeat(fold, weight))
    np.testing.assert_allclose(model.predict(X), X @ coef + intercept, atol=1e-4 * y.std())


@pytest.mark.parametrize(
    ("family", "sklearn"), [("poisson", PoissonRegressor), ("gamma", GammaRegressor)]
)
def test_counts_and_sizes_are_the_mean_of_the_folds_minima(rows, family, sklearn):
    X, _, clients = rows
    A = (X - X.mean(0))[:, :3] / X.std(0)[:3]
    rng = np.random.default_rng(1)
    rate = np.exp(2 + A @ [0.5, -0.3, 0.0])
    target = rng.poisson(rate) if family == "poisson" else rng.gamma(3, rate / 3)
    weight = rng.uniform(0.5, 1.5, 120)
    model = FederatedGLM(
        family=family, rounds=400, tol=0, steps=Point(x=0.0, y=0.3, v=0.3), floor=0.05, folds=2,
        random_state=0,
    ).fit(A, target, clients, sample_weight=weight)  # fmt: skip
    fold = assign_folds(np.zeros(120, np.int32), 2, np.random.RandomState(0).randint(2**31 - 1))
    mean, spread = (np.average(A, 0, weight), np.average(A**2, 0, weight))
    Z = (A - mean) / np.sqrt(spread - mean**2)
    level, coefs = np.average(target, weights=weight), []
    for k in (0, 1):
        # g doubles the sum over the other fold's rows and divides by all weights.
        share = 2 * weight[fold != k].sum() / weight.sum()
        ours = sklearn(alpha=0.1 / share, fit_intercept=False, tol=1e-10, max_iter=10_000)
        ones = np.hstack([Z, np.full((120, 1), 2**0.5)])  # the bias has half the penalty
        coefs.append(
            ours.fit(ones[fold != k], (target / level)[fold != k], weight[fold != k]).coef_
        )
    coef = np.mean(coefs, axis=0)
    np.testing.assert_allclose(
        model.predict(A), level * np.exp(Z @ coef[:3] + coef[3] * 2**0.5), rtol=1e-3
    )
    assert model.score(A, target) > 0.2
    # A client's rows are judged by the models of their folds, in the target's own units.
    found, deviances = (
        np.zeros(120),
        {"poisson": mean_poisson_deviance, "gamma": mean_gamma_deviance},
    )
    for k in (0, 1):
        found[fold == k] = level * np.exp(Z @ coefs[k][:3] + coefs[k][3] * 2**0.5)[fold == k]
    wanted = [deviances[family](target[clients == i], found[clients == i]) for i in model.clients_]
    np.testing.assert_allclose(model.score_clients_.values["deviance"], wanted, rtol=1e-3)


@pytest.mark.usefixtures("random_models")
def test_weights_may_be_a_column_everywhere(rows):
    X, y, clients = rows
    weight = np.arange(120.0)
    frame = pd.DataFrame(X).add_prefix("x").assign(w=weight, hospital=clients)
    for model, target in (
        (FederatedRidge(), y),
        (FederatedLogistic(), y > 0),
        (FederatedGLM(), y**2),
    ):
        model.fit(frame, target, "hospital", sample_weight="w")
        wanted = model.score(frame, target, sample_weight=weight)
        assert model.score(frame, target, sample_weight="w") == wanted
        assert model.score(frame, target) != wanted


def test_rates_are_counts_with_exposure():
    rng = np.random.default_rng(0)
    X, exposure = rng.normal(size=(400, 2)), rng.uniform(1, 20, 400)
    counts = rng.poisson(exposure * np.exp(-1 + X @ [0.4, 0.0]))
    model = FederatedGLM(random_state=0)
    model.fit(X, counts / exposure, np.arange(400) % 5, sample_weight=exposure)
    np.testing.assert_allclose(model.coef_, [0.4, 0.0], atol=0.05)
    assert model.intercept_ == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"y": -np.ones(120)}, "y must be zero or positive in every row for family='poisson'"),
        ({"y": np.zeros(120)}, "y is zero in every row"),
        ({"family": "cox"}, "family must be 'poisson' or 'gamma', got 'cox'"),
        ({"family": "gamma", "y": np.arange(120.0)}, "y must be positive in every row"),
        ({"sample_weight": -np.ones(120)}, "sample_weight must be zero or positive"),
        ({"sample_weight": np.zeros(120)}, "not all zero"),
        ({"sample_weight": np.full(120, "a")}, "sample_weight must hold numbers, got 'a'"),
        ({"sample_weight": np.full(120, np.nan)}, "sample_weight has missing or infinite values"),
        ({"y": np.full(120, "a")}, "y must hold numbers, got 'a'"),
        ({"sample_weight": np.ones(3)}, "sample_weight must hold one value for each of the 120"),
    ],
)
def test_bad_targets_and_weights_end_in_a_sentence(rows, given, sentence):
    X, _, clients = rows
    model = FederatedGLM(family=given.get("family", "poisson"))
    with pytest.raises(UserError, match=sentence):
        model.fit(X, given.get("y", np.ones(120)), clients, given.get("sample_weight"))
