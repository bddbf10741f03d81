"""The same algorithm, the same numbers: on Flower messages and in simulation."""

import jax
import numpy as np
import pytest

from simfbo import SimulatedFederation, Steps, algorithms, local_work, run, sampling
from simfbo.engines.flower import FlowerFederation
from simfbo.tasks import quadratic

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


@pytest.mark.parametrize("partial_sums", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_partial_participation_and_unequal_work(flower, name, partial_sums):
    (found, remote), (wanted, local) = both(flower, method(name), 3, partial_sums=partial_sums)
    require_equal(found, wanted, 1e-6)
    assert remote.ledger == local.ledger
    assert found.refusals == []
    assert found.end == {"status": "finished"}
