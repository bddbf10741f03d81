"""Aggregators against NumPy and SciPy, and in a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from simfbo import DebugFederation, Point, SimulatedFederation, UserError
from simfbo.algorithms import simfbo
from simfbo.core.aggregation import (
    channel,
    clipped_mean,
    combine,
    mean,
    median,
    needs_stack,
    trimmed_mean,
)
from simfbo.core.data import from_clients
from simfbo.tasks import Quadratic

RNG = np.random.default_rng(0)
ENGINES = [SimulatedFederation, DebugFederation]
KEY = jax.random.key(0)


def stack(count, *shapes):
    return [jnp.asarray(RNG.normal(size=(count, *shape))) for shape in shapes]


def equal(count):
    return jnp.full(count, 1 / count)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_median_is_numpys(count):
    (leaf,) = stack(count, (2, 3))
    (found,) = median().combine([leaf], equal(count))
    np.testing.assert_allclose(found, np.median(leaf, 0), rtol=1e-12)


@pytest.mark.parametrize(("count", "share"), [(1, 0.49), (10, 0.1), (100, 0.29), (9, 0.49)])
def test_trimmed_mean_is_scipys(count, share):
    (leaf,) = stack(count, (6,))
    (found,) = trimmed_mean(share).combine([leaf], equal(count))
    cut = int(np.floor(round(share * count, 9)))
    kept = np.sort(np.asarray(leaf), 0)[cut : count - cut]
    np.testing.assert_allclose(found, kept.mean(0), rtol=1e-10)
    if round(share * count, 9) == share * count:
        np.testing.assert_allclose(found, stats.trim_mean(leaf, share, 0), rtol=1e-10)


def test_a_weight_of_two_is_a_client_twice():
    """Weighted rules against the plain ones on a cohort in which clients stand several times."""
    (leaf,) = stack(4, (5,))
    times = [1, 3, 2, 1]
    repeated = jnp.repeat(leaf, jnp.array(times), 0)
    weights = jnp.array(times) / 7
    (found,) = median().combine([leaf], weights)
    np.testing.assert_allclose(found, np.median(repeated, 0), rtol=1e-12)
    (found,) = trimmed_mean(0.0).combine([leaf], weights)
    np.testing.assert_allclose(found, np.mean(repeated, 0), rtol=1e-12)
    (found,) = trimmed_mean(0.25).combine([leaf], weights)
    order = np.argsort(np.asarray(leaf), 0)[1:3]
    values = np.take_along_axis(np.asarray(leaf), order, 0)
    spread = np.array(times)[order]
    np.testing.assert_allclose(found, (values * spread).sum(0) / spread.sum(0), rtol=1e-12)


@pytest.mark.parametrize("rule", [median(), trimmed_mean(0.2), clipped_mean(100.0)])
def test_weights_that_do_not_sum_to_one_scale_the_result(rule):
    """Where all messages agree, every rule returns sum_i w_i z."""
    leaf = jnp.ones((6, 2)) * jnp.array([3.0, -1.0])
    weights = jnp.array([0.1, 0.5, 0.2, 0.3, 0.4, 0.3])
    (found,) = rule.combine([leaf], weights)
    np.testing.assert_allclose(found, 1.8 * np.array([3.0, -1.0]), rtol=1e-12)


@pytest.mark.parametrize("norm", [None, 2.6])
def test_clipped_mean_by_hand(norm):
    rng = np.random.default_rng(1)
    leaves = [jnp.asarray(rng.normal(size=(5, *shape))) for shape in ((3,), (2, 2))]
    weights = np.array([0.1, 0.3, 0.2, 0.25, 0.15])
    flat = np.concatenate([np.reshape(leaf, (5, -1)) for leaf in leaves], 1)
    norms = np.linalg.norm(flat, axis=1)
    limit = np.median(norms) if norm is None else norm
    clipped = flat * np.minimum(1, limit / norms)[:, None]
    assert 0 < (norms > limit).sum() < 5
    found = clipped_mean(norm).combine(leaves, jnp.asarray(weights))
    together = np.concatenate([np.ravel(leaf) for leaf in found])
    np.testing.assert_allclose(together, weights @ clipped, rtol=1e-12)


def test_a_message_of_zeros_is_not_divided_by():
    (found,) = clipped_mean(1.0).combine([jnp.zeros((3, 2))], equal(3))
    np.testing.assert_array_equal(found, [0, 0])


SHARE = "The share to trim at either end must lie in [0, 0.5)"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: trimmed_mean(0.5), f"{SHARE}, got 0.5."),
        (lambda: trimmed_mean(-0.1), f"{SHARE}, got -0.1."),
        (lambda: clipped_mean(0.0), "The norm to clip to must be positive, got 0.0."),
        (lambda: clipped_mean(-1.0), "The norm to clip to must be positive, got -1.0."),
        (lambda: clipped_mean(float("nan")), "The norm to clip to must be positive, got nan."),
        (lambda: clipped_mean(float("inf")), "The norm to clip to must be positive, got inf."),
    ],
)  # fmt: skip
def test_mistakes(make, sentence):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == sentence


def test_channels_are_combined_each_in_its_way():
    x, y, other = stack(5, (2,), (3,), ())
    weights = np.array([0.1, 0.3, 0.2, 0.25, 0.15])
    rules = Point(x=median(), v=clipped_mean())
    message = (Point(x={"w": x}, y=y), other)
    assert needs_stack(rules, message)
    found, rest = combine(rules, message, weights)
    np.testing.assert_allclose(found.x["w"], median().combine([x], jnp.asarray(weights))[0])
    np.testing.assert_allclose(found.y, weights @ np.asarray(y), rtol=1e-12)
    np.testing.assert_allclose(rest, weights @ np.asarray(other), rtol=1e-12)
    assert found.v is None


def test_stacks_are_kept_only_where_needed():
    message = Point(x=np.ones(2), y=np.ones(1))
    assert not needs_stack(Point(), message)
    assert not needs_stack(Point(v=median()), message)
    assert not needs_stack(Point(x=mean(), y=mean()), message)
    assert needs_stack(Point(y=median()), message)
    assert mean().combine is None
    assert channel(()) is None


# In an engine


SAMPLES = [np.array([[float(m), m**2, -m]]) for m in (1, 2, 3, 4, 5, 6, 50)]
SEVEN = from_clients(SAMPLES, SAMPLES)
ROBUST = Point(x=trimmed_mean(0.2), y=median(), v=clipped_mean(9.0))


def own(payload, client):
    """Return the client's sample in all channels, and a number outside them."""
    sample = payload * client.data.lower_batch(client.key)[0]
    return Point(sample, sample, sample), sample[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_those_who_do_not_reply_do_not_enter(engine):
    """Every channel by its rule, over the messages of the six who reply; all weigh 1/6."""
    federation = engine(SEVEN, aggregators=ROBUST, absence=lambda key, ids: ids == 1)
    found, rest = federation.sum(own, np.ones(()), federation.cohort(KEY), KEY)
    left = np.delete(np.concatenate(SAMPLES), 1, 0)
    shrink = np.minimum(1, 9.0 / np.linalg.norm(left, axis=1))
    np.testing.assert_allclose(found.x, stats.trim_mean(left, 0.2), rtol=1e-12)
    np.testing.assert_allclose(found.y, np.median(left, 0), rtol=1e-12)
    np.testing.assert_allclose(found.v, (left * shrink[:, None]).mean(0), rtol=1e-12)
    np.testing.assert_allclose(rest, left[:, 0].mean(), rtol=1e-12)
    assert federation.ledger.total.floats_up == 6 * 10


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hostile_client_moves_the_mean_but_not_the_median(engine):
    errors = {}
    for rule in (mean(), median(), trimmed_mean(0.2)):
        federation = engine(SEVEN, aggregators=Point(y=rule))
        total, _ = federation.sum(own, np.ones(()), federation.cohort(KEY), KEY)
        errors[rule.name] = abs(float(total.y[0]) - 4.0)
    assert errors == {
        "mean": pytest.approx(71 / 7 - 4),
        "median": pytest.approx(0, abs=1e-12),
        "trimmed-mean": pytest.approx(0, abs=1e-12),
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_gathered_messages_are_not_aggregated(engine):
    federation = engine(SEVEN, aggregators=ROBUST)
    found, rest = federation.gather(own, np.ones(()), federation.cohort(KEY), KEY)
    for part in found:
        np.testing.assert_array_equal(part, np.concatenate(SAMPLES))
    np.testing.assert_array_equal(rest, np.concatenate(SAMPLES)[:, 0])


SKEWED = Quadratic(
    *(np.ones((3, 1, 1)), np.ones((3, 1, 1)), np.array([[0.0], [0.0], [3.0]])),
    *(np.ones((3, 1, 1)), np.zeros((3, 1)), np.ones((3, 1, 1)), np.zeros((3, 1))),
)


@pytest.mark.parametrize(
    ("rule", "x", "y"),
    [(mean(), -0.5, 0.5), (median(), 0.0, 0.0), (trimmed_mean(0.34), 0.0, 0.0)],
)
def test_where_honest_clients_are_skewed_only_the_mean_finds_the_solution(rule, x, y):
    """The clients' lower gradients are y - x - (0, 0, 3).

    Their mean vanishes at y = x + 1, the solution, and their median at y = x. The upper problem,
    (x^2 + y^2)/2, then has its minimum at x = -1/2, and with y = x the direction x + v = 2x
    vanishes at 0. There a round moves nothing, and from elsewhere rounds lead there.
    """
    task = SKEWED.task()
    federation = SimulatedFederation(task.data, aggregators=Point(y=rule))
    method = simfbo(task.problem, Point(x=0.2, y=0.5, v=0.5))
    end = Point(*(np.array([value]) for value in (x, y, y)))  # v = y where d_v = v - y vanishes

    def after(state, rounds):
        state = method.init(*state[:2])._replace(v=jnp.asarray(state.v))
        for _ in range(rounds):
            state = method.round(state, federation, KEY)
        return state

    still = after(end, 1)
    np.testing.assert_allclose(np.ravel(still[:3]), np.ravel(end), atol=1e-12)
    errors = task.evaluate(still)
    np.testing.assert_allclose(errors["x_error"], x + 0.5, atol=1e-12)
    np.testing.assert_allclose(errors["y_error"], 0 if rule.combine is None else 1, atol=1e-12)
    near = after(Point(*(part + 1.0 for part in end)), 40)
    assert np.abs(np.ravel(near[:3]) - np.ravel(end)).max() < 0.05


def test_of_equal_values_the_first_is_cut_below_and_the_last_above():
    """Which of them it is matters where they weigh differently, and must not depend on chance."""
    leaf, weights = np.array([[1.0], [1.0], [2.0], [3.0], [3.0]]), np.array([5, 1, 2, 3, 7]) / 18
    (found,) = trimmed_mean(0.2).combine([jnp.asarray(leaf)], jnp.asarray(weights))
    np.testing.assert_allclose(found, (1 * 1 + 2 * 2 + 3 * 3) / 6, rtol=1e-12)


@pytest.mark.parametrize("rule", [median(), trimmed_mean(0.2)])
def test_more_coordinates_than_a_block_and_ties(rule):
    """Against NumPy, on values that repeat, weighted by repetition for the median."""
    leaf = RNG.integers(0, 4, size=(9, 1300)).astype(float)
    ones = stats.trim_mean(leaf, 0.2, 0) if rule.name == "trimmed-mean" else np.median(leaf, 0)
    np.testing.assert_allclose(rule.combine([jnp.asarray(leaf)], equal(9))[0], ones, rtol=1e-12)
    if rule.name == "median":
        times = np.array([1, 2, 1, 3, 1, 1, 2, 1, 2])
        (found,) = rule.combine([jnp.asarray(leaf)], jnp.asarray(times / 14))
        np.testing.assert_allclose(found, np.median(np.repeat(leaf, times, 0), 0), rtol=1e-12)


@pytest.mark.parametrize("rule", [median(), trimmed_mean(0.2), clipped_mean()])
def test_leaves_without_numbers_and_of_one(rule):
    empty, one = rule.combine([jnp.zeros((5, 0)), jnp.ones(5)], equal(5))
    assert empty.shape == (0,)
    np.testing.assert_allclose(one, 1, rtol=1e-12)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (median(), lambda left: np.median(left, 0)),
        (trimmed_mean(0.2), lambda left: stats.trim_mean(left, 0.2)),
        (clipped_mean(), lambda left: clipped(left, np.median(np.linalg.norm(left, axis=1)))),
    ],
    ids=["median", "trimmed", "clipped"],
)
def test_a_client_of_weight_zero_is_not_there(rule, expected):
    """Five weigh the same and two nothing, whatever those sent."""
    there = np.array([True, False, True, True, False, True, True])
    for absent in (0.0, 1e9):
        leaf = np.where(there[:, None], np.random.default_rng(2).normal(size=(7, 4)), absent)
        (found,) = rule.combine([jnp.asarray(leaf)], jnp.asarray(there / 5))
        np.testing.assert_allclose(found, expected(leaf[there]), rtol=1e-12)


def clipped(left, limit):
    shrink = np.minimum(1, limit / np.linalg.norm(left, axis=1))
    return (left * shrink[:, None]).mean(0)
