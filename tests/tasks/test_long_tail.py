"""Scales and shifts against an imbalance: finite differences through Newton's method."""

import numpy as np
import pytest

from simfbo.core.data import federate
from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.tasks import linear
from simfbo.tasks._long_tail import Adjustment, long_tail, problem
from simfbo.tasks.metrics import by_class
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import long_tailed, standardised

ROWS, D, C, FOLDS, PENALTY, PRIOR = 12, 2, 3, 2, 0.1, 0.05
RNG = np.random.default_rng(1)
INPUTS = RNG.normal(size=(ROWS, D))
LABELS = np.array([0] * 6 + [1] * 4 + [2] * 2, np.int32)
FOLD = (np.arange(ROWS) % FOLDS).astype(np.int32)
SHARES = np.bincount(LABELS) / ROWS
PARTS = [np.arange(0, ROWS, 2), np.arange(1, ROWS, 2)]
X = np.array([0.3, -0.2, 0.1, 0.5, 0.0, -0.4])  # scales, then shifts


def some_models():
    shapes = (FOLDS, D, C), (FOLDS, C)
    return Linear(*(RNG.normal(size=shape).astype("f4") for shape in shapes))


@pytest.fixture(scope="module")
def truth(by_hand, models):
    """Derivatives at the models that Newton's method finds."""
    data = federate((INPUTS, LABELS, FOLD), PARTS, PARTS)
    theta = np.stack(models(X))
    losses = problem(tuple(SHARES.tolist()), FOLDS, PENALTY, PRIOR)
    y = Linear(theta[:, :-1], theta[:, -1])
    return by_hand.hypergradient(losses, data, Adjustment(X[:C], X[C:]), y)


@pytest.fixture(scope="module")
def models(by_hand):
    def fitted(x):
        scale, shift = np.exp(x[:C]), np.log(SHARES) + x[C:]
        others = [(k != FOLD) * FOLDS / (FOLDS - 1) / ROWS for k in range(FOLDS)]
        return [by_hand.fit(INPUTS, LABELS, own, PENALTY, scale, shift) for own in others]

    return fitted


def test_the_models_are_those_of_newtons_method(truth):
    np.testing.assert_allclose(truth.lower_grad, 0, atol=1e-7)  # shares are held in float32


def test_the_hypergradient_is_that_of_finite_differences(truth, models, by_hand):
    """f weights each row by 1 / (C share) and takes scores without scale or shift."""

    def balanced(x):
        total = 0.5 * PRIOR * x @ x
        for k, theta in enumerate(models(x)):
            own = k == FOLD
            scores = INPUTS[own] @ theta[:-1] + theta[-1]
            losses = by_hand.cross_entropy(scores, LABELS[own])
            total += np.sum(losses / SHARES[LABELS[own]]) / C / ROWS
        return total

    np.testing.assert_allclose(truth.gradient, by_hand.slopes(balanced, X), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", [0, 1])
def test_counts_fall_off_geometrically(seed):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [90, 80, 85, 100, 80]))
    rows = long_tailed(labels, 16.0, seed)
    assert len(np.unique(rows)) == len(rows)
    assert sorted(np.bincount(labels[rows]))[::-1] == [80, 40, 20, 10, 5]
    assert not np.array_equal(np.sort(rows), rows)


def test_the_order_of_classes_is_drawn():
    labels = np.repeat(np.arange(3), 40)
    firsts = {int(np.argmax(np.bincount(labels[long_tailed(labels, 10.0, s)]))) for s in range(30)}
    assert firsts == {0, 1, 2}


def test_every_class_keeps_at_least_two():
    labels = np.repeat([1, 4], [30, 30])
    assert sorted(np.bincount(labels[long_tailed(labels, 1000.0, 0)])) == [0, 0, 0, 2, 30]
    assert len(long_tailed(labels, 1.0, 0)) == 60
    with pytest.raises(UserError, match=r"The imbalance must be at least 1, got 0\.5"):
        long_tailed(labels, 0.5, 0)


def test_by_class():
    found, target = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, 2, 2, 0])
    np.testing.assert_array_equal(by_class(found, target, 4), [0.5, 0.5, 1.0, np.nan])


@pytest.fixture(scope="module")
def task():
    samples = standardised(INPUTS, LABELS, INPUTS, LABELS, classes=C)
    return long_tail(samples, PARTS, folds=FOLDS)


def test_the_task_starts_with_logit_adjustment_and_measures_by_class(task, by_hand):
    y = some_models()
    found = task.evaluate(Point(x=task.x0, y=y))
    features = np.asarray(task.data.lower.samples[0])
    guess = (features @ y.weight.mean(0) + y.bias.mean(0)).argmax(1)
    accuracies = [np.mean(guess[c == LABELS] == c) for c in range(C)]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(accuracies))
    assert found["worst_class_accuracy"] == pytest.approx(min(accuracies))
    fold = np.asarray(task.data.lower.samples[2])
    scores = np.einsum("rd,rdc->rc", features, y.weight[fold]) + y.bias[fold]
    losses = by_hand.cross_entropy(scores, LABELS) * linear.balancing_weights(SHARES)[LABELS]
    assert found["upper_loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert not any(part.any() for part in task.x0)
    goals = {"balanced_accuracy": "max", "worst_class_accuracy": "max", "upper_loss": "min"}
    assert {name: task.goal_of(name) for name in found} == goals


def test_baselines(task, by_hand):
    """No tuning removes the shares again; inverse frequency weights rows and adjusts nothing."""
    none, inverse, adjusted, searched = task.baselines
    np.testing.assert_allclose(none.candidates[0].shift, -np.log(SHARES), rtol=1e-6)
    assert not adjusted.candidates[0].shift.any()
    strengths = [float(x.shift[2] / np.log(SHARES[2])) for x in searched.candidates]
    np.testing.assert_allclose(strengths, np.linspace(-1, 1, 9), atol=1e-6)
    batch = tuple(np.asarray(part) for part in task.data.lower.samples)
    y = some_models()
    balance = linear.balancing_weights(SHARES)[LABELS]
    for baseline, weight in ((none, np.ones(ROWS)), (inverse, balance)):
        total = 0.5 * 0.003 * (np.sum(y.weight**2) + np.sum(y.bias**2))
        for k in range(FOLDS):
            losses = by_hand.cross_entropy(batch[0] @ y.weight[k] + y.bias[k], LABELS)
            total += np.mean(losses * weight * (batch[2] != k)) * FOLDS / (FOLDS - 1)
        got = baseline.problem.lower(baseline.candidates[0], y, batch)
        assert float(got) == pytest.approx(total, rel=1e-5)
