"""What an iteration sends: the ledger against counts derived by hand, per client.

Clients keep nothing between exchanges, so x and y go down every time. With d_x = 157,000 and d_y =
2,010 for the MNIST perceptron, an exchange is written here as (down, up), each a pair of multiples
of d_x and d_y.
"""

import importlib

import jax
import numpy as np
import pytest

from simfbo import Ledger, Point, SimulatedFederation, cost
from simfbo.algorithms import (
    aggitd,
    fedbio,
    fedbioacc,
    fedmbo,
    fedmsa,
    fednest,
    lfednest,
    memfbo,
    shrofbo,
    simfbo,
    tuning_free,
)
from simfbo.core.sampling import without_replacement
from simfbo.datasets import ImageData
from simfbo.tasks import hyper_representation

STEPS = Point(x=0.1, y=0.1, v=0.1)
DX, DY, P = 157_000, 2_010, 3
K, N = 3, 4

GRADIENT = ((1, 1), (0, 1))  # (x, y) down, a gradient in y up
LOWER_LOCAL = ((1, 2), (0, 1))  # (x, y, q) down, a change of y up
PRODUCT = ((1, 2), (0, 1))  # (x, y, p) down, a product up
HYPERGRADIENT = ((1, 2), (1, 0))  # (x, y, v) down, a gradient in x up
UPPER_LOCAL = ((2, 1), (1, 0))  # (x, y, h) down, a change of x up
DIRECT = ((1, 1), (1, 0))  # (x, y) down, a gradient or a change of x up
ALL = ((1, 2), (1, 2))
TWICE = ((2, 4), (1, 2))  # (x, y, v) and as much again down, one change of each up
ESTIMATORS = ((2, 4), (2, 4))  # (x, y, v) and estimators of their directions, both ways
# Numbers beside them, (down, up): ||a_i||_1; the local steps before, and tau_i with a count.
EXTRA = {"shrofbo": (0, 1), "fedbioacc": (1, 2), "tuning-free": (0, 1)}

CASES = {
    "simfbo": (simfbo, (), [ALL]),
    "shrofbo": (shrofbo, (), [ALL]),
    "fedbio": (fedbio, (), [ALL]),
    "memfbo": (memfbo, (), [ALL]),
    "memfbo, order 2": (memfbo, (None, 100.0, 2), [ALL]),
    "fedmsa": (fedmsa, (), [TWICE, TWICE]),
    "fedbioacc": (fedbioacc, (), [ESTIMATORS]),
    "tuning-free": (
        lambda problem, _: tuning_free(lambda plan: shrofbo(problem, plan.local, plan.server)),
        (),
        [ALL],
    ),
    "fednest": (
        fednest,
        (K, N),
        K * [GRADIENT, LOWER_LOCAL] + [GRADIENT] + N * [PRODUCT] + [HYPERGRADIENT, UPPER_LOCAL],
    ),
    "fednest as released": (
        fednest,
        (K, N, "as_released"),
        K * [GRADIENT, LOWER_LOCAL] + [GRADIENT] + N * [PRODUCT] + [HYPERGRADIENT, UPPER_LOCAL],
    ),
    "lfednest": (lfednest, (K, N), K * [GRADIENT] + [DIRECT]),
}
ROUNDS = {
    "simfbo": 1, "shrofbo": 1, "fedbio": 1, "memfbo": 1, "memfbo, order 2": 1, "fedmsa": 2,
    "fedbioacc": 1, "tuning-free": 1, "fednest": 2 * K + N + 3,
    "fednest as released": 2 * K + N + 3, "lfednest": K + 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def mnist_like():
    """Return a task of MNIST's shapes and single precision, without MNIST."""
    with jax.enable_x64(False):
        images = np.arange(40 * 784, dtype=np.uint8).reshape(40, 28, 28)
        bundle = ImageData(images, np.arange(40, dtype=np.int32) % 10, images[:2], np.zeros(2), "")
        return hyper_representation(bundle, np.split(np.arange(40), 4), batch_size=2)


def ledger(task, algorithm, iterations=1):
    federation = SimulatedFederation(task.data, without_replacement(P))
    found = cost(algorithm, federation, task.x0, task.y0, iterations)
    assert federation.ledger == Ledger()  # only counted
    return found


def floats(exchanges):
    """Return the floats (down, up) of some exchanges by one client."""
    return tuple(sum(e[way][0] * DX + e[way][1] * DY for e in exchanges) for way in (0, 1))


@pytest.mark.parametrize("name", CASES)
def test_rounds_and_bytes(mnist_like, single_precision, name):
    factory, options, exchanges = CASES[name]
    total = ledger(mnist_like, factory(mnist_like.problem, STEPS, *options)).total
    more = EXTRA.get(name, (0, 0))
    down, up = (one + extra for one, extra in zip(floats(exchanges), more, strict=True))
    assert total.rounds == ROUNDS[name] == len(exchanges)
    assert (total.floats_down, total.floats_up) == (P * down, P * up)
    assert (total.bytes_down, total.bytes_up) == (4 * P * down, 4 * P * up)


@pytest.mark.parametrize("first", [0, K - 1])
def test_aggitd(mnist_like, single_precision, monkeypatch, first):
    module = importlib.import_module("simfbo.algorithms._aggitd")
    monkeypatch.setattr(module, "draw_terms", lambda key, count: first)
    total = ledger(mnist_like, aggitd(mnist_like.problem, STEPS, K)).total
    two_gradients, gradient_and_product = ((1, 1), (0, 2)), ((1, 2), (0, 2))
    riding = first * [GRADIENT] + [two_gradients] + (K - 1 - first) * [gradient_and_product]
    exchanges = [*riding, *K * [LOWER_LOCAL], HYPERGRADIENT, DIRECT, UPPER_LOCAL]
    down, up = floats(exchanges)
    assert total.rounds == 2 * K + 3 == len(exchanges)
    assert (total.bytes_down, total.bytes_up) == (4 * P * down, 4 * P * up)


@pytest.mark.parametrize("hops", [0, N - 1])
def test_fedmbo(mnist_like, single_precision, monkeypatch, hops):
    module = importlib.import_module("simfbo.algorithms._fedmbo")
    monkeypatch.setattr(module, "draw_terms", lambda key, count: hops)
    total = ledger(mnist_like, fedmbo(mnist_like.problem, STEPS, K, N)).total
    down, up = floats([*K * [GRADIENT], GRADIENT, *hops * [PRODUCT], HYPERGRADIENT])
    assert total.rounds == K + 2 + hops
    assert (total.bytes_down, total.bytes_up) == (4 * P * down, 4 * P * up)


def test_several_iterations_average_over_what_is_drawn(mnist_like, single_precision):
    rounds = ledger(mnist_like, fedmbo(mnist_like.problem, STEPS, K, N), 40).total.rounds / 40
    assert rounds == pytest.approx(K + 2 + (N - 1) / 2, abs=0.4)
