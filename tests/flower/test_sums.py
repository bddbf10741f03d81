"""Partial sums: what a hostile node can send, the bound on it, and aggregators over nodes."""

import importlib
import sys
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import Gate, Point, UserError
from simfbo.core.exchange import Reason, Request
from simfbo.core.gate import squared_norms
from simfbo.core.sampling import Cohort
from simfbo.errors import TooFewReplies
from simfbo.flower.app import FlowerFederation
from simfbo.flower.deployment import simulate
from simfbo.flower.sums import Partial, combined_sums, partial_sum
from simfbo.flower.transport import Package
from simfbo.flower.wire import BadPackage
from simfbo.robust.aggregation import (
    centred_clipping,
    clipped_mean,
    geometric_median,
    median,
    trimmed_mean,
)

FOLDER = Path(__file__).parents[2] / "benchmarks" / "trust"


@pytest.fixture(scope="module")
def packages():
    """Return the module of the benchmark, which has real nodes in memory."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("packages")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def trials(packages):
    """Return a federation of five nodes with two clients each, in either mode."""
    with jax.enable_x64(False):
        yield {sums: packages.Trial(sums) for sums in (False, True)}


@pytest.fixture
def sums(trials, single_precision):
    """Return the federation whose nodes send sums, restored afterwards."""
    honest = dict(trials[True].grid.honest)
    yield trials[True]
    trials[True].grid.honest = honest


def send(trial, change, node=1):
    """Let a node send something else from now on; `change` takes settings and arrays."""
    place = node, "train.simfbo_step"
    settings, arrays, common = trial.grid.honest[place]
    settings, arrays = dict(settings), dict(arrays)
    common = change(settings, arrays) or common
    trial.grid.honest[place] = Package(settings, arrays, common)


def reordered(settings, arrays):
    found = {name: arrays[name] for name in reversed(list(arrays))}
    arrays.clear()
    arrays.update(found)


def put(name, change, **others):
    """Return a change of one array, or more."""

    def changed(settings, arrays):
        for one, function in {name: change, **others}.items():
            arrays[one] = function(arrays[one])

    return changed


W, Y = "message.x['w']", "message.y"
LIES = {
    "flat": (put(W, np.ravel), "sent a sum that does not match the request: it sent shape (6,)"),
    "scalar": (put(W, lambda a: a[0, 0]), "sent a sum that does not match the request"),
    "transposed": (put(W, np.transpose), "sent a sum that does not match the request: it sent sha"),
    "one axis more": (put(W, lambda a: a[None]), "sent a sum that does not match"),
    "stacked": (put(W, lambda a: np.stack([a, a])), "sent a sum that does not match"),
    "half precision": (put(W, lambda a: a.astype("float16")), "sent a sum that does not match"),
    "double precision": (put(W, lambda a: a.astype("float64")), "sent a sum that does not match"),
    "whole numbers": (put(W, lambda a: a.astype("int32")), "sent a sum that does not match"),
    "reordered": (reordered, "sent arrays in another order than requested"),
    "renamed": (lambda s, a: a.update({"message.z": a.pop(Y)}), "sent a sum that does not match"),
    "one more": (lambda s, a: a.update(extra=a[Y]), "sent arrays that were not requested"),
    "common": (lambda s, a: {"extra": a[Y]}, "sent arrays that were not requested"),
    "1e18": (put(Y, lambda a: a + 1e18), "sent a sum for clients 2, 3 whose .y has norm 3e+18"),
    "1e30": (put(W, lambda a: a + 1e30), "sent a sum for clients 2, 3 whose .x['w'] has norm"),
    "twice": (put(Y, lambda a: 2 * a), "sent a sum for clients 2, 3 whose .y has norm"),
    "no norms": (put("squares", lambda a: 0 * a), "sent a sum for clients 2, 3 whose .x['b']"),
    "negative": (put("squares", lambda a: -a), "sent a sum with negative squares of norms"),
    "no number": (put("squares", lambda a: a * np.nan), "sent a sum for clients 2, 3 although cl"),
    "infinite": (put("squares", lambda a: a + np.inf), "sent a sum for clients 2, 3 although clie"),
    "above the limit": (put("squares", lambda a: a + 1e8, **{Y: lambda a: a + 1e3}),
                        "sent a sum for clients 2, 3 although client 3 sent a message of norm 2e"),
    "norms by client": (put("squares", lambda a: a.sum(1)), "sent a sum without the norms"),
    "norms turned": (put("squares", np.transpose), "sent a sum without the norms"),
    "flags turned": (put("passed", lambda a: a[:, None]), "sent a sum without a list of the clien"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_sum_that_cannot_be_does_not_count(sums, lie):
    """The sum is that of the other nodes, times 10 / 8, and the next honest one is as the first."""
    change, text = LIES[lie]
    with np.errstate(invalid="ignore"):
        send(sums, change)
    found = sums.exchange()
    refusals = sums.federation.latest.refusals
    assert [one.client for one in refusals] == [2, 3]
    assert all(one.text.startswith(text) for one in refusals), refusals[0].text
    rest = [sum(leaves) for leaves in zip(*(sums.contributions[k] for k in (0, 2, 3, 4)))]
    for leaf, wanted in zip(found, rest, strict=True):
        np.testing.assert_allclose(leaf, 10 / 8 * wanted, rtol=1e-5)


def test_a_transposed_square_matrix_cannot_be_noticed(sums):
    """Its norm, shape and type are those of the truth: only its effect is bounded."""
    send(sums, put(Y, np.transpose))
    sums.exchange()
    assert sums.federation.latest.refusals == []


def test_after_every_lie_an_honest_exchange_is_as_the_first(sums):
    assert sums.require_same() == []


def test_hundreds_of_mutated_packages(packages, single_precision, monkeypatch):
    """The short form of benchmarks/trust/packages.py."""
    monkeypatch.setattr(packages.discovery, "_RETRY", 0.0)
    monkeypatch.setattr(packages.discovery.LOG, "disabled", True)
    found = packages.attack(count=300, seed=7)
    assert found["failures"] == []
    assert found["packages"] >= 300


def summed(messages, weights):
    """Return the package of an honest node, which adds one message after the other."""
    total = np.zeros(messages.shape[1:], messages.dtype)
    for message, weight in zip(messages, weights, strict=True):
        total = total + weight.astype(messages.dtype) * message
    squares = np.asarray(jax.vmap(squared_norms)(messages), float)
    ids = np.arange(len(messages), dtype=np.int32)
    arrays = {"ids": ids, "squares": squares, "passed": np.ones(len(ids), bool)}
    return Package({"exchange": 1}, arrays | {"message": total})


def checked(package, weights, gate=Gate()):
    """Return a node's sum as the server takes it."""
    like = package.arrays["message"]
    ids = package.arrays["ids"]
    request = Request(1, "step", ids, jax.ShapeDtypeStruct(like.shape, like.dtype))
    return partial_sum(package, request, Cohort(ids, weights), gate)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [("float16", False), ("bfloat16", False), ("float32", False), ("float32", True), (float, True)],
)
def test_no_honest_sum_is_refused(dtype, wide):
    """Equal messages make the bound an equality, up to rounding; tiny ones have no squares."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(wide):
        for clients, size, scale in product((1, 30), (1, 5000), (1.0, 1e-4, 1e-30)):
            weights = rng.uniform(0.001, 0.01, clients)
            one = scale * (1 + rng.random((1, size)))
            for messages in (np.repeat(one, clients, 0), one * rng.normal(size=(clients, 1))):
                package = summed(messages.astype(jnp.dtype(dtype)), weights)
                assert checked(package, weights).passed.all()


@pytest.mark.parametrize("exchange", [True, 1.0, "1", None, 2, [1]])
def test_a_sum_says_which_exchange_it_answers(exchange):
    package = summed(np.ones((2, 3)), np.ones(2))
    with pytest.raises(BadPackage, match="another exchange") as error:
        checked(package._replace(settings={"exchange": exchange}), np.ones(2))
    assert error.value.reason is Reason.WRONG_EXCHANGE


def test_what_passes_is_within_the_limit_times_the_weights():
    """The largest accepted multiple of random sums, with the norms that allow the most."""
    rng, gate = np.random.default_rng(1), Gate(max_norm=2.0)
    for clients, size in product((1, 10), (1, 50)):
        weights = rng.random(clients)
        package = summed(rng.normal(size=(clients, size)), weights)
        package.arrays["squares"] = np.full((clients, 1), 4.0)
        unit = package.arrays["message"] / np.linalg.norm(package.arrays["message"])
        package.arrays["message"] = 0.999 * 2.0 * weights.sum() * unit
        assert checked(package, weights, gate).passed.all()
        for factor in (1.001, 1e18):
            package.arrays["message"] = factor * 2.0 * weights.sum() * unit
            with pytest.raises(BadPackage, match="more than the") as error:
                checked(package, weights, gate)
            assert error.value.reason is Reason.TOO_LARGE


def numpy_median(values, weights):
    """Return the weighted median, the midpoint of those that split the weight in halves."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    low = values[order][np.argmax(reached >= 0.5 - 1e-9)]
    return (low + values[order][np.argmax(reached > 0.5 + 1e-9)]) / 2


def numpy_trimmed(values, weights, cut):
    kept = np.argsort(values)[cut : len(values) - cut]
    return values[kept] @ weights[kept] / weights[kept].sum()


def combined_by_numpy(name, means, weights):
    """Return sum_k W_k times what `name` makes of the nodes' means, coordinate by coordinate."""
    if name == "clipped":
        norms = np.linalg.norm(means, axis=1)
        shrink = np.minimum(1, np.median(norms) / norms)
        return (weights * shrink) @ means
    rule = numpy_median if name == "median" else lambda v, w: numpy_trimmed(v, w, int(0.2 * len(v)))
    return weights.sum() * np.array([rule(column, weights) for column in means.T])


CENTRES = {"geometric": geometric_median(), "centred": centred_clipping()}
RULES = {"median": median(), "trimmed": trimmed_mean(0.2), "clipped": clipped_mean(), **CENTRES}


@pytest.mark.parametrize("name", [name for name in RULES if name not in CENTRES])
def test_nodes_are_combined_by_their_means(name):
    """Against NumPy, with nodes that are away and nodes whose clients were all refused."""
    rng = np.random.default_rng(2)
    weights, sums = rng.uniform(0.5, 1.5, 7), rng.normal(size=(7, 3))
    parts = [Partial(Point(y=jnp.asarray(s)), None, None, w) for s, w in zip(sums, weights)]
    parts[2], parts[5] = None, Partial(Point(y=jnp.zeros(3)), None, None, 0.0)
    there = [0, 1, 3, 4, 6]
    found = combined_sums(parts, Point(y=RULES[name]), Point(y=jnp.zeros(3))).y
    means = sums[there] / weights[there, None]
    np.testing.assert_allclose(found, combined_by_numpy(name, means, weights[there]), rtol=1e-6)


def test_no_node_at_all_gives_zero():
    assert not combined_sums([], Point(y=median()), Point(y=jnp.zeros(3))).y.any()


@pytest.mark.parametrize("name", [None, *RULES])
def test_nodes_that_agree_give_the_plain_sum(name):
    weights = np.array([0.1, 0.5, 0.4])
    parts = [Partial(Point(y=w * jnp.arange(1.0, 4.0)), None, None, w) for w in weights]
    found = combined_sums(parts, Point(y=name and RULES[name]), Point(y=jnp.zeros(3))).y
    np.testing.assert_allclose(found, np.arange(1.0, 4.0), rtol=1e-12)


def test_one_hostile_node_of_five_cannot_move_the_median_out_of_the_others_range(
    packages, single_precision
):
    """Through the real path, with equal weights; a mean of three of the others' is trimmed too."""
    rules = Point(x=median(), y=trimmed_mean(0.2), v=median())
    trial = packages.Trial(True, node_aggregators=rules, p=[1] * 10, gate=Gate())
    honest = [0, 1, 2, 4]
    means = [np.stack([trial.contributions[k][leaf] for k in honest]) * 5 for leaf in range(4)]
    for size in (-1e16, -1e3, 0.0, 1e3, 1e16):

        def lie(settings, arrays, size=size):
            arrays["squares"] = np.full_like(arrays["squares"], 1e36)
            for name in [name for name in arrays if name.startswith("message")]:
                arrays[name] = np.full_like(arrays[name], size)

        send(trial, lie, node=3)
        for found, own in zip(trial.exchange(), means, strict=True):
            assert trial.federation.latest.admitted.all()
            slack = 1e-5 * np.abs(own).max()
            assert (found >= own.min(0) - slack).all()
            assert (found <= own.max(0) + slack).all()


def test_aggregators_over_nodes_without_a_node_and_a_client(packages, single_precision):
    """Node 2 sends nonsense and node 4 refuses client 9: against NumPy, times 10 / 7."""
    trial = packages.Trial(True, node_aggregators=Point(y=median()))
    send(trial, put(Y, np.ravel), node=2)
    only = trial.grid.honest[4, "train.simfbo_step"].arrays
    weights = trial.cohort.weights
    part = {name: 0.4 * a for name, a in only.items() if name.startswith("message")}
    part["passed"] = np.array([True, False])
    send(trial, lambda s, a: a.update(part), node=4)
    found = trial.exchange()[2]
    totals = np.array([weights[0:2].sum(), weights[2:4].sum(), weights[6:8].sum(), weights[8]])
    sums = np.stack([*(trial.contributions[k][2] for k in (0, 1, 3)), part[Y]])
    means = (sums.reshape(4, -1).T / totals).T
    wanted = 10 / 7 * combined_by_numpy("median", means, totals)
    np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-5)
    reasons = {one.client: one.reason for one in trial.federation.latest.refusals}
    assert reasons == {4: "malformed", 5: "malformed", 9: Reason.REFUSED_BY_NODE}


def test_no_sum_left_ends_the_exchange(sums):
    for node in range(5):
        send(sums, put(Y, lambda a: a + 1e18), node)
    with pytest.raises(TooFewReplies, match="only 0 of 10 replies"):
        sums.exchange()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"partial_sums": False}, "set partial_sums=True"),
        ({"partial_sums": True, "aggregators": Point(y=median())}, "set one of them"),
    ],
)
def test_aggregators_over_nodes_that_cannot_be(packages, options, sentence):
    plan = packages.deployment(node_aggregators=Point(y=median()), **options)
    with pytest.raises(UserError, match=sentence):
        FlowerFederation(packages.Nodes(plan), plan)
    with pytest.raises(UserError, match="A simulation has no nodes"):
        simulate(plan)
