"""Local work: the plans, and the paths of the local optimisers against loops written by hand."""

from functools import partial

import jax
import numpy as np
import pytest

from simfbo.algorithms._common import drawn_directions, local_steps
from simfbo.core.federation import Client
from simfbo.core.local_work import (
    LocalWork,
    coefficients,
    constant,
    effective,
    fixed,
    momentum,
    proximal,
    sgd,
    uniform,
)
from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.tasks import random_quadratic

TAU, M, ALPHA = 6, 0.7, 0.2
KEY = jax.random.key(3)
ETA = Point(x=0.05, y=0.1, v=0.08)
QUADRATIC = random_quadratic(2, seed=4)
TASK = QUADRATIC.task()
START = Point(x=np.full(4, 0.5), y=np.full(5, -0.3), v=np.full(5, 0.2))


def directions(x, y, v, i=1):
    """Return the three directions of client i, written in NumPy."""
    q = QUADRATIC
    d_y = q.A[i] @ y - q.B[i] @ x - q.c[i]
    d_v = q.A[i] @ v - q.C[i] @ (y - q.t[i])
    d_x = q.D[i] @ (x - q.s[i]) + q.B[i].T @ v
    return np.concatenate([d_x, d_y, d_v])


def by_hand(step):
    """Return q = (start - end) / eta of TAU steps of `step(k, z, start, d, memory)`."""
    eta = np.repeat([ETA.x, ETA.y, ETA.v], [4, 5, 5])
    start = np.concatenate(START)
    z, memory = start.copy(), np.zeros(14)
    for k in range(TAU):
        z, memory = step(k, z, start, directions(z[:4], z[4:9], z[9:]), memory, eta)
    return (start - z) / eta


def found(rule):
    """Return q of the library."""
    client = Client(TASK.data.client(1), constant(TAU, rule)(KEY, 2)[1], KEY)
    q = jax.jit(partial(local_steps, drawn_directions(TASK.problem)))(START, client, ETA)
    return np.concatenate(q)


def plain(k, z, start, d, memory, eta):
    return z - eta * d, memory


def heavy_ball(k, z, start, d, memory, eta):
    memory = M * memory + d
    return z - eta * memory, memory


def pulled_back(k, z, start, d, memory, eta):
    # FedProx: the gradient of mu/2 ||z - start||^2 with mu = alpha / eta.
    return z - eta * (d + ALPHA / eta * (z - start)), memory


def papers_own(k, z, start, d, memory, eta):
    return z - eta * effective(momentum(M), TAU)[k] * d, memory


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        (sgd(), plain),
        (momentum(M), heavy_ball),
        (proximal(ALPHA), pulled_back),
        (coefficients(effective(momentum(M), TAU)), papers_own),
    ],
)
def test_path_is_the_true_optimisers(rule, step):
    np.testing.assert_allclose(found(rule), by_hand(step), rtol=1e-12)


def test_papers_update_with_momentums_coefficients_is_not_momentum():
    true, paper = by_hand(heavy_ball), by_hand(papers_own)
    assert np.linalg.norm(true - paper) > 0.1 * np.linalg.norm(true)


def test_effective_coefficients_are_the_formulas():
    k = np.arange(TAU)
    np.testing.assert_allclose(effective(sgd(), TAU), np.ones(TAU))
    np.testing.assert_allclose(effective(proximal(ALPHA), TAU), (1 - ALPHA) ** (TAU - 1 - k))
    np.testing.assert_allclose(effective(momentum(M), TAU), (1 - M ** (TAU - k)) / (1 - M))


def test_norm_is_the_sum_of_what_weighs_the_directions():
    plan = fixed([1, 3, 6], momentum(M))(KEY, 3)
    expected = [effective(momentum(M), tau).sum() for tau in (1, 3, 6)]
    np.testing.assert_allclose(plan.norm, expected)
    assert plan.steps.tolist()[0] == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "rule", [sgd(), proximal(ALPHA), momentum(M), coefficients([0.5, 2.0, 1.0, 3.0, 0.1, 1.5])]
)
def test_norms_of_all_lengths_are_the_sums(rule):
    plan = fixed(range(1, TAU + 1), rule)(KEY, TAU)
    expected = [effective(rule, tau).sum() for tau in range(1, TAU + 1)]
    np.testing.assert_allclose(plan.norm, expected, rtol=1e-12)


def test_every_client_has_the_plan_of_its_own_rule():
    rules = [sgd(), momentum(M), proximal(ALPHA), coefficients([0.5, 2.0])]
    plan = fixed([3, 2, 4, 2], rules)(KEY, 4)
    for i, (rule, tau) in enumerate(zip(rules, plan.tau.tolist(), strict=True)):
        alone = constant(tau, rule)(KEY, 1)[0]
        np.testing.assert_array_equal(plan.norm[i], alone.norm)
        np.testing.assert_array_equal(plan.steps[i][:tau], alone.steps)
        assert (plan.keep[i], plan.momentum[i]) == rule[:2]
    assert not plan.plain
    plain = constant(3, [sgd()] * 4)(KEY, 4)
    assert plain.plain
    assert plain.keep is plain.momentum is None


def _rules(work, key):
    return np.asarray(work.resolved(50).rule(key, np.arange(50)))


def test_rules_drawn_every_round():
    """Uniformly, by key alone, also of a list that is shorter or longer than that of clients."""
    work = fixed([1] * 50, [sgd(), proximal(ALPHA), momentum(M)], rules_every_round=True)
    keys = list(jax.random.split(KEY, 200))
    drawn = np.stack([_rules(work, key) for key in keys])
    assert (drawn[7] == _rules(work, keys[7])).all()
    counts = np.bincount(drawn.ravel())
    assert np.abs(counts - 10_000 / 3).max() < 5 * np.sqrt(10_000 * 2 / 9)
    assert (np.diff(drawn, axis=0) != 0).any()


def test_rules_by_a_function_of_ones_own():
    def choose(key, n):
        return np.arange(n) % 2

    work = LocalWork(lambda key, n: np.full(n, 2), 2, [sgd(), momentum(M)], choose=choose)
    np.testing.assert_allclose(work(KEY, 3).norm, [2, 2 + M, 2])


def test_a_thousand_steps_can_be_planned():
    plan = fixed([1, 1000], proximal(ALPHA))(KEY, 2)
    np.testing.assert_allclose(plan.norm, [1, (1 - (1 - ALPHA) ** 1000) / ALPHA])


def test_uniform_once_or_every_round():
    keys = list(jax.random.split(KEY, 200))
    once = [uniform(2, 4)(key, 50).tau for key in keys[:5]]
    assert all((tau == once[0]).all() for tau in once)
    again = np.stack([uniform(2, 4, every_round=True)(key, 50).tau for key in keys])
    assert set(np.unique(again)) == {2, 3, 4}
    counts = np.bincount(again.ravel())[2:]
    assert np.abs(counts - 10_000 / 3).max() < 5 * np.sqrt(10_000 * 2 / 9)
    assert (uniform(1, 9, seed=1)(KEY, 50).tau != uniform(1, 9, seed=2)(KEY, 50).tau).any()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: constant(0), "at least one local step"),
        (lambda: fixed([1, 0]), "each at least 1"),
        (lambda: fixed([1, 2])(KEY, 3), "2 numbers of local steps are given for 3 clients"),
        (lambda: LocalWork(lambda key, n: np.ones(3, int), 1)(KEY, 2), "one for each of 2 clients"),
        (lambda: uniform(3, 2), "1 <= low <= high"),
        (lambda: proximal(1.0), r"\[0, 1\)"),
        (lambda: momentum(-0.1), r"\[0, 1\)"),
        (lambda: coefficients([1.0, 0.0]), "positive numbers"),
        (lambda: constant(3, coefficients([1.0])), "1 local coefficients are given for up to 3"),
        (lambda: fixed([2, 3], [sgd(), coefficients([1, 2])])(KEY, 2), "2 local .* up to 3 steps"),
        (lambda: fixed([1, 2], [sgd()] * 3)(KEY, 2), "3 local rules are given for 2 clients: give"),
        (lambda: constant(1, []), "give at least one"),
        (lambda: constant(1, "sgd"), "Local rules are such as local_work.momentum"),
        (lambda: constant(1, 0.9), "Local rules are such as local_work.momentum"),
        (
            lambda: LocalWork(
                lambda key, n: np.ones(n, int), 1, [sgd()], choose=lambda key, n: np.arange(n)
            )(KEY, 2),
            "one of 1 local rules",
        ),
    ],
)
def test_impossible_plans_are_refused(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
