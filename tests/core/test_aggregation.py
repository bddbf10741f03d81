"""Aggregators against NumPy and SciPy, and in a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from simfbo import Aggregators, DebugFederation, SimulatedFederation, Steps, UserError, simfbo
from simfbo.core.aggregation import channel, clipped_mean, mean, median, trimmed_mean
from simfbo.core.problem import Point
from simfbo.runs.runner import run
from simfbo.tasks._quadratic import Quadratic, random_quadratic

RNG = np.random.default_rng(0)
ENGINES = [SimulatedFederation, DebugFederation]
TASK = random_quadratic(7, 2, 3, heterogeneity=0.5, seed=2).task()


def stack(count, *shapes):
    return [jnp.asarray(RNG.normal(size=(count, *shape))) for shape in shapes]


def equal(count):
    return jnp.full(count, 1 / count)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 10, 30])
def test_median_is_numpys(count):
    leaves = stack(count, (4,), (2, 3))
    for found, leaf in zip(median().combine(leaves, equal(count)), leaves):
        np.testing.assert_allclose(found, np.median(leaf, 0), rtol=1e-12)


@pytest.mark.parametrize("count", [1, 4, 10, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.29, 0.49])
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
    rules = Aggregators(x=median(), v=clipped_mean())
    message = (Point(x={"w": x}, y=y), other)
    assert rules.need_stack(message)
    found, rest = rules.combine(message, weights)
    np.testing.assert_allclose(found.x["w"], median().combine([x], jnp.asarray(weights))[0])
    np.testing.assert_allclose(found.y, weights @ np.asarray(y), rtol=1e-12)
    np.testing.assert_allclose(rest, weights @ np.asarray(other), rtol=1e-12)
    assert found.v is None


def test_stacks_are_kept_only_where_needed():
    message = Point(x=np.ones(2), y=np.ones(1))
    assert not Aggregators().need_stack(message)
    assert not Aggregators(v=median()).need_stack(message)
    assert Aggregators(y=median()).need_stack(message)
    assert mean().combine is None
    assert channel(()) is None


def go(engine, absence=None, method=simfbo, rounds=3, **rules):
    federation = engine(TASK.data, aggregators=Aggregators(**rules), absence=absence)
    return run(
        method(TASK.problem, Steps(0.2, 0.2, 0.1)), federation, TASK.x0, TASK.y0, rounds=rounds
    )


ROBUST = {"x": trimmed_mean(0.2), "y": median(), "v": clipped_mean()}


def test_engines_agree():
    a, b = (go(engine, lambda key, ids: ids == 1, **ROBUST) for engine in ENGINES)
    for name in ("x", "y", "v"):
        np.testing.assert_allclose(getattr(a.state, name), getattr(b.state, name), rtol=1e-9)
    assert a.records[-1]["bytes_up"] == b.records[-1]["bytes_up"]


@pytest.mark.parametrize("engine", ENGINES)
def test_those_who_do_not_reply_do_not_enter_the_median(engine):
    """Against the median of the messages of those who do, computed one by one."""
    gone = 2
    history = go(engine, lambda key, ids: ids == gone, rounds=1, y=median())
    plain = engine(TASK.data)
    cohort = plain.cohort(jax.random.key(0))
    work = simfbo(TASK.problem, Steps(0.2, 0.2, 0.1)).works[0]
    state = Point(TASK.x0, TASK.y0, jnp.zeros_like(TASK.y0))
    apart = cohort._replace(weights=np.eye(7))
    key = jax.random.fold_in(jax.random.key(0), 1)
    messages = plain.aggregate(work, state, apart, key)
    left = np.delete(np.asarray(messages.y), gone, 0)
    np.testing.assert_allclose(history.state.y, TASK.y0 - 0.2 * np.median(left, 0), rtol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hostile_client_moves_the_mean_but_not_the_median(engine):
    def work(payload, client):
        return Point(y=jnp.where(client.data.client == 6, 1e6, payload)[None])

    for rule, limit in ((mean(), 1e5), (median(), 1e-9), (trimmed_mean(0.2), 1e-9)):
        federation = engine(TASK.data, aggregators=Aggregators(y=rule))
        cohort = federation.cohort(jax.random.key(0))
        total = federation.aggregate(work, np.ones(()), cohort, jax.random.key(0))
        error = abs(float(total.y[0]) - 1.0)
        assert (error > limit) if rule.combine is None else (error < limit)


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
    vanishes at 0.
    """
    task = SKEWED.task()
    federation = SimulatedFederation(task.data, aggregators=Aggregators(y=rule))
    method = simfbo(task.problem, Steps(0.5, 0.5, 0.2))
    state = run(method, federation, np.ones(1), 2 * np.ones(1), rounds=200).state
    np.testing.assert_allclose([state.x[0], state.y[0]], [x, y], atol=1e-9)
    errors = task.evaluate(state)
    np.testing.assert_allclose(errors["x_error"], x + 0.5, atol=1e-9)
    np.testing.assert_allclose(errors["y_error"], 0 if rule.combine is None else 1, atol=1e-9)


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


@pytest.mark.parametrize("rule", [median(), trimmed_mean(0.3), clipped_mean(), clipped_mean(1.0)])
def test_a_client_of_weight_zero_is_not_there(rule):
    leaves, weights = stack(7, (4,), (2, 3)), np.array([0.1, 0, 0.3, 0.2, 0, 0.25, 0.15])
    there = np.flatnonzero(weights)
    found = rule.combine(leaves, jnp.asarray(weights))
    alone = rule.combine([leaf[there] for leaf in leaves], jnp.asarray(weights[there]))
    for a, b in zip(found, alone):
        np.testing.assert_allclose(a, b, rtol=1e-12)
