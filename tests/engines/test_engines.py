"""Engines: what is sent, who draws what, and that compiled and interpreted numbers agree."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import DebugFederation, Point, SimulatedFederation, cost, run
from simfbo.algorithms import shrofbo, simfbo
from simfbo.core.data import from_clients
from simfbo.core.exchange import Reason
from simfbo.core.federation import Client
from simfbo.core.gate import occurrences
from simfbo.core.ledger import Ledger
from simfbo.core.local_work import constant, fixed, uniform
from simfbo.core.problem import BilevelProblem
from simfbo.core.sampling import Cohort, with_replacement, without_replacement
from simfbo.engines import CountingFederation
from simfbo.errors import ClientError, UserError
from simfbo.tasks import quadratic

STEPS = Point(x=0.05, y=0.2, v=0.1)
ENGINES = [SimulatedFederation, DebugFederation]
KEY = jax.random.key(11)


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=5, dim_x=2, dim_y=3, samples=6, noise=1.0, batch_size=2)


def cohort(*ids, weights=None) -> Cohort:
    return Cohort(np.array(ids, np.int32), np.ones(len(ids)) if weights is None else weights)


def start(task) -> Point:
    rng = np.random.default_rng(3)
    return Point(*(jnp.asarray(rng.normal(size=size)) for size in (2, 3, 3)))


# What is sent


def test_single_precision_takes_half_the_bytes(single_precision):
    task = quadratic(clients=5, dim_x=2, dim_y=3)
    federation = SimulatedFederation(task.data, without_replacement(3))
    sent = cost(simfbo(task.problem, STEPS), federation, task.x0, task.y0).total
    assert (sent.rounds, sent.floats_down, sent.floats_up) == (1, 3 * 8, 3 * 8)
    assert (sent.bytes_down, sent.bytes_up) == (3 * 32, 3 * 32)
    assert federation.ledger == Ledger()  # only counted


def test_double_precision_takes_twice_the_bytes(task):
    federation = SimulatedFederation(task.data)
    sent = cost(shrofbo(task.problem, STEPS), federation, task.x0, task.y0).total
    assert (sent.floats_down, sent.floats_up) == (5 * 8, 5 * 9)
    assert (sent.bytes_down, sent.bytes_up) == (5 * 64, 5 * 72)


@pytest.mark.parametrize("engine", [*ENGINES, CountingFederation])
def test_the_ledger_adds_up_by_client_step(task, engine):
    def ping(payload, client: Client):
        return payload["a"]

    def pong(payload, client: Client):
        return (payload["a"], jnp.zeros(4, jnp.float16))

    federation = engine(task.data)
    payload = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2), jnp.float32)}
    for step, members in ((ping, (0, 1)), (pong, (0, 1, 2)), (ping, (4,))):
        federation.sum(step, payload, cohort(*members), KEY)
    ledger = federation.ledger
    assert set(ledger.by_step) == {"ping", "pong"}
    one, two = ledger.by_step["ping"], ledger.by_step["pong"]
    assert (one.rounds, one.floats_down, one.floats_up) == (2, 3 * 7, 3 * 3)
    assert (one.bytes_down, one.bytes_up) == (3 * 40, 3 * 24)
    assert (two.rounds, two.floats_down, two.floats_up) == (1, 3 * 7, 3 * 7)
    assert (two.bytes_down, two.bytes_up) == (3 * 40, 3 * 32)
    for name, total in ledger.total._asdict().items():
        assert total == getattr(one, name) + getattr(two, name)


# Who computes what


@pytest.fixture(scope="module")
def step(task):
    """Return SimFBO's client step on the noisy task."""
    return simfbo(task.problem, STEPS).simfbo_step


@pytest.fixture(scope="module")
def compiled(task):
    return SimulatedFederation(task.data, local_work=fixed([1, 2, 2, 1, 2]))


def test_a_message_does_not_depend_on_who_else_came(task, step, compiled):
    """Client 0's, as it comes first, in the middle and last, in other company."""
    messages = [
        compiled.gather(step, start(task), cohort(*members), KEY)
        for members in ((0, 1, 2), (0, 3, 4), (0, 0, 1))
    ]
    for name in Point._fields:
        first = getattr(messages[0], name)
        for found in messages[1:]:
            np.testing.assert_array_equal(getattr(found, name)[0], first[0])
        np.testing.assert_array_equal(getattr(messages[2], name)[2], first[1])
        assert np.abs(first[0] - first[1]).max() > 1e-3


def test_engines_agree(task, step, compiled):
    debug = DebugFederation(task.data, local_work=compiled.local_work)
    for engine in (compiled, debug):
        engine.ledger = Ledger()
    fast, slow = (e.gather(step, start(task), cohort(0, 1, 1), KEY) for e in (compiled, debug))
    for name in Point._fields:
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=0, atol=1e-12)
    assert compiled.ledger == debug.ledger
    assert np.abs(fast.y[1] - fast.y[2]).max() > 1e-3  # repeats draw other minibatches


def test_with_replacement_repeats_are_numbered():
    ids = np.asarray(with_replacement(40)(KEY, np.full(5, 0.2)).ids)
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
    step = simfbo(problem, STEPS).simfbo_step
    q = federation.gather(step, payload, cohort(0, 1, 2), KEY)
    assert np.ravel(q.y).tolist() == np.ravel(q.x).tolist() == TAUS


def test_the_compiled_engine_computes_no_more_steps_than_asked(three):
    counted = Evaluations()
    federation = SimulatedFederation(three, local_work=fixed(TAUS), strategy="lanes")
    payload = Point(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1))
    step = simfbo(counted.problem, STEPS).simfbo_step
    jax.block_until_ready(federation.sum(step, payload, cohort(0, 1, 2), KEY))
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
        return jnp.asarray(client.plan.tau).astype(float)

    def taus(key):
        return np.asarray(federation.gather(steps, jnp.zeros(()), cohort(0, 1, 2), key)).tolist()

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
    algorithm, federation = simfbo(problem, STEPS), engine(numbered)
    state = algorithm.round(algorithm.init(np.zeros(1), np.ones(1)), federation, KEY)
    text = "sent .y that is not finite, or too large to measure"
    (refusal,) = federation.refusals
    assert refusal == (1, "simfbo_step", 3, Reason.NOT_FINITE, text)
    assert np.isfinite(state.y).all()


def test_cohorts_are_sorted_and_never_empty(task):
    def unsorted(key, p):
        return Cohort([4, 1, 4], [0.1, 0.2, 0.3])

    drawn = SimulatedFederation(task.data, unsorted).cohort(KEY)
    assert drawn.ids.tolist() == [1, 4, 4]
    assert drawn.weights.tolist() == [0.2, 0.1, 0.3]
    nobody = SimulatedFederation(task.data, lambda key, p: Cohort(np.zeros(0, int), np.zeros(0)))
    with pytest.raises(UserError, match="The sampler returned no clients"):
        nobody.cohort(KEY)
    square = SimulatedFederation(task.data, lambda key, p: Cohort(np.arange(2), np.eye(2)))
    with pytest.raises(UserError, match="The sampler must return one weight per client"):
        square.cohort(KEY)


def test_one_federation_serves_both_precisions(task):
    def echo(payload, client: Client):
        return payload * client.plan.norm.astype(payload.dtype)

    federation = SimulatedFederation(task.data)
    for wide in (True, False, True):
        with jax.enable_x64(wide):
            found = federation.sum(echo, jnp.ones(2), federation.cohort(KEY), KEY)
            assert found.dtype == (jnp.float64 if wide else jnp.float32)
            np.testing.assert_allclose(found, 1.0, rtol=1e-6)
