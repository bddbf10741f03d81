"""The library against the references of benchmarks/round_speed: three independent SimFBO rounds."""

import importlib
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from simfbo import BilevelProblem, Point, SimulatedFederation, federate
from simfbo.algorithms import simfbo
from simfbo.core.local_work import fixed
from simfbo.core.sampling import Cohort
from simfbo.tasks._hyper_representation import cross_entropy, regularised, scores
from simfbo.tasks.models import cnn, mlp

FOLDER = Path(__file__).parent
STEPS, SERVER, TAUS = (0.05, 0.04, 0.02), (0.2, 0.1, 0.05), np.array([1, 3, 2, 4])
COHORT = np.array([0, 1, 3], np.int32)


def reference(name):
    """Return a module of the benchmark."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


@cache
def setting(model):
    """Return images, labels, each client's rows (its batches are all of them), and weights."""
    rng = np.random.default_rng(0)
    shape = (784,) if model == "mlp" else (32, 32, 3)
    images = rng.normal(size=(64, *shape)).astype("float32")
    labels = rng.integers(0, 10, 64).astype("int32")
    rows = [(hand[:8], hand[8:]) for hand in np.arange(64).reshape(4, 16)]
    init = (mlp(784, 200, 10) if model == "mlp" else cnn(32, 3, 10)).init(jax.random.key(0))
    v = jax.tree.map(lambda a: 0.1 * jax.random.normal(jax.random.key(1), a.shape), init[1])
    return images, labels, rows, jax.tree.map(np.array, (*init, v))


def by_variable(sizes):
    """Return the step sizes of the references, which come in the order y, v, x."""
    y, v, x = sizes
    return Point(x=x, y=y, v=v)


@cache
def by_library(model):
    """Return the variables after a round of simfbo."""
    images, labels, rows, start = setting(model)
    network = mlp(784, 200, 10) if model == "mlp" else cnn(32, 3, 10)
    loss = cross_entropy(scores(network, 0.0, 1.0))
    problem = BilevelProblem(loss, regularised(loss, 0.001))
    data = federate((images, labels), *zip(*rows, strict=True))

    def sampler(key, p):
        return Cohort(COHORT, np.full(3, 1 / 3))

    algorithm = simfbo(problem, by_variable(STEPS), by_variable(SERVER))
    state = algorithm.init(start[0], start[1])._replace(v=jax.tree.map(np.asarray, start[2]))
    end = algorithm.round(state, SimulatedFederation(data, sampler, fixed(TAUS)), jax.random.key(0))
    return end.x, end.y, end.v


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("numpy_reference", "mlp", {}),
        ("torch_reference", "mlp", {}),
        pytest.param("torch_reference", "mlp", {"merged": True}, marks=pytest.mark.slow),
        pytest.param("torch_reference", "cnn", {}, marks=pytest.mark.slow),
        pytest.param("torch_reference", "cnn", {"channels_last": True}, marks=pytest.mark.slow),
    ],
)
def test_a_round_is_the_same_in_all_implementations(name, model, options):
    if name == "torch_reference":
        pytest.importorskip("torch")
    images, labels, rows, start = setting(model)
    step = reference(name).make_round(
        model, images, labels, rows, tau=TAUS, batch_size=8, steps=STEPS, server_steps=SERVER,
        draw=lambda client, step: rows[client], **options,
    )  # fmt: skip
    found = step(tuple(map(jax.tree.leaves, start)), COHORT, np.random.default_rng(0))
    expected = by_library(model)
    for theirs, ours, before in zip(found, expected, start, strict=True):
        for a, b, z in zip(theirs, jax.tree.leaves(ours), jax.tree.leaves(before), strict=True):
            change = np.abs(np.asarray(b) - z).max()
            np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-4 * change)
            assert change > 0
