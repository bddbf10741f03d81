"""Compiled programs: what shares one, what needs one of its own, and when it is let go."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import Gate, PerClient, Point, SimulatedFederation
from simfbo.core.data import from_clients
from simfbo.core.local_work import constant, effective, fixed, momentum, proximal, sgd
from simfbo.core.sampling import without_replacement
from simfbo.engines.compile_cache import PROGRAMS, ProgramCache

KEY = jax.random.key(0)
ETA = Point(0.1, 0.2, 0.3)


def clients(*numbers, rows=2, **options):
    parts = [np.full((rows, 2), float(number)) for number in numbers]
    return from_clients(parts, parts, **options)


def new_step():
    def step(payload, client):
        sample = client.data.lower_batch(client.key)[0]
        return Point(y=(payload + client.eta.y * sample) * client.plan.norm)

    return step


def ask(federation, step, payload=1.0, eta=ETA, key=KEY):
    payload = jnp.full(2, payload)
    return np.asarray(federation.sum(step, payload, federation.cohort(key), key, eta).y)


class Compilations:
    """How often client steps were compiled since this was made."""

    def __init__(self):
        self.before = len(PROGRAMS.compiled)

    @property
    def names(self):
        return PROGRAMS.compiled[self.before :]


@pytest.fixture
def made():
    return Compilations()


def test_one_federations_programs_serve_others_of_the_same_shapes(made):
    """Other data, weights, step sizes, payloads, keys, local steps, absences: the same program."""
    step = new_step()
    one = SimulatedFederation(clients(1, 2, 3), local_work=fixed([1, 2, 4]))
    np.testing.assert_allclose(ask(one, step), (1.2 + 2 * 1.4 + 4 * 1.6) / 3, rtol=1e-14)
    assert made.names == ["step"]
    other = SimulatedFederation(
        clients(5, 6, 8, p=[1, 1, 2]),
        local_work=fixed([4, 1, 1]),
        absence=lambda key, ids: ids == 0,
    )
    found = ask(other, step, 2.0, Point(0.0, 0.5, 0.0), jax.random.key(1))
    np.testing.assert_allclose(found, (5 / 4 + 6 / 2) * 3 / 2, rtol=1e-14)
    assert made.names == ["step"]


def test_one_program_serves_clients_with_any_local_rules(made):
    step, rules = new_step(), [sgd(), momentum(0.5), proximal(0.5)]
    for given in (rules, rules[::-1], [momentum(0.9), proximal(0.1), proximal(0.2)]):
        federation = SimulatedFederation(clients(1, 2, 3), local_work=constant(2, given))
        norms = [effective(rule, 2).sum() for rule in given]
        expected = np.mean(norms * (1 + 0.2 * np.arange(1, 4)))
        np.testing.assert_allclose(ask(federation, step), expected, rtol=1e-14)
    assert made.names == ["step"]


def test_two_client_steps_have_two_programs(made):
    federation = SimulatedFederation(clients(1, 2, 3))
    for _ in range(2):
        ask(federation, new_step())
    assert made.names == ["step", "step"]


def test_what_the_program_depends_on_needs_one_of_its_own(made):
    """Everything below differs from the first federation in one thing, which decides a shape."""
    step, data = new_step(), clients(1, 2, 3)
    variants = [
        {},
        {"data": clients(1, 2, 3, 4)},
        {"data": clients(1, 2, 3, rows=3)},
        {"data": clients(1, 2, 3, batch_size=1)},
        {"sampler": without_replacement(2)},
        {"local_work": constant(2)},
        {"local_work": constant(1, momentum(0.5))},
        {"gate": Gate(open=True)},
    ]
    federations = [SimulatedFederation(**{"data": data, **variant}) for variant in variants]
    for count, federation in enumerate(federations, 1):
        ask(federation, step)
        assert len(made.names) == count
    everyone = federations[0]
    everyone.gather(step, jnp.ones(2), everyone.cohort(KEY), KEY, ETA)
    everyone.sum(step, PerClient(jnp.ones((3, 2))), everyone.cohort(KEY), KEY, ETA)
    assert len(made.names) == len(variants) + 2
    for federation in federations:
        ask(federation, step)
    assert len(made.names) == len(variants) + 2


def test_new_data_of_the_same_federation_are_used(made):
    """A federation may be given other data, of the same shapes or not."""
    step, federation = new_step(), SimulatedFederation(clients(1, 2, 3))
    first = ask(federation, step)
    federation.data = clients(7, 8, 9)
    np.testing.assert_allclose(ask(federation, step) - first, 0.2 * 6, rtol=1e-12)
    assert len(made.names) == 1
    federation.data = clients(7, 8, 9, rows=1)
    np.testing.assert_allclose(ask(federation, step) - first, 0.2 * 6, rtol=1e-12)
    assert len(made.names) == 2


def test_a_client_step_that_is_let_go_takes_its_programs_with_it():
    step, federation = new_step(), SimulatedFederation(clients(1, 2, 3))
    ask(federation, step)
    (program,) = PROGRAMS._programs[step].values()
    gone, program = weakref.ref(step), weakref.ref(program)
    del step, federation
    gc.collect()
    assert gone() is None
    assert program() is None


def test_programs_are_built_once_for_each_form():
    cache, step, built = ProgramCache(), new_step(), []

    def build():
        built.append(len(built))
        return lambda: built[-1]

    first = cache.get(step, "a", build)
    assert cache.get(step, "a", build) is first
    assert cache.get(step, "b", build) is not first
    assert cache.get(new_step(), "a", build) is not first
    assert built == [0, 1, 2]
    assert cache.compiled == ["step"] * 3
