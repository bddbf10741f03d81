"""Weights for groups: the smoothed largest loss, against closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

from simfbo.core.data import federate
from simfbo.core.problem import Point
from simfbo.tasks._fair import Monitored, fair, group_weights, problem
from simfbo.tasks.metrics import group_means
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import standardised

ROWS, D, G, FOLDS, PENALTY, SHARP = 16, 2, 3, 2, 0.1, 5.0
RNG = np.random.default_rng(3)
INPUTS, TARGET = RNG.normal(size=(ROWS, D)), RNG.normal(size=ROWS)
GROUP = np.array([0] * 8 + [1] * 4 + [2] * 4, np.int32)  # shares that float32 holds exactly
SHARES = np.bincount(GROUP) / ROWS
FOLD = (np.arange(ROWS) % FOLDS).astype(np.int32)
PARTS = [np.arange(0, ROWS, 2), np.arange(1, ROWS, 2)]  # across groups
DATA = federate((INPUTS, TARGET, GROUP, FOLD), PARTS, PARTS)
A = np.array([0.2, -0.3, 0.6])
LOSSES = problem(tuple(SHARES), 0, FOLDS, PENALTY, SHARP)


def models(a):
    """Return each fold's weighted ridge regression on the others, in closed form."""
    wide, found = np.column_stack([INPUTS, np.ones(ROWS)]), []
    for k in range(FOLDS):
        own = (softmax(a) / SHARES)[GROUP] * (k != FOLD) * FOLDS / (FOLDS - 1) / ROWS
        matrix = (wide.T * own) @ wide + PENALTY * np.eye(D + 1)
        found.append(np.linalg.solve(matrix, wide.T @ (own * TARGET)))
    return np.stack(found)


def group_losses(a):
    """Return the cross-validated loss of every group."""
    theta = models(a)[FOLD]
    losses = 0.5 * ((INPUTS * theta[:, :-1]).sum(1) + theta[:, -1] - TARGET) ** 2
    return np.array([losses[g == GROUP].mean() for g in range(G)])


def soft_maximum(a):
    """Return the largest of the groups' losses, smoothed."""
    return (logsumexp(SHARP * group_losses(a)) - np.log(G)) / SHARP


def solution(a):
    """Return y*(a): the weighted ridge regressions, and the groups' losses."""
    theta = models(a)
    return Monitored(Linear(theta[:, :-1, None], theta[:, -1:]), group_losses(a))


@pytest.fixture(scope="module")
def truth(by_hand):
    return by_hand.hypergradient(LOSSES, DATA, A, solution(A))


def test_the_solution_is_weighted_ridge_regressions_and_their_losses(truth):
    """Lower gradients in closed form vanish only there: the lower problem is strongly convex."""
    np.testing.assert_allclose(truth.lower_grad, 0, atol=1e-12)


def test_value_and_hypergradient_are_those_of_the_smoothed_largest_loss(truth, by_hand):
    got = LOSSES.upper(A, solution(A), (INPUTS, TARGET, GROUP, FOLD))
    assert float(got) == pytest.approx(soft_maximum(A), rel=1e-9)
    slopes = by_hand.slopes(soft_maximum, A)
    assert np.abs(slopes).max() > 1e-2
    np.testing.assert_allclose(truth.gradient, slopes, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(truth.v.losses, 0, atol=1e-12)  # no gradient through the estimate


def test_the_best_weights_help_the_worst_group():
    best = minimize(soft_maximum, np.zeros(G), method="BFGS", options={"gtol": 1e-8}).x
    got = LOSSES.upper(best, solution(best), (INPUTS, TARGET, GROUP, FOLD))
    assert float(got) == pytest.approx(soft_maximum(best), rel=1e-9)
    assert group_losses(best).max() < group_losses(np.log(SHARES)).max()


def test_weights_are_one_on_average():
    found = group_weights(A, SHARES)
    np.testing.assert_allclose(found, softmax(A) / SHARES, rtol=1e-12)
    assert SHARES @ found == pytest.approx(1)


def test_group_means():
    values, groups = jnp.array([1.0, 2.0, 3.0, 10.0]), jnp.array([0, 0, 2, 2], jnp.int32)
    assert group_means(values, groups, 4).tolist() == [1.5, 0.0, 6.5, 0.0]
    assert group_means(values, groups, 4, 1.0).tolist() == [1.5, 1.0, 6.5, 1.0]


@pytest.fixture(scope="module")
def task():
    samples = standardised(INPUTS, TARGET, INPUTS[::2], TARGET[::2])
    return fair(samples, PARTS, (GROUP, GROUP[::2]), folds=FOLDS)


def test_the_task_starts_without_weights_and_measures_the_worst_group(task):
    np.testing.assert_allclose(group_weights(task.x0, SHARES), 1, rtol=1e-6)
    shapes = (FOLDS, D, 1), (FOLDS, 1)
    y = Linear(*(RNG.normal(size=shape).astype("f4") for shape in shapes))
    found = task.evaluate(Point(x=task.x0, y=Monitored(y, jnp.zeros(G))))
    features, target, group, fold = (np.asarray(part) for part in task.data.lower.samples)
    np.testing.assert_array_equal(group, GROUP)
    mean = features[::2] @ y.weight.mean(0)[:, 0] + y.bias.mean() - target[::2]
    tested = [np.mean(0.5 * mean[GROUP[::2] == g] ** 2) for g in range(G)]
    assert found["worst_group_loss"] == pytest.approx(max(tested), rel=1e-5)
    assert found["mean_loss"] == pytest.approx(np.mean(0.5 * mean**2), rel=1e-5)
    own = (features * y.weight[fold, :, 0]).sum(1) + y.bias[fold, 0] - target
    checked = [np.mean(0.5 * own[g == GROUP] ** 2) for g in range(G)]
    assert found["upper_loss"] == pytest.approx(max(checked), rel=1e-5)
    assert {task.goal_of(name) for name in found} == {"min"}


def test_baselines_are_powers_of_the_shares(task):
    none, inverse, searched = task.baselines
    np.testing.assert_allclose(group_weights(none.candidates[0], SHARES), 1, rtol=1e-6)
    np.testing.assert_allclose(
        group_weights(inverse.candidates[0], SHARES), 1 / (G * SHARES), rtol=1e-6
    )
    for x, power in zip(searched.candidates, np.linspace(0, 2, 9), strict=True):
        expected = SHARES**-power / (SHARES @ SHARES**-power)
        np.testing.assert_allclose(group_weights(x, SHARES), expected, rtol=1e-5)


def test_classes_have_accuracies():
    labels = (TARGET > 0).astype(int)
    samples = standardised(INPUTS, labels, INPUTS, labels, classes=2)
    task = fair(samples, PARTS, (GROUP, GROUP), folds=FOLDS)
    found = task.evaluate(Point(x=task.x0, y=task.y0))
    worst = min(np.mean(labels[g == GROUP] == 0) for g in range(G))
    assert found["worst_group_accuracy"] == pytest.approx(worst)
    assert found["test_accuracy"] == pytest.approx(np.mean(labels == 0))
    assert found["worst_group_loss"] == pytest.approx(np.log(2), rel=1e-6)
    large = {name for name in found if task.goal_of(name) == "max"}
    assert large == {"worst_group_accuracy", "test_accuracy"}
