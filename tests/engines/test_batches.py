"""Clients in batches: the same numbers as one after the other, whatever the size of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import Gate, PerClient, Point, SimulatedFederation, UserError, from_clients
from simfbo.algorithms import simfbo
from simfbo.core.keys import keyed
from simfbo.core.local_work import fixed
from simfbo.core.method import as_module
from simfbo.core.sampling import Cohort
from simfbo.engines.exchange import chunk_of, cost_of, prepare_exchange, trace_reply
from simfbo.tasks import quadratic

N, KEY = 7, jax.random.key(2)
TASK = quadratic(clients=N, dim_x=2, dim_y=3, samples=4, noise=0.3, batch_size=2, seed=1)
WHOLE = quadratic(clients=N, dim_x=2, dim_y=3, samples=4, noise=0.3, seed=1)
STEPS = Point(x=0.1, y=0.2, v=0.1)
STEP = simfbo(TASK.problem, STEPS).simfbo_step
AT = Point(x=jnp.ones(2), y=jnp.arange(3.0), v=-jnp.ones(3))
RNG = np.random.default_rng(3)
UNEQUAL = [
    (RNG.normal(size=(k, 3, 3)), RNG.normal(size=(k, 3, 2)), RNG.normal(size=(k, 3)))
    for k in (1, 2, 3, 2, 1, 3, 2)
]
UPPER = [
    (RNG.normal(size=(2, 3, 3)), RNG.normal(size=(2, 3)),
     RNG.normal(size=(2, 2, 2)), RNG.normal(size=(2, 2)))
] * N  # fmt: skip
DATA = {
    "minibatches": TASK.data,
    "full batches": WHOLE.data,
    "unequal": from_clients(UNEQUAL, UPPER),
}
EVERYONE = Cohort(np.arange(N, dtype=np.int32), np.linspace(0.1, 0.4, N))
SOME = Cohort(np.array([1, 1, 4, 6], np.int32), np.array([0.5, 0.5, 1.0, 0.25]))


def found(strategy, chunk=None, data="minibatches", cohort=EVERYONE, verb="sum", **options):
    work = fixed([1, 3, 2, 1, 4, 2, 1])
    options = {"local_work": work, "detect_anomalies": True, **options}
    federation = SimulatedFederation(DATA[data], strategy=strategy, chunk=chunk, **options)
    result = getattr(federation, verb)(STEP, AT, cohort, KEY)
    return result, federation


def assert_same(a, b):
    (got, one), (want, other) = a, b
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(one.latest.squares, other.latest.squares, rtol=1e-10)
    np.testing.assert_array_equal(one.latest.admitted, other.latest.admitted)
    np.testing.assert_allclose(one.latest.probed.rows, other.latest.probed.rows, rtol=1e-9)
    assert one.ledger == other.ledger


SIZES = {"everyone": [None, 1, 2, 5], "some": [None, 2, 3, 5]}  # of seven, and of four
FEW = {"everyone": [None, 3], "some": [2, 5]}


@pytest.mark.parametrize(
    ("data", "cohort", "chunk"),
    [
        (data, cohort, chunk)
        for data in DATA
        for cohort, sizes in (SIZES if data == "minibatches" else FEW).items()
        for chunk in sizes
    ],
)
def test_the_size_of_a_batch_does_not_matter(data, cohort, chunk):
    """In one batch and in several, of which the last is full, or not; one by one; few in one."""
    cohort = {"everyone": EVERYONE, "some": SOME}[cohort]
    kind = {"data": data, "cohort": cohort}
    assert_same(found("batches", chunk, **kind), found("lanes", **kind))


@pytest.mark.parametrize("chunk", [None, 3])
def test_gathered(chunk):
    assert_same(found("batches", chunk, verb="gather"), found("lanes", verb="gather"))


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_the_absent_and_the_refused_leave_nothing_behind(chunk):
    rules = {"gate": Gate(max_norm=20.0), "absence": keyed(lambda key, ids: np.isin(ids, [0, 3]))}
    batches, lanes = found("batches", chunk, **rules), found("lanes", **rules)
    admitted = lanes[1].latest.admitted
    assert 0 < admitted.sum() < N - 2  # some are too large
    assert_same(batches, lanes)
    assert [one[2:4] for one in batches[1].refusals] == [one[2:4] for one in lanes[1].refusals]


def own(payload, client):
    return Point(y=payload["own"] * payload["all"])


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_every_client_receives_its_own_slice(chunk):
    federation = SimulatedFederation(TASK.data, strategy="batches", chunk=chunk)
    payload = {"all": jnp.full((), 2.0), "own": PerClient(jnp.arange(7.0))}
    got = federation.gather(own, payload, EVERYONE, KEY).y
    assert got.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


def test_many_clients_are_compared_a_few_at_a_time():
    """Of a large cohort 64 messages are kept, other ones in every exchange."""
    task = quadratic(clients=150, dim_x=2, dim_y=3)
    kinds = ("lanes", None), ("batches", None), ("batches", 40)
    both = [
        SimulatedFederation(task.data, strategy=strategy, chunk=chunk, detect_anomalies=True)
        for strategy, chunk in kinds
    ]
    for _ in range(3):
        for federation in both:
            federation.sum(STEP, AT, federation.cohort(KEY), KEY)
        rows = [federation.latest.probed.rows for federation in both]
        assert rows[0].shape == (64, 8)
        for other in rows[1:]:
            np.testing.assert_allclose(other, rows[0], rtol=1e-9)


def test_full_batches_are_stacked_once_and_minibatches_are_not():
    for data, stacked in (("full batches", True), ("minibatches", False)):
        federation = SimulatedFederation(DATA[data], strategy="auto")
        clients = federation.clients(np.inf)
        assert clients.lower.is_stacked == stacked
        assert federation.clients(np.inf) is clients
        assert federation.clients(3.0).lower is clients.lower


def test_clients_of_very_unequal_size_are_not_padded():
    sizes = (1,) * 9 + (50,)
    parts = [np.ones((k, 2)) for k in sizes]
    federation = SimulatedFederation(from_clients(parts, parts), strategy="batches")

    def mean(payload, client):
        batch = client.data.lower_batch(client.key)
        return Point(y=payload * batch.samples.sum() * batch.weights.sum() / 100)

    cohort = federation.cohort(KEY)
    assert not federation.clients(np.inf).lower.is_stacked
    np.testing.assert_allclose(federation.sum(mean, jnp.ones(2), cohort, KEY).y, [1.0, 1.0])


# Which strategy


def wide(payload, client):
    return Point(y=(jnp.tile(payload, (3000, 3000)) @ jnp.tile(payload, 3000))[:1])


def test_large_steps_run_in_lanes_unless_there_is_one_client():
    clients = SimulatedFederation(TASK.data, strategy="auto").clients(np.inf)

    def layout(step, size):
        cohort = Cohort(np.arange(size), np.ones(size))
        job, _ = prepare_exchange(clients, as_module(step), jnp.ones(1), cohort, KEY, None)
        cost = trace_reply(job).cost
        return clients.uses_threads(cost, size), chunk_of(clients, cost, size)

    assert layout(wide, 2) == (True, 1)
    assert layout(wide, 1) == (False, 1)
    assert layout(lambda payload, client: Point(y=payload), 2) == (False, 2)


def test_costs_are_counted_in_the_trace():
    """A product of n x m and m x k takes 2 n m k operations; loops count once, scans every time."""

    def step(a, b):
        return jax.lax.scan(lambda c, _: (c @ b, None), a, None, length=5)[0]

    jaxpr = jax.make_jaxpr(step)(jnp.ones((2, 3)), jnp.ones((3, 3)))
    assert cost_of(jaxpr.jaxpr).operations == 5 * 2 * 2 * 3 * 3
    once = jax.make_jaxpr(
        lambda a: jax.lax.fori_loop(0, a[0, 0].astype(int), lambda i, c: c @ c, a)
    )
    assert 2 * 3**3 <= cost_of(once(jnp.ones((3, 3))).jaxpr).operations < 2 * 2 * 3**3


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"strategy": "fast"}, "strategy must be 'auto', 'lanes' or 'batches', got 'fast'."),
        ({"chunk": 0}, "chunk must be at least 1, got 0."),
        ({"devices": 77}, "devices must lie between 1 and 1, which JAX has here, got 77."),
    ],
)
def test_wrong_arguments(wrong, sentence):
    with pytest.raises(UserError) as caught:
        SimulatedFederation(TASK.data, **wrong)
    assert str(caught.value) == sentence
