"""Engines: what is sent, who draws what, and that compiled and interpreted numbers agree."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import SimulatedFederation, Steps, cost, run, shrofbo, simfbo
from simfbo.core.data import from_clients
from simfbo.core.federation import Client, Ledger, client_key
from simfbo.core.gate import occurrences
from simfbo.core.local_work import constant, fixed, uniform
from simfbo.core.partition import iid
from simfbo.core.problem import BilevelProblem, Point
from simfbo.core.sampling import Cohort, with_replacement, without_replacement
from simfbo.datasets import ImageData
from simfbo.engines import CountingFederation, DebugFederation
from simfbo.errors import ClientError, UserError
from simfbo.tasks import hyper_representation
from simfbo.tasks._quadratic import quadratic
from simfbo.tasks.models import mlp

STEPS = Steps(y=0.2, v=0.1, x=0.05)
ENGINES = [SimulatedFederation, DebugFederation]
KEY = jax.random.key(11)


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=5, dim_x=2, dim_y=3, samples=6, noise=1.0, batch_size=2)


@pytest.fixture
def mnist(single_precision):
    """Return the task with MNIST's shapes, on eight random images."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, 28, 28), dtype=np.uint8)
    labels = np.arange(8, dtype=np.int32)
    data = ImageData(images, labels, images[:2], labels[:2], "noise")
    return hyper_representation(data, iid(8, 4), model=mlp(784, 200, 10), batch_size=1)


def cohort(*ids, weights=None) -> Cohort:
    return Cohort(np.array(ids, np.int32), np.ones(len(ids)) if weights is None else weights)


def start(task) -> Point:
    rng = np.random.default_rng(3)
    return Point(*(jnp.asarray(rng.normal(size=size)) for size in (2, 3, 3)))


# What is sent


def test_mnist_messages_in_single_precision(mnist):
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (mnist.x0, mnist.y0)]
    assert sizes == [157_000, 2_010]
    federation = SimulatedFederation(mnist.data, without_replacement(3))
    sent = cost(simfbo(mnist.problem, STEPS), federation, mnist.x0, mnist.y0).total
    assert (sent.rounds, sent.floats_down, sent.floats_up) == (1, 3 * 161_020, 3 * 161_020)
    assert (sent.bytes_down, sent.bytes_up) == (3 * 644_080, 3 * 644_080)
    extra = cost(shrofbo(mnist.problem, STEPS), federation, mnist.x0, mnist.y0).total
    assert (extra.bytes_down, extra.bytes_up) == (3 * 644_080, 3 * 644_084)
    assert federation.ledger == Ledger()


def test_cost_is_what_a_run_counts_on_mnist(mnist):
    federation = SimulatedFederation(mnist.data, without_replacement(3))
    algorithm = shrofbo(mnist.problem, STEPS)
    expected = cost(algorithm, federation, mnist.x0, mnist.y0)
    run(algorithm, federation, mnist.x0, mnist.y0, rounds=1)
    assert federation.ledger == expected


def test_double_precision_takes_twice_the_bytes(task):
    federation = SimulatedFederation(task.data)
    sent = cost(shrofbo(task.problem, STEPS), federation, task.x0, task.y0).total
    assert (sent.floats_down, sent.floats_up) == (5 * 8, 5 * 9)
    assert (sent.bytes_down, sent.bytes_up) == (5 * 64, 5 * 72)


@pytest.mark.parametrize("engine", [*ENGINES, CountingFederation])
def test_the_ledger_adds_up_by_work(task, engine):
    def ping(payload, client: Client):
        return payload["a"]

    def pong(payload, client: Client):
        return (payload["a"], jnp.zeros(4, jnp.float16))

    federation = engine(task.data)
    payload = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2), jnp.float32)}
    for work, members in ((ping, (0, 1)), (pong, (0, 1, 2)), (ping, (4,))):
        federation.aggregate(work, payload, cohort(*members), KEY)
    ledger = federation.ledger
    assert set(ledger.by_work) == {"ping", "pong"}
    one, two = ledger.by_work["ping"], ledger.by_work["pong"]
    assert (one.rounds, one.floats_down, one.floats_up) == (2, 3 * 7, 3 * 3)
    assert (one.bytes_down, one.bytes_up) == (3 * 40, 3 * 24)
    assert (two.rounds, two.floats_down, two.floats_up) == (1, 3 * 7, 3 * 7)
    assert (two.bytes_down, two.bytes_up) == (3 * 40, 3 * 32)
    for name, total in ledger.total._asdict().items():
        assert total == getattr(one, name) + getattr(two, name)


# Who computes what


@pytest.fixture(scope="module")
def work(task):
    """Return SimFBO's client work on the noisy task."""
    return simfbo(task.problem, STEPS).works[0]


@pytest.fixture(scope="module")
def compiled(task):
    return SimulatedFederation(task.data, local_work=fixed([1, 2, 3, 1, 2]))


def test_a_message_does_not_depend_on_who_else_came(task, work, compiled):
    members = [0, 2, 3]
    weights = np.array([0.5, 2.0, -1.0])
    together = compiled.aggregate(work, start(task), cohort(*members, weights=weights), KEY)
    alone = [compiled.aggregate(work, start(task), cohort(i), KEY) for i in members]
    for name in Point._fields:
        expected = sum(w * getattr(m, name) for w, m in zip(weights, alone, strict=True))
        np.testing.assert_allclose(getattr(together, name), expected, atol=1e-12)
    assert not np.allclose(alone[0].y, alone[1].y)


def test_engines_agree(task, work, compiled):
    debug = DebugFederation(task.data, local_work=compiled.local_work)
    members = cohort(0, 1, 1, weights=np.array([0.3, 0.2, 0.7]))
    for engine in (compiled, debug):
        engine.ledger = Ledger()
    fast, slow = (e.aggregate(work, start(task), members, KEY) for e in (compiled, debug))
    for name in Point._fields:
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=0, atol=1e-12)
    assert compiled.ledger == debug.ledger


def draw(payload, client: Client):
    return jax.random.uniform(client.key)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_and_every_repeat_has_a_key_of_its_own(task, engine):
    federation = engine(task.data)
    members = (0, 1, 1, 1, 4)
    draws = [
        float(federation.aggregate(draw, jnp.zeros(()), cohort(*members, weights=one), KEY))
        for one in np.eye(5)
    ]
    assert len(set(draws)) == 5
    expected = [client_key(KEY, *who) for who in ((0, 0), (1, 0), (1, 1), (1, 2), (4, 0))]
    assert draws == [float(jax.random.uniform(key)) for key in expected]
    other = federation.aggregate(draw, jnp.zeros(()), cohort(0), jax.random.key(12))
    assert float(other) != draws[0]


def test_repeats_draw_other_minibatches(task, work, compiled):
    first, second = (
        compiled.aggregate(work, start(task), cohort(1, 1, 4, weights=np.eye(3)[j]), KEY)
        for j in range(2)
    )
    assert np.abs(first.y - second.y).max() > 1e-3


def test_with_replacement_repeats_are_numbered():
    ids = with_replacement(40)(KEY, np.full(5, 0.2)).ids
    seen = Counter()
    for i, repeat in zip(ids.tolist(), occurrences(ids).tolist(), strict=True):
        assert repeat == seen[i]
        seen[i] += 1
    assert max(seen.values()) > 1


# How much a client does

TAUS = [1, 9, 4]


class Evaluations:
    """Losses whose gradient is one everywhere, and a count of how often f was evaluated."""

    def __init__(self):
        self.count = 0
        self.problem = BilevelProblem(upper=self.upper, lower=lambda x, y, batch: jnp.sum(y))

    def tick(self):
        self.count += 1

    def upper(self, x, y, batch):
        jax.debug.callback(self.tick)
        return jnp.sum(x)


@pytest.fixture(scope="module")
def three():
    parts = [np.zeros((2, 1))] * 3
    return from_clients(parts, parts)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_takes_exactly_its_own_steps(three, engine):
    problem = Evaluations().problem
    federation = engine(three, local_work=fixed(TAUS))
    payload = Point(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1))
    work = simfbo(problem, STEPS).works[0]
    for i, tau in enumerate(TAUS):
        q = federation.aggregate(work, payload, cohort(i), KEY)
        assert (q.y.item(), q.x.item()) == (tau, tau)
    q = federation.aggregate(work, payload, cohort(0, 1, 2), KEY)
    assert q.y.item() == sum(TAUS)


def test_the_compiled_engine_computes_no_more_steps_than_asked(three):
    counted = Evaluations()
    federation = SimulatedFederation(three, local_work=fixed(TAUS))
    payload = Point(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1))
    work = simfbo(counted.problem, STEPS).works[0]
    jax.block_until_ready(federation.aggregate(work, payload, cohort(0, 1, 2), KEY))
    jax.effects_barrier()
    assert counted.count == sum(TAUS)  # and not 3 * 9


def test_rho_is_known_where_the_server_assigns_the_work(three):
    assert SimulatedFederation(three, local_work=fixed(TAUS)).mean_norm(KEY) == pytest.approx(
        14 / 3
    )
    assert SimulatedFederation(three, local_work=constant(2)).mean_norm(KEY) == 2.0
    unknown = fixed(TAUS, assigned=False)
    assert SimulatedFederation(three, local_work=unknown).mean_norm(KEY) is None


def test_redrawn_work_depends_on_the_exchange_alone(three):
    federation = SimulatedFederation(three, local_work=uniform(1, 50, every_round=True))

    def steps(payload, client: Client):
        return jnp.asarray(client.coefs.tau).astype(float)

    def taus(key):
        return [int(federation.aggregate(steps, KEY, cohort(i), key)) for i in range(3)]

    first, again, other = taus(KEY), taus(KEY), taus(jax.random.key(12))
    assert first == again
    assert first != other


# Mistakes


def fails_for(client: int, error: Exception):
    """Return a loss that raises for one client, whose samples hold its number."""

    def loss(x, y, batch):
        if float(jnp.max(batch)) == client:
            raise error
        return jnp.sum(x**2) + jnp.sum(y**2) + 0 * jnp.sum(batch)

    return loss


@pytest.fixture(scope="module")
def numbered():
    parts = [np.full((2, 1), float(i)) for i in range(4)]
    return from_clients(parts, parts)


def test_debug_names_the_client_and_its_work(numbered):
    problem = BilevelProblem(*[fails_for(2, ValueError("no such label"))] * 2)
    algorithm = simfbo(problem, STEPS)
    with pytest.raises(ClientError) as caught:
        run(algorithm, DebugFederation(numbered), np.zeros(1), np.zeros(1), rounds=1)
    assert str(caught.value) == "Client 2 failed in 'simfbo_step': ValueError: no such label"
    assert isinstance(caught.value.__cause__, ValueError)


def test_debug_lets_sentences_for_the_user_through(numbered):
    problem = BilevelProblem(*[fails_for(1, UserError("Do this."))] * 2)
    with pytest.raises(UserError) as caught:
        run(simfbo(problem, STEPS), DebugFederation(numbered), np.zeros(1), np.zeros(1), rounds=1)
    assert str(caught.value) == "Do this."


@pytest.mark.parametrize("engine", ENGINES)
def test_a_message_that_is_not_finite_is_refused_by_name(numbered, engine):
    def lower(x, y, batch):
        return jnp.sum(y**2) / jnp.mean(batch - 3)

    problem = BilevelProblem(upper=lambda x, y, batch: jnp.sum(x), lower=lower)
    history = run(simfbo(problem, STEPS), engine(numbered), np.zeros(1), np.ones(1), rounds=1)
    reason = "sent .y that is not finite, or too large to measure"
    refusal = {"round": 1, "exchange": 1, "work": "simfbo_step", "client": 3, "reason": reason}
    assert history.refusals == [refusal]
    assert history.end == {"status": "finished"}


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_of_whole_numbers_are_refused(task, engine):
    def count(payload, client: Client):
        return jnp.ones((), jnp.int32)

    with pytest.raises(UserError, match="'count' returns int32 numbers: return floats"):
        engine(task.data).aggregate(count, jnp.zeros(1), cohort(0, 1), KEY)


def test_cohorts_are_sorted_and_never_empty(task):
    def unsorted(key, p):
        return Cohort([4, 1, 4], [0.1, 0.2, 0.3])

    drawn = SimulatedFederation(task.data, unsorted).cohort(KEY)
    assert drawn.ids.tolist() == [1, 4, 4]
    assert drawn.weights.tolist() == [0.2, 0.1, 0.3]
    nobody = SimulatedFederation(task.data, lambda key, p: Cohort(np.zeros(0, int), np.zeros(0)))
    with pytest.raises(UserError, match="The sampler drew nobody"):
        nobody.cohort(KEY)


def test_one_federation_serves_both_precisions(task):
    def echo(payload, client: Client):
        return payload * client.coefs.norm.astype(payload.dtype)

    federation = SimulatedFederation(task.data)
    for wide in (True, False, True):
        with jax.enable_x64(wide):
            found = federation.aggregate(echo, jnp.ones(2), federation.cohort(KEY), KEY)
            assert found.dtype == (jnp.float64 if wide else jnp.float32)
            np.testing.assert_allclose(found, 1.0, rtol=1e-6)
