"""The same algorithm, the same numbers: on Flower messages and in simulation."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import (
    Aggregators,
    BilevelProblem,
    Deployment,
    SimulatedFederation,
    Steps,
    algorithms,
    datasets,
    median,
    run,
)
from simfbo.algorithms._auto_steps import automatic
from simfbo.core import local_work, partition, sampling
from simfbo.flower.app import FlowerFederation, client_app
from simfbo.flower.deployment import simulate
from simfbo.flower.wire import pack, unpack
from simfbo.tasks import hyper_representation, quadratic
from simfbo.tasks.models import mlp

STEPS = Steps(y=0.1, v=0.1, x=0.05)
TASK = quadratic(clients=7, samples=9, noise=0.5, batch_size=4, seed=3)
METHODS = ("simfbo", "shrofbo", "fednest", "lfednest", "aggitd", "fedbio", "fedmbo", "memfbo")
TAUS = [1, 4, 2, 3, 1, 5, 2]


def method(name):
    return getattr(algorithms, name)(TASK.problem, STEPS)


def both(flower, algorithm, nodes, **options):
    """Return the histories and federations of the same run on Flower messages and simulated."""
    takes_momentum = algorithm.name in ("SimFBO", "ShroFBO", "MemFBO")
    rule = local_work.momentum(0.5) if takes_momentum else local_work.sgd()
    work = local_work.fixed(TAUS, rule)
    rules = {"sampler": sampling.without_replacement(4), "local_work": work}
    rules |= {k: options.pop(k) for k in ("gate", "aggregators", "sampler") if k in options}
    plan = flower.deployed(TASK, algorithm, **rules, **options)
    remote = FlowerFederation(flower.Grid(plan, flower.parts(nodes)), plan, poll=0.0)
    remote.connect()
    local = SimulatedFederation(TASK.data, **rules)
    start = algorithm, TASK.x0, TASK.y0
    return [
        (run(start[0], one, *start[1:], rounds=plan.rounds, seed=5), one) for one in (remote, local)
    ]


def require_equal(found, wanted, tolerance):
    for name in ("x", "y", "v"):
        if hasattr(found.state, name):
            pairs = zip(*(jax.tree.leaves(getattr(h.state, name)) for h in (found, wanted)))
            for a, b in pairs:
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "partial_sums"),
    [(name, False) for name in METHODS] + [(name, True) for name in METHODS[:3]],
)
def test_every_method_with_partial_participation_and_unequal_work(flower, name, partial_sums):
    (found, remote), (wanted, local) = both(flower, method(name), 3, partial_sums=partial_sums)
    require_equal(found, wanted, 1e-12)
    assert remote.ledger == local.ledger
    assert found.refusals == []
    assert found.end == {"status": "finished"}


def test_automatic_steps_are_found_and_sent_over_the_wire(flower):
    algorithm = automatic(
        lambda plan: algorithms.shrofbo(TASK.problem, plan.local, plan.server),
        TASK.problem,
        TASK.x0,
        3,
    )
    (found, remote), (wanted, local) = both(flower, algorithm, 3, rounds=3)
    require_equal(found, wanted, 1e-12)
    np.testing.assert_allclose(found.state.found, wanted.state.found, rtol=1e-12)
    assert remote.ledger == local.ledger
    assert remote.ledger.by_work["curvature"].rounds == 3 * 5  # cohorts, and numbers in y


def test_dealt_payloads_repeated_clients_and_single_messages(flower):
    algorithm = algorithms.fednest(TASK.problem, STEPS, mode="as_released")
    rules = {"sampler": sampling.with_replacement(9)}
    (found, remote), (wanted, local) = both(flower, algorithm, 2, rounds=2, **rules)
    require_equal(found, wanted, 1e-12)
    assert remote.ledger == local.ledger


def test_aggregators_need_single_messages_and_get_them(flower):
    rules = {"aggregators": Aggregators(x=median(), y=median(), v=median())}
    (found, _), (wanted, _) = both(flower, method("simfbo"), 3, partial_sums=True, **rules)
    require_equal(found, wanted, 1e-12)


def test_full_batches_of_unequal_clients(flower, single_precision):
    rng = np.random.default_rng(0)

    def client(count):
        return rng.normal(size=(count, 3)).astype("float32"), rng.normal(size=count).astype(
            "float32"
        )

    def lower(x, y, batch):
        inputs, targets = batch
        return jnp.mean((inputs @ y - targets) ** 2) + jnp.sum(jnp.exp(x) * y**2)

    problem = BilevelProblem(lambda x, y, batch: jnp.mean((batch[0] @ y - batch[1]) ** 2), lower)
    parts = [(client(count), client(count + 2)) for count in (3, 8, 5, 6)]
    plan = Deployment(
        algorithms.simfbo(problem, STEPS),
        jnp.zeros(3),
        jnp.zeros(3),
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
    assert found.state.x.dtype == jnp.float32
    np.testing.assert_allclose(federation.p, np.array([8, 18, 12, 14]) / 52)


@pytest.mark.parametrize("name", ["simfbo", "shrofbo", "fednest"])
def test_a_network_in_single_precision(flower, name, single_precision):
    images = datasets.load("digits")
    task = hyper_representation(
        images, partition.iid(len(images.train_labels), 6, 0), model=mlp(64, 16, 10), batch_size=8
    )
    algorithm = getattr(algorithms, name)(task.problem, Steps(y=0.1, v=0.05, x=0.1))
    rules = {"sampler": sampling.without_replacement(4)}
    rules["local_work"] = local_work.fixed([1, 3, 2, 1, 2, 3])
    plan = flower.deployed(task, algorithm, rounds=2, **rules)
    remote = FlowerFederation(flower.Grid(plan, flower.parts(3)), plan, poll=0.0)
    remote.connect()
    local = SimulatedFederation(task.data, **rules)
    found, wanted = (run(algorithm, one, task.x0, task.y0, rounds=2) for one in (remote, local))
    require_equal(found, wanted, 1e-6)
    assert remote.ledger == local.ledger


def _plan(config):
    raise NotImplementedError


def test_the_app_goes_to_a_worker_of_a_simulation_and_stays_there():
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
