"""The same algorithm, the same numbers: on Flower messages and in simulation."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Message

from simfbo import (
    BilevelProblem,
    Gate,
    Point,
    SimulatedFederation,
    UserError,
    algorithms,
    codecs,
    run,
)
from simfbo.core import local_work
from simfbo.core.keys import keyed
from simfbo.core.ledger import PerClient
from simfbo.core.sampling import Cohort
from simfbo.engines.base import PROGRAMS
from simfbo.flower import Deployment
from simfbo.flower.app import FlowerFederation, _content, _package, client_app
from simfbo.flower.deployment import simulate
from simfbo.flower.wire import pack, unpack
from simfbo.robust.aggregation import median
from simfbo.tasks import quadratic

STEPS = Point(x=0.05, y=0.1, v=0.1)
TASK = quadratic(clients=6, samples=5, noise=0.3, seed=1)
METHODS = ("simfbo", "shrofbo", "fednest", "fedmbo", "lfednest", "aggitd", "fedbio", "memfbo",
           "fedmsa", "fedbioacc")  # fmt: skip
FORMS = ("simfbo", "fednest", "memfbo", "fedmbo", "fedbioacc")
SLOW = pytest.mark.slow
TAUS = [1, 4, 2, 3, 1, 5]
RULES = [local_work.sgd(), local_work.momentum(0.5), local_work.proximal(0.2)] * 2


@keyed(size=4)
def two_of_each_half(key, p):
    """Sample two of the clients 0 to 2 and two of 3 to 5: few shapes have to be compiled."""
    halves = (jax.random.permutation(one, 3)[:2] for one in jax.random.split(key))
    ids = np.concatenate([np.asarray(half) + 3 * j for j, half in enumerate(halves)])
    return Cohort(ids, p[ids] * 6 / 4)


def method(name, steps=STEPS):
    return getattr(algorithms, name)(TASK.problem, steps)


def rules_for(algorithm, **changes):
    takes_any = algorithm.name in ("SimFBO", "ShroFBO", "MemFBO")
    rules = RULES if takes_any else local_work.sgd()
    usual = {"sampler": two_of_each_half, "local_work": local_work.fixed(TAUS, rules)}
    return usual | changes


def connected(flower, algorithm, rules, nodes=2, **options):
    """Return a federation on Flower messages, and the grid that it uses."""
    plan = flower.deployed(TASK, algorithm, **rules, **options)
    grid = flower.Grid(plan, flower.parts(nodes) if isinstance(nodes, int) else nodes)
    federation = FlowerFederation(grid, plan, poll=0.0)
    federation.connect()
    return federation, grid


def on_flower(*arguments, **options):
    """Return the history and the federation of a run on Flower messages, and the grid."""
    federation, grid = connected(*arguments, **options)
    return run(arguments[1], federation, TASK.x0, TASK.y0, rounds=3, seed=5), federation, grid


def simulated(algorithm, rules):
    federation = SimulatedFederation(TASK.data, **rules, detect_anomalies=True)
    return run(algorithm, federation, TASK.x0, TASK.y0, rounds=3, seed=5), federation


def require_equal(found, wanted, tolerance=1e-12):
    for name in ("x", "y", "v"):
        if hasattr(found.state, name):
            pairs = zip(*(jax.tree.leaves(getattr(h.state, name)) for h in (found, wanted)))
            for a, b in pairs:
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "nodes", "partial_sums"),
    [
        # One node compiles nothing that simulation does not; two nodes do, a program per step.
        # Slow: methods whose payloads have the form of one of the others'.
        *(pytest.param(name, 1, True, marks=() if name in FORMS else SLOW) for name in METHODS),
        *(
            pytest.param(name, 2, False, marks=() if name in FORMS[:2] else SLOW)
            for name in METHODS
        ),
    ],
)
def test_every_method_with_partial_participation_and_unequal_work(
    flower, name, nodes, partial_sums
):
    algorithm = method(name)
    rules = rules_for(algorithm)
    wanted, local = simulated(algorithm, rules)
    found, remote, _ = on_flower(flower, algorithm, rules, nodes, partial_sums=partial_sums)
    require_equal(found, wanted)
    assert remote.ledger == local.ledger
    assert found.refusals == []
    assert found.end == {"status": "finished"}
    assert remote.observed == local.observed
    if not partial_sums:
        np.testing.assert_allclose(remote.latest.probed.rows, local.latest.probed.rows, atol=1e-12)


@pytest.mark.parametrize("partial_sums", [False, True])
def test_the_automatic_limit_is_the_same_number(flower, partial_sums):
    algorithm = method("simfbo")
    rules = rules_for(algorithm, gate=Gate(max_norm="auto"))
    wanted, local = simulated(algorithm, rules)
    found, remote, grid = on_flower(flower, algorithm, rules, partial_sums=partial_sums)
    require_equal(found, wanted)
    (step,) = local.observed["norms"]
    np.testing.assert_allclose(remote.observed["norms"][step], local.observed["norms"][step])
    limits = [_package(m.content).settings.get("max_norm") for m in grid.sent]
    assert limits[-1] == pytest.approx(5 * max(local.observed["norms"][step][:-1]))


def test_step_sizes_travel_with_requests_and_compile_nothing(flower):
    states = []
    for steps in (STEPS, Point(x=0.02, y=0.3, v=0.2)):
        algorithm = method("simfbo", steps)
        rules = rules_for(algorithm)
        wanted, _ = simulated(algorithm, rules)
        found, _, grid = on_flower(flower, algorithm, rules)
        require_equal(found, wanted)
        requests = [m for m in grid.sent if "hello" not in m.metadata.message_type]
        for arrays in (_package(message.content).arrays for message in requests):
            assert arrays["numbers"][:3].tolist() == [*steps]
        states.append((found.state.x, len(PROGRAMS.compiled)))
    assert np.abs(states[0][0] - states[1][0]).max() > 1e-3
    assert states[0][1] == states[1][1]


def test_automatic_steps_are_found_and_sent_over_the_wire(flower):
    algorithm = algorithms.auto_steps(
        lambda plan: algorithms.shrofbo(TASK.problem, plan.local, plan.server),
        TASK.problem,
        TASK.x0,
        3,
    )
    rules = rules_for(algorithm)
    found, remote, _ = on_flower(flower, algorithm, rules)
    wanted, local = simulated(algorithm, rules)
    require_equal(found, wanted)
    measured = (one.method_state.found for one in (found, wanted))
    np.testing.assert_allclose(*measured, rtol=1e-12)
    assert remote.ledger == local.ledger
    assert 3 * 3 <= remote.ledger.by_step["curvature"].rounds <= 3 * 5  # cohorts, numbers in y


@pytest.mark.parametrize("partial_sums", [False, True])
def test_per_client_payloads_repeated_clients_and_unequal_nodes(flower, partial_sums):
    algorithm = method("fednest")
    product = algorithm.client_steps["hessian_product"]
    cohort = Cohort(np.array([0, 2, 2, 3, 3, 3, 5]), np.arange(1.0, 8.0))
    own = np.random.default_rng(0).normal(size=(7, 5))
    payload = jnp.asarray(TASK.x0), jnp.asarray(TASK.y0), PerClient(jnp.asarray(own))
    rules = rules_for(algorithm)
    nodes = {5: {"clients": "0"}, 6: {"clients": "1-5"}}
    remote, _ = connected(flower, algorithm, rules, nodes, partial_sums=partial_sums)
    local = SimulatedFederation(TASK.data, **rules)
    for verb in ("sum", "gather"):
        found, wanted = (
            getattr(one, verb)(product, payload, cohort, jax.random.key(2)).v
            for one in (remote, local)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert found.shape == (7, 5)
    assert remote.ledger == local.ledger


def test_aggregators_need_single_messages_and_get_them(flower):
    algorithm = method("simfbo")
    rules = rules_for(algorithm, aggregators=Point(x=median(), y=median(), v=median()))
    found, _, _ = on_flower(flower, algorithm, rules, partial_sums=True)
    require_equal(found, simulated(algorithm, rules)[0])


def test_trees_and_unequal_clients_in_single_precision(flower, single_precision):
    rng = np.random.default_rng(0)

    def client(count):
        inputs = rng.normal(size=(count, 3)).astype("float32")
        return inputs, rng.normal(size=count).astype("float32")

    def upper(x, y, batch):
        return jnp.mean((batch[0] @ y["weights"] + y["bias"] - batch[1]) ** 2)

    def lower(x, y, batch):
        return upper(x, y, batch) + jnp.sum(jnp.exp(x[0]) * y["weights"] ** 2) + y["bias"] ** 2

    parts = [(client(count), client(count + 2)) for count in (3, 8, 8, 3)]
    plan = Deployment(
        algorithms.simfbo(BilevelProblem(upper, lower), STEPS),
        (jnp.zeros(3),),
        {"weights": jnp.zeros(3), "bias": jnp.zeros(())},
        4,
        lambda i, node: parts[i],
        parts[0],
        rounds=6,
    )
    federation = FlowerFederation(flower.Grid(plan, flower.parts(2)), plan, poll=0.0)
    federation.connect()
    found = run(plan.algorithm, federation, plan.x0, plan.y0, rounds=6)
    wanted = simulate(plan)
    require_equal(found, wanted, 1e-6)
    assert found.state.x[0].dtype == jnp.float32
    np.testing.assert_allclose(federation.p, np.array([8, 18, 18, 8]) / 52)
    assert found.header["samples"]["lower plus upper"]["each"] == [8, 18, 18, 8]
    assert "52 rows of both levels together." in found.card()
    unknown = FlowerFederation(flower.Grid(plan, {}), plan)
    assert unknown.sample_counts is None


def _plan(config):
    raise NotImplementedError


def test_a_worker_of_a_simulation_keeps_the_app():
    app = client_app(_plan)
    again, third = (pickle.loads(pickle.dumps(app)) for _ in range(2))
    assert type(again) is type(app)
    assert again is third  # so that data and programs are kept between messages


def test_half_precision_numbers_keep_their_type():
    arrays = {"a": jnp.arange(3, dtype=jnp.bfloat16), "b": np.array([True, False])}
    found = unpack(*pack(arrays))
    assert {name: array.dtype.name for name, array in found.items()} == {
        "a": "bfloat16",
        "b": "bool",
    }


CODECS = codecs.Codecs(
    up=Point(codecs.dithered(0.5), codecs.eden(2), codecs.dithered(1.0)),
    down=Point(*[codecs.relative_to_start(codecs.dithered(0.2))] * 3),
)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("simfbo", False),
        ("simfbo", True),
        *(pytest.param(name, False, marks=SLOW) for name in ("fedmbo", "shrofbo")),
    ],
)
def test_coded_messages_are_the_simulations(flower, name, secret):
    algorithm = method(name)
    rules = rules_for(algorithm, codecs=CODECS)
    if secret:  # nobody can reproduce the cohorts: everybody comes, with whole batches
        rules = rules | {"sampler": None}
    wanted, local = simulated(algorithm, rules)
    found, remote, _ = on_flower(flower, algorithm, rules, secret=secret)
    require_equal(found, wanted, 1e-6)
    assert found.refusals == []
    # The simulation computes how long entropy codes are, Flower counts them.
    total, sent = local.ledger.total, remote.ledger.total
    assert sent.estimated == 0 < total.estimated
    assert sent.bytes_up == pytest.approx(total.bytes_up, rel=0.02)
    assert sent.bytes_down == pytest.approx(total.bytes_down, rel=0.02)
    assert sent._replace(bytes_up=0, bytes_down=0, estimated=0, variance=0) == total._replace(
        bytes_up=0, bytes_down=0, estimated=0, variance=0.0
    )


def test_the_ledger_counts_the_bytes_in_flowers_messages(flower):
    algorithm = method("simfbo")
    _, remote, grid = on_flower(flower, algorithm, rules_for(algorithm, codecs=CODECS))
    requests = [_package(m.content) for m in grid.sent if "hello" not in m.metadata.message_type]
    down = sum(one.common["coded"].nbytes * len(one.arrays["ids"]) for one in requests)
    total = remote.ledger.total
    assert total.bytes_down == down + 32 * sum(len(one.arrays["ids"]) for one in requests)
    up = [_package(reply.content).arrays for reply in grid.replies]
    assert total.bytes_up == sum(arrays["coded"].nbytes for arrays in up if "coded" in arrays)
    assert all(
        arrays["lengths"].sum() == arrays["coded"].nbytes for arrays in up if "coded" in arrays
    )


def test_a_coded_reply_that_is_damaged_is_refused(flower):
    algorithm = method("simfbo")
    plan = flower.deployed(TASK, algorithm, codecs=CODECS, rounds=2)
    grid = flower.Grid(plan, flower.parts(2))
    federation = FlowerFederation(grid, plan, poll=0.0)
    federation.connect()

    def spoil(node, message, reply):
        package = _package(reply.content)
        if node != 2**60 or "coded" not in package.arrays:
            return reply
        data = package.arrays["coded"].copy()
        data[3] ^= 1  # in the message of its first client
        arrays = package.arrays | {"coded": data}
        return Message(_content(package._replace(arrays=arrays)), reply_to=message)

    grid.spoil = spoil
    history = run(algorithm, federation, TASK.x0, TASK.y0, rounds=2, seed=5)
    assert {(line["client"], line["reason"]) for line in history.refusals} == {(0, "malformed")}
    assert history.end == {"status": "finished"}


def test_codecs_and_partial_sums_exclude_each_other(flower):
    with pytest.raises(UserError, match="set one of them"):
        connected(flower, method("simfbo"), {"codecs": CODECS}, partial_sums=True)
