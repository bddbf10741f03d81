"""Compiled programs: what shares one, what needs one of its own, and how many are kept."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import Gate, PerClient, Point, SimulatedFederation
from simfbo.core.data import from_clients
from simfbo.core.local_work import constant, effective, fixed, momentum, proximal, sgd
from simfbo.core.sampling import without_replacement
from simfbo.engines.base import PROGRAMS, ProgramCache

KEY = jax.random.key(0)


def clients(*numbers, rows=2, **options):
    parts = [np.full((rows, 2), float(number)) for number in numbers]
    return from_clients(parts, parts, **options)


class Steps(eqx.Module):
    eta: float = 0.2
    name: str = eqx.field(static=True, default="")

    def step(self, payload, client):
        sample = client.data.lower_batch(client.key)[0]
        return Point(y=(payload + self.eta * sample) * client.plan.norm)


STEP = Steps().step


def ask(federation, step=STEP, payload=1.0, key=KEY):
    payload = jnp.full(2, payload)
    return np.asarray(federation.sum(step, payload, federation.cohort(key), key).y)


class Compilations:
    """How often client steps were compiled since this was made."""

    def __init__(self):
        self.before = len(PROGRAMS.compiled)

    @property
    def names(self):
        return PROGRAMS.compiled[self.before :]


@pytest.fixture
def made():
    PROGRAMS.clear()
    return Compilations()


def test_one_federations_programs_serve_others_of_the_same_shapes(made):
    """Other data, weights, step sizes, payloads, keys, local steps: the same program."""
    one = SimulatedFederation(clients(1, 2, 3), local_work=fixed([1, 2, 4]))
    np.testing.assert_allclose(ask(one), (1.2 + 2 * 1.4 + 4 * 1.6) / 3, rtol=1e-14)
    assert made.names == ["step"]
    other = SimulatedFederation(
        clients(5, 6, 8, p=[1, 1, 2]),
        local_work=fixed([4, 1, 1]),
    )
    found = ask(other, Steps(0.5).step, 2.0, jax.random.key(1))
    np.testing.assert_allclose(found, 4 * (2 + 5 / 2) / 4 + (2 + 6 / 2) / 4 + (2 + 8 / 2) / 2)
    assert made.names == ["step"]


def test_one_program_serves_clients_with_any_local_rules(made):
    rules = [sgd(), momentum(0.5), proximal(0.5)]
    for given in (rules, rules[::-1], [momentum(0.9), proximal(0.1), proximal(0.2)]):
        federation = SimulatedFederation(clients(1, 2, 3), local_work=constant(2, given))
        norms = [effective(rule, 2).sum() for rule in given]
        expected = np.mean(norms * (1 + 0.2 * np.arange(1, 4)))
        np.testing.assert_allclose(ask(federation), expected, rtol=1e-14)
    assert made.names == ["step"]


def test_two_client_steps_have_two_programs(made):
    federation = SimulatedFederation(clients(1, 2, 3))
    for name in "ab":
        ask(federation, Steps(name=name).step)
        ask(federation, lambda payload, client: Point(y=payload))
    assert made.names == ["step", "<lambda>"] * 2


def test_what_the_program_depends_on_needs_one_of_its_own(made):
    """Everything below differs from the first federation in one thing, which decides a shape."""
    data = clients(1, 2, 3)
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
        ask(federation)
        assert len(made.names) == count
    everyone = federations[0]
    everyone.gather(STEP, jnp.ones(2), everyone.cohort(KEY), KEY)
    everyone.sum(STEP, PerClient(jnp.ones((3, 2))), everyone.cohort(KEY), KEY)
    assert len(made.names) == len(variants) + 2
    for federation in federations:
        ask(federation)
    assert len(made.names) == len(variants) + 2


def test_new_data_of_the_same_federation_are_used(made):
    """A federation may be given other data, of the same shapes or not."""
    federation = SimulatedFederation(clients(1, 2, 3))
    first = ask(federation)
    federation.data = clients(7, 8, 9)
    np.testing.assert_allclose(ask(federation) - first, 0.2 * 6, rtol=1e-12)
    assert len(made.names) == 1
    federation.data = clients(7, 8, 9, rows=1)
    np.testing.assert_allclose(ask(federation) - first, 0.2 * 6, rtol=1e-12)
    assert len(made.names) == 2


def test_numbers_of_any_kind_share_a_program(made):
    federation = SimulatedFederation(clients(1, 2, 3))
    expected = ask(federation, Steps(2.0).step)
    for number in (2, np.float64(2.0), np.float32(2.0), jnp.asarray(2.0), jnp.asarray(2)):
        np.testing.assert_array_equal(ask(federation, Steps(number).step), expected)
    assert made.names == ["step"]


def test_the_programs_used_last_are_kept():
    cache, built = ProgramCache(2), []

    def build():
        built.append(len(built))
        return built[-1]

    found = [cache.get("step", key, build) for key in "abaabcab"]
    assert found == [0, 1, 0, 0, 1, 2, 3, 4]  # c takes the place of a, a that of b
    assert cache.compiled == ["step"] * 5


def test_half_of_the_programs_go_before_a_process_has_too_many_mappings(monkeypatch, tmp_path):
    cache, mappings = ProgramCache(100), tmp_path / "maps"
    monkeypatch.setattr("simfbo.engines.base._MAPPINGS", mappings)
    mappings.write_text("\n" * 40_000)
    for number in range(4):
        cache.get("f", number, lambda number=number: f"program {number}")
    assert cache.compiled == ["f"] * 4
    mappings.write_text("\n" * 40_001)
    cache.get("f", 4, lambda: "program 4")
    for number in (2, 3, 4):
        assert cache.get("f", number, lambda: "another") == f"program {number}"
    assert cache.get("f", 1, lambda: "another") == "another"
