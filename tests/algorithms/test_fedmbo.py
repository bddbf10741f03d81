"""FedMBO's chains over all draws, on a quadratic whose clients differ and weigh differently."""

import importlib
import itertools
from collections import Counter

import jax
import numpy as np
import pytest

from simfbo import Point, SimulatedFederation
from simfbo.algorithms import fedmbo
from simfbo.core.federation import View
from simfbo.core.sampling import Cohort, with_replacement
from simfbo.engines import CountingFederation
from simfbo.tasks import random_quadratic

N = 3
P = np.arange(1, N + 1) / 6
Q = random_quadratic(N, 3, 4, seed=1)
TASK = Q.task(P)
TRUTH = Q.closed_form(P)
STEPS = Point(x=0.1, y=0.2, v=0.15)
RNG = np.random.default_rng(0)
START = Point(RNG.normal(size=3), RNG.normal(size=4), RNG.normal(size=4))
KEY = jax.random.key(3)
FEDMBO = importlib.import_module("simfbo.algorithms._fedmbo")


def hypergradient_of_the_truncated_series(x, y, step, terms):
    slope = TRUTH.C @ y - TRUTH.Ct
    matrix = np.eye(4) - step * TRUTH.A
    v = step * sum(np.linalg.matrix_power(matrix, j) @ slope for j in range(terms))
    return TRUTH.D @ x - TRUTH.Ds + TRUTH.B.T @ v, v


def chains(size, hops, monkeypatch, terms=2, mode="paper"):
    """Return the mean of x's direction and of v over all draws of cohorts and orders."""
    steps = Point(x=1.0, y=1e-30, v=0.1)
    algorithm = fedmbo(TASK.problem, steps, 1, terms, mode)
    queue: list = []
    federation = SimulatedFederation(
        TASK.data, lambda key, p: Cohort(ids := np.array(queue.pop(0)), p[ids] * N / size)
    )
    orders: list = []

    def shuffle(stacked, key):
        return jax.tree.map(lambda a: a[np.array(orders.pop(0))], stacked)

    monkeypatch.setattr(FEDMBO, "draw_terms", lambda key, count: hops)
    monkeypatch.setattr(FEDMBO, "_shuffle", shuffle)
    cohorts = list(itertools.product(range(N), repeat=size))
    permutations = list(itertools.permutations(range(size)))
    found = []
    for drawn in itertools.product(cohorts, repeat=hops + 2):
        for turned in itertools.product(permutations, repeat=hops + 1):
            queue[:], orders[:] = [range(N)[:size], *drawn], list(turned)
            state = algorithm.round(Point(*START), federation, KEY)
            found.append((START.x - state.x, state.v))
    return [np.mean(part, axis=0) for part in zip(*found, strict=True)]


def test_fedmbo_chains_are_unbiased_over_all_draws(monkeypatch):
    means = [chains(1, hops, monkeypatch) for hops in (0, 1)]
    h, v = (np.mean(part, axis=0) for part in zip(*means, strict=True))
    expected = hypergradient_of_the_truncated_series(START.x, START.y, 0.1, 2)
    np.testing.assert_allclose(h, expected[0], rtol=1e-10)
    np.testing.assert_allclose(v, expected[1], rtol=1e-10)


def test_fedmbo_as_released_grows_its_chains(monkeypatch):
    _, v = chains(1, 1, monkeypatch, mode="as_released")
    slope = TRUTH.C @ START.y - TRUTH.Ct
    np.testing.assert_allclose(v, 0.2 * (2 * np.eye(4) - 0.1 * TRUTH.A) @ slope, rtol=1e-10)


def test_two_chains_side_by_side_are_unbiased_over_all_draws(monkeypatch):
    h, v = chains(2, 0, monkeypatch, terms=1)
    expected = hypergradient_of_the_truncated_series(START.x, START.y, 0.1, 1)
    np.testing.assert_allclose(h, expected[0], rtol=1e-10)
    np.testing.assert_allclose(v, expected[1], rtol=1e-10)


def test_every_exchange_of_an_iteration_draws_for_itself(monkeypatch):
    """Cohorts, messages and orders have keys of their own, on which the enumerations rest."""
    plain = SimulatedFederation(TASK.data, with_replacement(2))
    cohorts, exchanges, orders = [], [], []

    def sampler(key, p):
        cohorts.append(words(key))
        return with_replacement(2)(key, p)

    plain.sampler, shuffle = sampler, FEDMBO._shuffle

    def sums(*call):
        exchanges.append(words(call[3]))
        return plain.sum(*call)

    def gathers(*call):
        exchanges.append(words(call[3]))
        return plain.gather(*call)

    def spy(stacked, key):
        orders.append(words(key))
        return shuffle(stacked, key)

    monkeypatch.setattr(FEDMBO, "draw_terms", lambda key, count: 3)
    monkeypatch.setattr(FEDMBO, "_shuffle", spy)
    fedmbo(TASK.problem, STEPS, 2, 4).round(Point(*START), View(plain, sums, gathers), KEY)
    assert len(set(cohorts)) == 2 + 1 + 3 + 1  # K lower ones, the start, three products, the end
    assert cohorts == exchanges
    assert orders == [*exchanges[3:6], exchanges[6]]  # the order of a cohort is its own draw


def words(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_chains_are_dealt_uniformly():
    counts = Counter(
        tuple(np.asarray(FEDMBO._shuffle(np.arange(3), key)).tolist())
        for key in jax.random.split(KEY, 240)
    )
    assert len(counts) == 6
    assert max(abs(count - 40) for count in counts.values()) < 4 * np.sqrt(240 / 6 * 5 / 6)


@pytest.mark.slow
def test_fedmbo_as_drawn_is_unbiased_within_its_standard_error():
    steps = Point(x=1.0, y=1e-30, v=0.2)
    algorithm = fedmbo(TASK.problem, steps, 1, 3)
    federation = SimulatedFederation(TASK.data, with_replacement(3))
    keys = jax.random.split(KEY, 3000)
    moves = [START.x - algorithm.round(Point(*START), federation, key).x for key in keys]
    expected, _ = hypergradient_of_the_truncated_series(START.x, START.y, 0.2, 3)
    error = np.std(moves, axis=0, ddof=1) / np.sqrt(len(moves))
    assert np.abs((np.mean(moves, axis=0) - expected) / error).max() < 4
    assert error.max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("steps", [STEPS, Point(x=0.02, y=0.35, v=0.1)])
def test_fedmbo_lower_rounds_are_minibatch_sgd(steps):
    y = START.y
    for _ in range(3):
        y = y - steps.y * (TRUTH.A @ y - TRUTH.B @ START.x - TRUTH.c)
    federation, counting = SimulatedFederation(TASK.data), CountingFederation(TASK.data)

    def sums(client_step, *call):
        computed = client_step.__name__ == "lower_grad"  # all else does not enter y
        return (federation if computed else counting).sum(client_step, *call)

    algorithm = fedmbo(TASK.problem, steps, 3, 1)
    state = algorithm.round(Point(*START), View(federation, sums, counting.gather), KEY)
    np.testing.assert_allclose(state.y, y, rtol=1e-12)
