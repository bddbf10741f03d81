"""An L2 weight per feature: ridge regression in closed form, and finite differences through it."""

import numpy as np
import pytest

from simfbo.core.data import federate, pooled
from simfbo.core.problem import Point
from simfbo.tasks._regularisation import penalties, problem, regularisation, scaled
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import standardised, synthetic

ROWS, D, FOLDS, FLOOR, PRICE = 12, 3, 3, 0.05, 0.02
RNG = np.random.default_rng(0)
INPUTS, TARGET = RNG.normal(size=(ROWS, D)), RNG.normal(size=ROWS)
FOLD = (np.arange(ROWS) % FOLDS).astype(np.int32)
PARTS = np.split(np.arange(ROWS), 2)
DATA = federate((INPUTS, TARGET, FOLD), PARTS, PARTS)
X = np.array([0.3, -1.0, 2.0])


def ridge(rows, lambdas, floor=FLOOR):
    """Return (beta, b) of mean half squares + sum lambda_j beta_j^2 / 2 + floor b^2 / 2."""
    wide = np.column_stack([INPUTS[rows], np.ones(len(rows))])
    matrix = wide.T @ wide / len(rows) + np.diag([*lambdas, floor])
    solution = np.linalg.solve(matrix, wide.T @ TARGET[rows] / len(rows))
    return solution[:-1], solution[-1]


def models(x):
    """Return each fold's model: trained on the other folds alone."""
    return [ridge(np.flatnonzero(k != FOLD), FLOOR * (1 + np.exp(x))) for k in range(FOLDS)]


def validation(x, price=PRICE):
    """Return Phi(x): every row by the model that was not trained on it, plus the price."""
    betas = models(x)
    errors = [INPUTS[r] @ betas[k][0] + betas[k][1] - TARGET[r] for r, k in enumerate(FOLD)]
    return 0.5 * np.mean(np.square(errors)) + price * np.sum(1 / (1 + np.exp(x)))


@pytest.fixture(scope="module")
def truth(by_hand):
    """Derivatives at the ridge regressions, in the parametrisation s_j w_j = beta_j."""
    betas, biases = zip(*models(X))
    w = np.stack(betas) * np.sqrt(1 + np.exp(X))
    y = Linear(w[:, :, None], np.array(biases)[:, None])
    np.testing.assert_allclose(scaled(X, Linear(y.weight[0], y.bias[0])).weight[:, 0], betas[0])
    return by_hand.hypergradient(problem(0, FOLDS, FLOOR, PRICE), DATA, X, y)


def test_every_fold_is_ridge_regression_on_the_others(truth):
    """The lower gradient vanishes at the ridge regressions with lambda_j = floor (1 + exp(x_j))."""
    np.testing.assert_allclose(truth.lower_grad, 0, atol=1e-12)


def test_the_hypergradient_is_that_of_the_closed_form(truth, by_hand):
    expected = by_hand.slopes(validation, X)
    assert np.abs(expected).min() > 1e-4
    np.testing.assert_allclose(truth.gradient, expected, rtol=1e-7, atol=1e-10)


def test_penalties():
    np.testing.assert_allclose(penalties(X, FLOOR), FLOOR * (1 + np.exp(X)), rtol=1e-15)
    assert penalties(np.array([-40.0]), 0.01).tolist() == [pytest.approx(0.01)]


@pytest.fixture(scope="module")
def made():
    return synthetic(clients=4, per_client=5, features=6, relevant=2, seed=1)


@pytest.fixture(scope="module")
def task(made):
    return regularisation(made.samples, made.parts, folds=4, relevant=made.relevant)


def test_metrics(task, made):
    rng = np.random.default_rng(3)
    x = (7 * rng.normal(size=6)).astype("f4")
    y = Linear(rng.normal(size=(4, 6, 1)).astype("f4"), rng.normal(size=(4, 1)).astype("f4"))
    found, samples = task.evaluate(Point(x=x, y=y)), made.samples
    beta = np.sqrt(1 / (1 + np.exp(x))) * y.weight.mean(0)[:, 0]
    errors = samples.test_features @ beta + y.bias.mean() - samples.test_target
    assert found["test_loss"] == pytest.approx(0.5 * np.mean(errors**2), rel=1e-5)
    fold = np.asarray(task.data.lower.samples[2])
    own = np.sqrt(1 / (1 + np.exp(x))) * y.weight[fold, :, 0]
    errors = (samples.features * own).sum(1) + y.bias[fold, 0] - samples.target
    fit = 0.5 * np.mean(errors**2)
    assert found["upper_loss"] == pytest.approx(fit, rel=1e-5)
    price = 0.1 * np.log(20) / 20 * np.sum(1 / (1 + np.exp(x)))
    paid = pooled(task.problem.upper, task.data.upper, task.data.p)(x, y)
    assert float(paid) == pytest.approx(fit + price, rel=1e-5)
    weight = 0.01 * (1 + np.exp(x))  # of a feature alone, ridge keeps 1 / (1 + weight)
    closed = 1 / (1 + weight) <= 0.1
    assert 0 < closed.sum() < len(x)
    assert found["irrelevant_shut"] == closed[~made.relevant].mean()
    assert found["relevant_shut"] == closed[made.relevant].mean()
    assert [name for name in found if task.goal_of(name) == "max"] == ["irrelevant_shut"]


def test_baselines(task, made):
    names = [baseline.name for baseline in task.baselines]
    assert names == ["no tuning", "one lambda, 20 tried", "the features that matter (oracle)"]
    assert [len(baseline.candidates) for baseline in task.baselines] == [1, 20, 1]
    oracle = task.baselines[2].candidates[0]
    np.testing.assert_array_equal(oracle < 0, made.relevant)
    grid = task.baselines[1].candidates
    assert all(np.ptp(x) == 0 for x in grid)
    assert [float(x[0]) for x in (grid[0], grid[-1])] == [-4, 10]


def test_without_test_rows_there_is_no_test_loss():
    samples = standardised(INPUTS, TARGET, INPUTS[:0], TARGET[:0])
    task = regularisation(samples, PARTS, folds=3)
    assert set(task.evaluate(Point(x=task.x0, y=task.y0))) == {"upper_loss"}


def test_classes_have_an_accuracy_too():
    labels = (TARGET > 0).astype(int)
    task = regularisation(standardised(INPUTS, labels, INPUTS, labels, classes=2), PARTS, folds=3)
    found = task.evaluate(Point(x=task.x0, y=task.y0))
    assert found["test_loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert found["test_accuracy"] == pytest.approx(np.mean(labels == 0))
    assert (task.goal, task.goal_of("test_accuracy")) == ("min", "max")


def test_tasks_of_the_same_settings_share_their_problem(task, made):
    again = regularisation(made.samples, made.parts, folds=4, seed=5)
    assert again.problem is task.problem  # so that it compiles once
    assert regularisation(made.samples, made.parts, folds=3).problem is not task.problem
