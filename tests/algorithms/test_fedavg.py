"""FedAvg against gradient descent, a loop in NumPy and the closed form of y*(x)."""

import jax
import numpy as np
import optax
import pytest

from simfbo import Ledger, SimulatedFederation, run
from simfbo.algorithms import fedavg
from simfbo.core.local_work import constant, fixed, proximal
from simfbo.core.sampling import without_replacement
from simfbo.tasks import random_quadratic

P, TAUS = np.array([0.1, 0.2, 0.3, 0.4]), [1, 2, 3, 5]
Q = random_quadratic(4, 3, 5, seed=2)
TASK = Q.task(P)
TRUTH = Q.closed_form(P)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=3), RNG.normal(size=5)
KEY = jax.random.key(1)
ETA = 0.15
SAME = fedavg(TASK.problem, ETA)  # shared, so that it compiles once


@pytest.fixture(scope="module")
def plain():
    return SimulatedFederation(TASK.data)


@pytest.fixture(scope="module")
def unequal():
    return SimulatedFederation(TASK.data, local_work=fixed(TAUS))


def g_y(i, y, x=X):
    return Q.A[i] @ y - Q.B[i] @ x - Q.c[i]


def after(algorithm, federation, rounds, x=X, y=Y):
    state = algorithm.init(x, y)
    for key in jax.random.split(KEY, rounds):
        state = algorithm.round(state, federation, key)
    return state


def local_sums(y, taus, eta, clients=range(4)):
    """Return every client's sum of gradients over its own path."""
    sums = []
    for i in clients:
        own, total = y, np.zeros(5)
        for _ in range(taus[i]):
            gradient = g_y(i, own)
            own, total = own - eta * gradient, total + gradient
        sums.append(total)
    return sums


def test_one_step_by_everyone_is_gradient_descent_on_the_pooled_loss(plain):
    y = Y
    for _ in range(10):
        y = y - ETA * (TRUTH.A @ y - TRUTH.B @ X - TRUTH.c)
    state = after(SAME, plain, 10)
    np.testing.assert_allclose(state.y, y, rtol=1e-12, atol=1e-12)


def test_local_steps_are_a_loop(unequal):
    y = Y
    for _ in range(4):
        y = y - ETA * P @ local_sums(y, TAUS, ETA)
    state = after(SAME, unequal, 4)
    np.testing.assert_allclose(state.y, y, rtol=1e-12, atol=1e-12)


def test_the_same_step_on_both_sides_averages_models(unequal):
    """y is the weighted mean of where the clients arrived."""
    sums = local_sums(Y, TAUS, ETA)
    models = [Y - ETA * total for total in sums]
    state = after(SAME, unequal, 1)
    np.testing.assert_allclose(state.y, P @ np.stack(models), rtol=1e-12)


def test_the_server_has_a_step_of_its_own(unequal):
    state = after(fedavg(TASK.problem, ETA, 0.02), unequal, 1)
    np.testing.assert_allclose(state.y, Y - 0.02 * P @ local_sums(Y, TAUS, ETA), rtol=1e-12)


def test_the_server_may_have_momentum(unequal):
    y, speed = Y, np.zeros(5)
    for _ in range(3):
        speed = 0.5 * speed + P @ local_sums(y, TAUS, 0.1)
        y = y - 0.05 * speed
    state = after(fedavg(TASK.problem, 0.1, optax.sgd(0.05, momentum=0.5)), unequal, 3)
    np.testing.assert_allclose(state.y, y, rtol=1e-12)


def test_cohorts_weigh_as_they_were_drawn():
    federation = SimulatedFederation(TASK.data, without_replacement(2))
    ids, weights = federation.cohort(KEY)
    got = SAME.round(SAME.init(X, Y), federation, KEY)
    change = sum(w * g_y(i, Y) for i, w in zip(ids, weights, strict=True))
    np.testing.assert_allclose(got.y, Y - ETA * change, rtol=1e-12)


def test_it_finds_the_solution_of_the_lower_problem_and_leaves_x(plain):
    gap = np.linalg.norm(Y - TRUTH.y(X))
    state = after(SAME, plain, 40)
    slowest = 1 - ETA * np.linalg.eigvalsh(TRUTH.A).min()
    assert np.linalg.norm(state.y - TRUTH.y(X)) <= slowest**40 * gap < 1e-3
    np.testing.assert_array_equal(state.x, X)


def test_local_steps_end_elsewhere_the_farther_the_longer_they_are():
    """With tau = 3 the fixed point is that of sum p_i [I - (I - eta A_i)^3] A_i^-1 grad g_i."""
    federation, distances = SimulatedFederation(TASK.data, local_work=constant(3)), []
    for eta in (0.3, 0.05):
        reach = [np.eye(5) - np.linalg.matrix_power(np.eye(5) - eta * A, 3) for A in Q.A]
        left = sum(p * R for p, R in zip(P, reach, strict=True))
        right = sum(
            P[i] * reach[i] @ np.linalg.solve(Q.A[i], Q.B[i] @ X + Q.c[i]) for i in range(4)
        )
        fixed_point = np.linalg.solve(left, right)
        state = after(fedavg(TASK.problem, eta), federation, 1, y=fixed_point)
        np.testing.assert_allclose(state.y, fixed_point, atol=1e-12)
        distances.append(np.linalg.norm(fixed_point - TRUTH.y(X)))
    assert distances[0] > 2 * distances[1] > 0.01


def test_a_proximal_term_is_the_local_rule():
    federation = SimulatedFederation(TASK.data, local_work=constant(2, proximal(0.25)))
    state = after(SAME, federation, 1)
    sums = [
        0.75 * g_y(i, Y) + g_y(i, Y - ETA * g_y(i, Y)) for i in range(4)
    ]  # q = keep * d_0 + d_1
    np.testing.assert_allclose(state.y, Y - ETA * P @ np.stack(sums), rtol=1e-12)


def test_what_it_sends(plain):
    """x and y to every client, a direction of y back: in every round."""
    plain.ledger = Ledger()
    history = run(SAME, plain, X, Y, rounds=3, every=3)
    total = plain.ledger.total
    assert total[:5] == (3, 3 * 4 * (3 + 5), 3 * 4 * 5, 3 * 4 * 8 * 8, 3 * 4 * 5 * 8)
    assert set(plain.ledger.by_step) == {"fedavg_step"}
    assert history.state.x.tolist() == X.tolist()
    assert history.state.v is None
