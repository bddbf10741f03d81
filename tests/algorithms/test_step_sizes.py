"""Step sizes are inputs: other ones compile nothing, and count as if they were the first."""

import jax
import jax.monitoring
import numpy as np
import pytest

from simfbo import BilevelProblem, Ledger, Point, SimulatedFederation, algorithms, cost
from simfbo.algorithms import _common
from simfbo.core.local_work import fixed
from simfbo.engines.base import PROGRAMS
from simfbo.tasks import random_quadratic

TASK = random_quadratic(3, 2, 2, seed=1).task()
ONE, OTHER = Point(x=0.1, y=0.2, v=0.15), Point(x=0.03, y=0.3, v=0.05)
GAMMA = Point(x=0.07, y=0.11, v=0.13)
METHODS = {
    "simfbo": lambda problem, steps: algorithms.simfbo(problem, steps),
    "shrofbo": lambda problem, steps: algorithms.shrofbo(problem, steps),
    "memfbo": lambda problem, steps: algorithms.memfbo(problem, steps, penalty=10.0),
    "memfbo, order 2": lambda problem, steps: algorithms.memfbo(problem, steps, order=2),
    "fedmsa": lambda problem, steps: algorithms.fedmsa(problem, steps, radius=5.0),
    "fedbioacc": lambda problem, steps: algorithms.fedbioacc(problem, steps, radius=5.0),
    "fednest": lambda problem, steps: algorithms.fednest(problem, steps, 1, 2),
    "lfednest": lambda problem, steps: algorithms.lfednest(problem, steps, 1, 2),
    "aggitd": lambda problem, steps: algorithms.aggitd(problem, steps, 2),
    "fedbio": lambda problem, steps: algorithms.fedbio(problem, steps, radius=5.0),
    "fedmbo": lambda problem, steps: algorithms.fedmbo(problem, steps, 1, 2),
}
CLIENT_STEPS = {"fednest": 6, "lfednest": 2, "aggitd": 7, "fedmbo": 4, "fedmsa": 2}  # where not one


def new_problem():
    """Return the same losses as objects of their own, so that nothing is shared."""
    upper, lower = TASK.problem.upper, TASK.problem.lower
    return BilevelProblem(lambda *args: upper(*args), lambda *args: lower(*args))


@pytest.fixture
def compilations():
    """Return a list to which every compilation of anything adds an entry."""
    found = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def after(algorithm, rounds=2):
    """Return the variables after some rounds in which clients work unequally."""
    federation = SimulatedFederation(TASK.data, local_work=fixed([1, 2, 3]))
    state = algorithm.init(TASK.x0 + 1.0, TASK.y0 - 1.0)
    for key in jax.random.split(jax.random.key(0), rounds):
        state = algorithm.round(state, federation, key)
    return np.concatenate([z for z in algorithm.point(state) if z is not None])


@pytest.mark.parametrize("name", METHODS)
def test_other_step_sizes_compile_nothing(name, compilations):
    """tests/algorithms/test_methods.py compares what they compute with NumPy, both times."""
    build, problem = METHODS[name], new_problem()
    before = len(PROGRAMS.compiled)
    one = after(build(problem, ONE))
    # Not every client step occurs in two rounds: how long a series is, is drawn.
    first = len(PROGRAMS.compiled) - before
    assert 0 < first <= CLIENT_STEPS.get(name, 1)
    compilations.clear()
    other = after(build(problem, OTHER))
    assert len(PROGRAMS.compiled) - before == first
    assert compilations == []
    np.testing.assert_array_equal(after(build(problem, ONE)), one)
    assert np.abs(other - one).max() > 1e-2
    if name in ("simfbo", "fedbio"):  # and with a problem that saw no other step sizes
        np.testing.assert_array_equal(other, after(build(new_problem(), OTHER)))


@pytest.mark.parametrize("name", METHODS)
def test_client_steps_are_those_of_the_problem_whatever_the_step_sizes(name):
    build, problem = METHODS[name], new_problem()
    one, other, apart = (
        list(map(jax.tree.structure, build(losses, steps).client_steps.values()))
        for losses, steps in ((problem, ONE), (problem, OTHER), (new_problem(), ONE))
    )
    assert len(one) == CLIENT_STEPS.get(name, 1)
    assert one == other
    assert not any(a == b for a, b in zip(one, apart, strict=True))


@pytest.mark.parametrize("factory", [algorithms.simfbo, algorithms.shrofbo, algorithms.memfbo])
def test_the_servers_step_sizes_compile_nothing_either(factory, compilations):
    """Two rounds along the same directions, so that x after the first is what gamma makes it."""
    start = after(factory(TASK.problem, ONE, GAMMA), 0)[:2]
    one = after(factory(TASK.problem, ONE, GAMMA), 1)[:2]
    after(factory(TASK.problem, ONE, GAMMA))
    size = _common._advance._cache_size()
    compilations.clear()
    double = factory(TASK.problem, ONE, GAMMA._replace(x=2 * GAMMA.x))
    np.testing.assert_allclose(after(double, 1)[:2] - start, 2 * (one - start), rtol=1e-12)
    after(double)
    assert compilations == []
    assert _common._advance._cache_size() == size


def test_fedavg_and_its_servers_step_compile_once(compilations):
    problem = new_problem()
    ends = [after(algorithms.fedavg(problem, 0.1, gamma)) for gamma in (0.1, 0.2)]
    compilations.clear()
    ends.append(after(algorithms.fedavg(problem, 0.3, 0.4)))
    assert compilations == []
    assert len({tuple(end.tolist()) for end in ends}) == 3


class Unhashable:
    """A loss that no dictionary takes as a key."""

    __hash__ = None

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, x, y, batch):
        return self.loss(x, y, batch)


@pytest.mark.parametrize("name", METHODS)
def test_problems_that_cannot_be_hashed_can_be_used(name):
    """Through the engine that only counts, which traces every client step."""
    problem = BilevelProblem(*map(Unhashable, TASK.problem))
    with pytest.raises(TypeError, match="unhashable"):
        hash(problem)
    federation = SimulatedFederation(TASK.data)
    ledgers = [
        cost(METHODS[name](losses, ONE), federation, TASK.x0, TASK.y0)
        for losses in (problem, TASK.problem)
    ]
    assert ledgers[0] == ledgers[1] != Ledger()


@pytest.mark.parametrize("name", ["simfbo", "lfednest"])
def test_problems_that_cannot_be_hashed_compile_each_client_step_once(name):
    algorithm = METHODS[name](BilevelProblem(*map(Unhashable, TASK.problem)), ONE)
    before = len(PROGRAMS.compiled)
    found = after(algorithm)
    names = PROGRAMS.compiled[before:]
    assert 0 < len(names) == len(set(names)) <= CLIENT_STEPS.get(name, 1)
    np.testing.assert_array_equal(found, after(METHODS[name](TASK.problem, ONE)))
