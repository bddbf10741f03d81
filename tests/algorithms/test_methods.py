"""The methods, each against a second implementation in NumPy and closed forms.

All on a quadratic of five clients that differ, in double precision and with full batches:
grad_y g_i = A_i y - B_i x - c_i, grad_y f_i = C_i (y - t_i), grad_x f_i = D_i (x - s_i),
grad^2_yy g_i = A_i and grad^2_xy g_i v = -B_i' v.
"""

import importlib
import itertools

import jax
import numpy as np
import pytest

from simfbo import Point, SimulatedFederation, checks
from simfbo.algorithms import aggitd, fedbio, fednest, lfednest, memfbo, shrofbo, simfbo
from simfbo.core.federation import View
from simfbo.core.local_work import fixed
from simfbo.core.sampling import Cohort
from simfbo.engines import CountingFederation
from simfbo.tasks import random_quadratic

TAUS = [1, 2, 3, 5, 9]
WEIGHTS = np.arange(1, 6) / 15
Q = random_quadratic(5, 3, 4, seed=1)
TASK = Q.task(np.arange(1, 6))
TRUTH = Q.closed_form(WEIGHTS)
STEPS = Point(x=0.1, y=0.2, v=0.15)
OTHER = Point(x=0.04, y=0.3, v=0.07)  # after STEPS, with nothing left to compile
RNG = np.random.default_rng(0)
START = Point(RNG.normal(size=3), RNG.normal(size=4), RNG.normal(size=4))
KEY = jax.random.key(3)
FEDNEST, AGGITD = (
    importlib.import_module(f"simfbo.algorithms._{name}") for name in ("fednest", "aggitd")
)


def g_y(i, x, y):
    return Q.A[i] @ y - Q.B[i] @ x - Q.c[i]


def f_y(i, x, y):
    return Q.C[i] @ (y - Q.t[i])


def f_x(i, x, y):
    return Q.D[i] @ (x - Q.s[i])


def mean(values):
    """Return the weighted sum over clients."""
    return sum(w * value for w, value in zip(WEIGHTS, values, strict=True))


def svrg(z, gradient, average, step):
    """Return z after one round of variance-reduced local steps by everyone."""
    ends = []
    for i, tau in enumerate(TAUS):
        own = z
        for _ in range(tau):
            own = own - step / tau * (gradient(i, own) - gradient(i, z) + average)
        ends.append(own - z)
    return z + mean(ends)


def fed_inn(x, y, steps=STEPS):
    q = mean(g_y(i, x, y) for i in range(5))
    return svrg(y, lambda i, y: g_y(i, x, y), q, steps.y)


def fed_out(x, y, v, steps=STEPS):
    h = mean(f_x(i, x, y) + Q.B[i].T @ v for i in range(5))
    return svrg(x, lambda i, x: f_x(i, x, y), h, steps.x)


both = pytest.mark.parametrize("steps", [STEPS, OTHER], ids=["steps", "other steps"])


UNEQUAL = SimulatedFederation(TASK.data, local_work=fixed(TAUS))


def once(algorithm, state=START, federation=UNEQUAL):
    """Return the state after one iteration."""
    return algorithm.round(jax.tree.map(np.asarray, state), federation, KEY)


def alike(state, *expected):
    state = getattr(state, "base", state)
    for got, want in zip((state.x, state.y, getattr(state, "v", None)), expected, strict=False):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


# SimFBO and ShroFBO


@both
@pytest.mark.parametrize("factory", [simfbo, shrofbo])
def test_simfbo_and_shrofbo_are_their_equations(factory, steps):
    """With server steps of their own; ShroFBO divides by tau_i and multiplies by rho."""
    gamma, sums = Point(x=0.3 * steps.x, y=0.7 * steps.y, v=0.5 * steps.v), []
    for i, tau in enumerate(TAUS):
        (x, y, v), q = START, np.zeros(11)
        for _ in range(tau):
            d_x, d_v = f_x(i, x, y) + Q.B[i].T @ v, Q.A[i] @ v - f_y(i, x, y)
            d = np.concatenate([d_x, g_y(i, x, y), d_v])
            x, y, v = np.split(np.concatenate([x, y, v]) - np.repeat(steps, [3, 4, 4]) * d, [3, 7])
            q = q + d
        sums.append(q if factory is simfbo else q / tau)
    total = mean(sums) * (1 if factory is simfbo else WEIGHTS @ TAUS)
    algorithm = factory(TASK.problem, steps, gamma)
    start = algorithm.init(*START[:2])
    leaves, structure = jax.tree.flatten(start)
    state = once(algorithm, jax.tree.unflatten(structure, [*START, *leaves[3:]]))
    expected = np.concatenate(START) - np.repeat(gamma, [3, 4, 4]) * total
    alike(state, *np.split(expected, [3, 7]))


# FedNest


@both
def test_fednest_is_its_equations(steps):
    x, y, _ = START
    for _ in range(3):
        y = fed_inn(x, y, steps)
    term = total = mean(f_y(i, x, y) for i in range(5))
    for _ in range(4):
        term = term - steps.v * mean(Q.A[i] @ term for i in range(5))
        total = total + term
    v = steps.v * total
    alike(once(fednest(TASK.problem, steps, 3, 4)), fed_out(x, y, v, steps), y, v)


@pytest.mark.parametrize("factory", [fednest, lfednest, aggitd])
def test_the_step_of_y_is_unbiased_over_all_cohorts(factory):
    """With one local step and one lower round, over all pairs of clients that weigh differently."""
    algorithm = factory(TASK.problem, STEPS, 1)
    state, pairs = algorithm.init(*START[:2]), list(itertools.combinations(range(5), 2))
    drawn: list = []
    federation = SimulatedFederation(
        TASK.data, lambda key, p: Cohort(ids := np.array(drawn[-1]), p[ids] * 5 / 2)
    )

    counting = CountingFederation(TASK.data)

    def sums(client_step, *call):
        computed = client_step.__name__.startswith("lower")  # all else does not enter y
        return (federation if computed else counting).sum(client_step, *call)

    def after(ids):
        drawn.append(ids)
        return algorithm.round(state, View(federation, sums, counting.gather), KEY).y

    slope = mean(g_y(i, *START[:2]) for i in range(5))
    found = np.mean([after(pair) for pair in pairs], axis=0)
    np.testing.assert_allclose(found, START.y - STEPS.y * slope, rtol=1e-12)


def released_v(x, y, steps, terms):
    """Return v of the published series."""
    first = total = mean(f_y(i, x, y) for i in range(5))
    for j in range(1, terms + 1):
        powers = [np.linalg.matrix_power(np.eye(4) - steps.x * Q.A[i], j) for i in range(5)]
        total = total + mean(power @ first for power in powers) / j
    return steps.x * total


@both
def test_fednest_as_released_is_its_formula(steps):
    x, y = START.x, fed_inn(START.x, START.y, steps)
    v = released_v(x, y, steps, 4)
    released = fednest(TASK.problem, steps, 1, 4, mode="as_released")
    alike(once(released), fed_out(x, y, v, steps), y, v)


def test_fednest_as_released_answers_from_all_samples():
    """Samples scatter around the clients' own coefficients: a minibatch of one would show it."""
    noisy = Q.task(np.arange(1, 6), samples=4, noise=1.0, batch_size=1)
    steps = fednest(noisy.problem, STEPS, mode="as_released").client_steps
    ask = [steps[name] for name in ("lower_grad", "upper_grad_y", "hessian_product", "hypergrad")]

    def answers(payload, client):
        """Return what all oracles answer: one program for four."""
        sent = [payload[:2], payload[:2], payload, payload]
        return [step(at, client) for step, at in zip(ask, sent, strict=True)]

    federation, (x, y, p) = SimulatedFederation(noisy.data), START
    found = federation.gather(answers, tuple(START), federation.cohort(KEY), KEY)
    for i in range(5):
        exact = [g_y(i, x, y), f_y(i, x, y), Q.A[i] @ p, f_x(i, x, y) + Q.B[i].T @ p]
        for (answer,), expected in zip(map(jax.tree.leaves, found), exact, strict=True):
            np.testing.assert_allclose(answer[i], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mode", "low", "high"), [("paper", 0, 1e-8), ("as_released", 0.2, 1)])
def test_the_true_series_converges_and_the_released_one_does_not(mode, low, high):
    steps = Point(x=0.3, y=1e-30, v=0.3)
    state = Point(START.x, TRUTH.y(START.x), START.v)
    v = once(fednest(TASK.problem, steps, 1, 60, mode), state).v
    error = np.linalg.norm(v - TRUTH.v(START.x)) / np.linalg.norm(TRUTH.v(START.x))
    assert low <= error <= high


def test_drawn_terms_have_the_mean_of_the_series(monkeypatch):
    algorithm, vs = fednest(TASK.problem, STEPS, 1, 6, drawn=True), []
    for terms in range(6):
        monkeypatch.setattr(FEDNEST, "draw_terms", lambda key, count, terms=terms: terms)
        vs.append(once(algorithm).v)
    summed = once(fednest(TASK.problem, STEPS, 1, 5)).v
    np.testing.assert_allclose(np.mean(vs, axis=0), summed, rtol=1e-12)


def test_one_upper_step_ignores_tau():
    state = once(fednest(TASK.problem, STEPS, one_upper_step=True))
    h = mean(f_x(i, START.x, state.y) + Q.B[i].T @ state.v for i in range(5))
    np.testing.assert_allclose(state.x, START.x - STEPS.x * h, rtol=1e-12)
    assert np.abs(state.x - fed_out(START.x, state.y, state.v)).max() > 1e-3


# LFedNest


@both
def test_lfednest_is_its_equations(steps):
    x, y = START.x, START.y
    for _ in range(2):
        ends = []
        for i, tau in enumerate(TAUS):
            own = y
            for _ in range(tau):
                own = own - steps.y / tau * g_y(i, x, own)
            ends.append(own - y)
        y = y + mean(ends)
    changes = []
    for i, tau in enumerate(TAUS):
        own = x
        for _ in range(tau):
            term = total = f_y(i, own, y)
            for _ in range(3):
                term = term - steps.v * Q.A[i] @ term
                total = total + term
            own = own - steps.x / tau * (f_x(i, own, y) + Q.B[i].T @ (steps.v * total))
        changes.append(own - x)
    alike(once(lfednest(TASK.problem, steps, 2, 3), START[:2]), x + mean(changes), y)


def test_lfednest_ends_where_the_mean_of_own_hypergradients_vanishes(affine):
    def biased(x):
        y = TRUTH.y(x)
        own = (f_x(i, x, y) + Q.B[i].T @ np.linalg.solve(Q.A[i], f_y(i, x, y)) for i in range(5))
        return mean(own)

    offset = biased(np.zeros(3))
    slope = np.stack([biased(e) - offset for e in np.eye(3)], axis=1)
    wrong = np.linalg.solve(slope, -offset)
    algorithm = lfednest(TASK.problem, STEPS._replace(v=0.25), 3, 60)
    walk = affine(algorithm, SimulatedFederation(TASK.data), TASK.x0, TASK.y0, variables=2)
    assert walk.rate < 0.98
    np.testing.assert_allclose(walk.fixed_point, [*wrong, *TRUTH.y(wrong)], atol=1e-5)
    assert np.linalg.norm(TRUTH.x() - wrong) > 0.1


# FBO-AggITD


@both
def test_aggitd_is_its_equations(steps, monkeypatch):
    algorithm = aggitd(TASK.problem, steps, 4)
    for first in range(4):
        monkeypatch.setattr(AGGITD, "draw_terms", lambda key, count, first=first: first)
        x, y, z = START
        for t in range(4):
            if t == first:
                z = mean(f_y(i, x, y) for i in range(5))
            elif t > first:
                z = z - steps.v * mean(Q.A[i] @ z for i in range(5))
            y = fed_inn(x, y, steps)
        v = steps.v * 4 * z
        alike(once(algorithm), fed_out(x, y, v, steps), y, v)


@pytest.mark.parametrize("K", [2, 7])
def test_aggitd_error_falls_as_it_should(K, monkeypatch):
    """At y*(x) the mean over Q is the series of K terms, whose error is (I - lambda A)^K v*."""
    state, best = Point(START.x, TRUTH.y(START.x), START.v), TRUTH.v(START.x)
    algorithm, vs = aggitd(TASK.problem, STEPS, K), []
    for first in range(K):
        monkeypatch.setattr(AGGITD, "draw_terms", lambda key, count, first=first: first)
        vs.append(once(algorithm, state).v)
    gap = np.mean(vs, axis=0) - best
    exact = np.linalg.matrix_power(np.eye(4) - STEPS.v * TRUTH.A, K) @ best
    np.testing.assert_allclose(gap, -exact, rtol=1e-10, atol=1e-12)
    slowest = 1 - STEPS.v * np.linalg.eigvalsh(TRUTH.A).min()
    assert np.linalg.norm(gap) <= slowest**K * np.linalg.norm(best)


# FedBiO


@both
def test_fedbio_is_its_equations_with_a_projection_that_acts(steps):
    changes, acted = [], False
    for i, tau in enumerate(TAUS):
        x, y, v = START
        for _ in range(tau):
            d_x, d_v = f_x(i, x, y) + Q.B[i].T @ v, Q.A[i] @ v - f_y(i, x, y)
            x, y, v = x - steps.x * d_x, y - steps.y * g_y(i, x, y), v - steps.v * d_v
            acted |= bool(np.linalg.norm(v) > 1.3)
            v = v * min(1, 1.2 / np.linalg.norm(v))
        changes.append((x - START.x, y - START.y, v - START.v))
    expected = [z + mean(part) for z, part in zip(START, zip(*changes), strict=True)]
    alike(once(fedbio(TASK.problem, steps, radius=1.2)), *expected)
    assert acted


def test_fedbio_with_one_local_step_is_soba():
    soba = checks.SINGLE_LOOP_LAWS[0]
    assert soba.name == "centralised SOBA"
    assert checks.examine(lambda problem, local, server: fedbio(problem, server), soba).passed


# MemFBO


def penalised(x, penalty):
    """Return y*(x), the minimiser of f + lambda g over y, and MemFBO's direction of x there."""
    y = TRUTH.y(x)
    left, right = TRUTH.C / penalty + TRUTH.A, TRUTH.Ct / penalty + TRUTH.B @ x + TRUTH.c
    u = np.linalg.solve(left, right)
    return y, u, TRUTH.D @ x - TRUTH.Ds - penalty * TRUTH.B.T @ (u - y)


def test_memfbo_stays_at_the_minimisers_and_moves_x_along_the_penalised_direction():
    penalty = 320.0
    y, u, d_x = penalised(START.x, penalty)
    algorithm = memfbo(TASK.problem, STEPS, penalty=penalty)
    state = algorithm.init(START.x, y)
    state = state._replace(base=state.base._replace(v=u))
    after = algorithm.round(state, SimulatedFederation(TASK.data), KEY)
    np.testing.assert_allclose(after.base.y, y, atol=1e-12)
    np.testing.assert_allclose(after.base.v, u, atol=1e-12)
    np.testing.assert_allclose(START.x - after.base.x, STEPS.x * d_x, rtol=1e-10)


def test_memfbo_hypergradient_error_falls_as_one_over_lambda():
    exact, penalties = TRUTH.hypergradient(START.x), 20 * 2.0 ** np.arange(5)
    errors = [np.linalg.norm(penalised(START.x, penalty)[2] - exact) for penalty in penalties]
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    np.testing.assert_allclose(ratios, 2, atol=0.15)
    assert ratios[-1] == pytest.approx(2, abs=0.02)


@both
def test_memfbo_is_its_equations(steps):
    algorithm, penalty = memfbo(TASK.problem, steps, penalty=20.0), 20.0
    sums = []
    for i, tau in enumerate(TAUS):
        x, y, u, moved = *START[:2], START.y, np.zeros(11)
        for _ in range(tau):
            d_u = f_y(i, x, u) / penalty + g_y(i, x, u)
            d_x = f_x(i, x, u) - penalty * Q.B[i].T @ (u - y)
            d = steps.x * d_x, steps.y * g_y(i, x, y), steps.y * d_u
            x, y, u = x - d[0], y - d[1], u - d[2]
            moved = moved - np.concatenate(d)
        sums.append(moved)
    x, y, u = np.split(np.concatenate([*START[:2], START.y]) + mean(sums), [3, 7])
    state = algorithm.round(algorithm.init(*START[:2]), UNEQUAL, KEY)
    np.testing.assert_allclose(state.base.x, x, rtol=1e-10)
    np.testing.assert_allclose(state.base.y, y, rtol=1e-12)
    np.testing.assert_allclose(state.base.v, u, rtol=1e-12)


def central(x, penalty):
    """Return u- and u+, the minimisers of g -+ f / lambda, and the direction of x there."""
    left, right = TRUTH.C / penalty, TRUTH.Ct / penalty
    minus, plus = (
        np.linalg.solve(TRUTH.A + s * left, TRUTH.B @ x + TRUTH.c + s * right) for s in (-1, 1)
    )
    d_x = TRUTH.D @ x - TRUTH.Ds - penalty / 2 * TRUTH.B.T @ (plus - minus)
    return minus, plus, d_x


def test_memfbo_of_order_2_stays_at_the_minimisers_and_moves_x_along_the_central_difference():
    minus, plus, d_x = central(START.x, 80.0)
    algorithm = memfbo(TASK.problem, STEPS, penalty=80.0, order=2)
    state = algorithm.init(START.x, minus)
    np.testing.assert_array_equal(state.base.y, state.base.v)
    state = state._replace(base=state.base._replace(v=plus))
    np.testing.assert_allclose(algorithm.point(state).y, (minus + plus) / 2, rtol=1e-14)
    after = algorithm.round(state, SimulatedFederation(TASK.data), KEY).base
    np.testing.assert_allclose((after.y, after.v), (minus, plus), atol=1e-12)
    np.testing.assert_allclose(START.x - after.x, STEPS.x * d_x, rtol=1e-10)


def test_memfbo_of_order_2_has_an_error_that_falls_fourfold_as_lambda_doubles():
    """That of the hypergradient, and that of y = (u+ + u-) / 2; order 1 halves the first."""
    exact, penalties = TRUTH.hypergradient(START.x), (10, 20, 40, 80)
    found = [central(START.x, penalty) for penalty in penalties]
    errors = {
        "order 1": [np.linalg.norm(penalised(START.x, one)[2] - exact) for one in penalties],
        "order 2": [np.linalg.norm(d_x - exact) for _, _, d_x in found],
        "y": [np.linalg.norm((minus + plus) / 2 - TRUTH.y(START.x)) for minus, plus, _ in found],
    }
    falls = {name: np.divide(one[:-1], one[1:]) for name, one in errors.items()}
    np.testing.assert_allclose(falls["order 1"], 2, atol=0.25)
    np.testing.assert_allclose(falls["order 2"], 4, atol=0.25)
    np.testing.assert_allclose(falls["y"], 4, atol=0.25)


@both
def test_memfbo_of_order_2_is_its_equations(steps):
    penalty, sums = 20.0, []
    for i, tau in enumerate(TAUS):
        x, minus, plus, moved = START.x, START.y, START.y, np.zeros(11)
        for _ in range(tau):
            d_x = (f_x(i, x, minus) + f_x(i, x, plus)) / 2
            d_x = d_x - penalty / 2 * Q.B[i].T @ (plus - minus)
            d_m = g_y(i, x, minus) - f_y(i, x, minus) / penalty
            d_p = g_y(i, x, plus) + f_y(i, x, plus) / penalty
            d = steps.x * d_x, steps.y * d_m, steps.y * d_p
            x, minus, plus = x - d[0], minus - d[1], plus - d[2]
            moved = moved - np.concatenate(d)
        sums.append(moved)
    x, minus, plus = np.split(np.concatenate([START.x, START.y, START.y]) + mean(sums), [3, 7])
    algorithm = memfbo(TASK.problem, steps, penalty=penalty, order=2)
    state = algorithm.round(algorithm.init(*START[:2]), UNEQUAL, KEY)
    alike(state, x, minus, plus)
    assert algorithm.point(state).v is None


def test_memfbo_moves_y_and_u_alike_and_has_no_v():
    steps = Point(x=0.05, y=0.1, v=99.0)
    algorithm = memfbo(TASK.problem, steps, penalty=320.0)
    state = algorithm.init(*START[:2])
    np.testing.assert_array_equal(state.base.v, state.base.y)
    assert algorithm.point(state).v is None
    after = algorithm.round(state, SimulatedFederation(TASK.data), KEY).base
    slope = mean(g_y(i, *START[:2]) for i in range(5))
    pull = mean(f_y(i, *START[:2]) for i in range(5)) / 320
    np.testing.assert_allclose(after.y, START.y - 0.1 * slope, rtol=1e-12)
    np.testing.assert_allclose(after.v, START.y - 0.1 * (slope + pull), rtol=1e-12)
