"""Aggregators against NumPy and SciPy, and in a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from simfbo import DebugFederation, Point, SimulatedFederation, UserError
from simfbo.algorithms import simfbo
from simfbo.core.data import from_clients
from simfbo.core.keys import keyed
from simfbo.robust.aggregation import (
    centred_clipping,
    channel,
    clipped_mean,
    combine,
    geometric_median,
    mean,
    median,
    needs_stack,
    trimmed_mean,
)
from simfbo.tasks import Quadratic

RNG = np.random.default_rng(0)
ENGINES = [SimulatedFederation, DebugFederation]
KEY = jax.random.key(0)
CENTRES = [geometric_median(), centred_clipping()]
ROBUST_RULES = [median(), trimmed_mean(0.2), clipped_mean(100.0), clipped_mean(), *CENTRES]


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


@pytest.mark.parametrize("rule", ROBUST_RULES)
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
        (lambda: centred_clipping(0.0), "The radius to clip to must be positive, got 0.0."),
        (lambda: centred_clipping(np.nan), "The radius to clip to must be positive, got nan."),
        (lambda: centred_clipping(np.inf), "The radius to clip to must be positive, got inf."),
        (lambda: centred_clipping(None, 0), "The number of iterations must be at least 1, got 0."),
        (lambda: geometric_median(0), "The number of iterations must be at least 1, got 0."),
        (lambda: geometric_median(8, 0.0), "The smoothing must lie in (0, 1), got 0.0."),
        (lambda: geometric_median(8, 1.0), "The smoothing must lie in (0, 1), got 1.0."),
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
    federation = engine(SEVEN, aggregators=ROBUST, absence=keyed(lambda key, ids: ids == 1))
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
    for rule in (mean(), median(), trimmed_mean(0.2), *CENTRES):
        federation = engine(SEVEN, aggregators=Point(y=rule))
        total, _ = federation.sum(own, np.ones(()), federation.cohort(KEY), KEY)
        errors[rule.name] = abs(float(total.y[0]) - 4.0)
    assert errors == {
        "mean": pytest.approx(71 / 7 - 4),
        "median": pytest.approx(0, abs=1e-12),
        "trimmed-mean": pytest.approx(0, abs=1e-12),
        "geometric-median": pytest.approx(0, abs=1.0),
        "centred-clipping": pytest.approx(0, abs=1.0),
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


@pytest.mark.parametrize("rule", ROBUST_RULES)
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
        (geometric_median(), lambda left: weiszfeld(left, np.full(len(left), 0.2), 8)),
        (centred_clipping(), lambda left: clipped_from(left, np.full(len(left), 0.2), None, 8)),
    ],
    ids=["median", "trimmed", "clipped", "geometric", "centred"],
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


# Rules that move a centre: all leaves of a channel are one vector


def distance(flat, centre):
    return np.linalg.norm(flat - centre, axis=1)


def numpy_median(flat, weights):
    """Return the weighted median of every column, where no values split the weight in halves."""
    order = np.argsort(flat, 0)
    reached = np.cumsum(weights[order], 0) > weights.sum() / 2
    return np.take_along_axis(np.take_along_axis(flat, order, 0), reached.argmax(0)[None], 0)[0]


def weiszfeld(flat, weights, steps, smoothing=1e-6):
    """Return the smoothed geometric median after some steps from the coordinate-wise median."""
    centre = numpy_median(flat, weights)
    floor = smoothing * numpy_median(distance(flat, centre)[:, None], weights)[0]
    for _ in range(steps):
        pull = weights / np.maximum(floor, distance(flat, centre))
        centre = pull @ flat / pull.sum()
    return centre


def clipped_from(flat, weights, radius, steps):
    """Return the centre after clipped steps from the coordinate-wise median."""
    centre = numpy_median(flat, weights)
    if radius is None:
        radius = numpy_median(distance(flat, centre)[:, None], weights)[0]
    for _ in range(steps):
        pull = weights * np.minimum(1, radius / np.maximum(1e-300, distance(flat, centre)))
        centre = centre + pull @ (flat - centre) / weights.sum()
    return centre


def cohort(seed, count, *shapes):
    """Return leaves, the same in one row per client, and weights that split nothing in halves."""
    rng = np.random.default_rng(seed)
    leaves = [3.0 + rng.normal(size=(count, *shape)) for shape in shapes]
    flat = np.concatenate([leaf.reshape(count, -1) for leaf in leaves], 1)
    return leaves, flat, rng.uniform(0.5, 1.5, count) / count


def joined(rule, leaves, weights):
    """Return a rule's result as one vector."""
    found = rule.combine([jnp.asarray(leaf) for leaf in leaves], jnp.asarray(weights))
    return np.concatenate([np.ravel(leaf) for leaf in found])


@pytest.mark.parametrize("seed", range(3))
def test_the_geometric_median_is_scipys(seed):
    """The minimiser of sum_i w_i ||z_i - c||, where the weighted unit vectors cancel."""
    leaves, flat, weights = cohort(seed, 9, (3,), (2, 2), ())
    found = joined(geometric_median(400, 1e-9), leaves, weights) / weights.sum()
    best = optimize.minimize(
        lambda c: weights @ distance(flat, c), flat.mean(0), method="BFGS", options={"gtol": 1e-9}
    )
    np.testing.assert_allclose(found, best.x, atol=1e-6)
    units = (flat - found) / distance(flat, found)[:, None]
    np.testing.assert_allclose(weights @ units, 0, atol=1e-9)
    few = joined(geometric_median(), leaves, weights) / weights.sum()
    assert weights @ distance(flat, few) <= (1 + 1e-4) * best.fun


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_centres_are_numpys(steps):
    leaves, flat, weights = cohort(5, 8, (4,), (2, 3))
    total = weights.sum()
    found = joined(geometric_median(steps), leaves, weights)
    np.testing.assert_allclose(found, total * weiszfeld(flat, weights, steps), rtol=1e-12)
    for radius in (None, 0.7, 100.0):
        found = joined(centred_clipping(radius, steps), leaves, weights)
        wanted = total * clipped_from(flat, weights, radius, steps)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    np.testing.assert_allclose(found, weights @ flat, rtol=1e-12)  # nothing is clipped: the mean


def test_in_one_dimension_the_geometric_median_is_the_median():
    leaf, weights = np.array([[1.0], [2.0], [4.0], [8.0], [90.0]]), np.full(5, 0.2)
    np.testing.assert_allclose(joined(geometric_median(), [leaf], weights), 4, rtol=1e-5)


@pytest.mark.parametrize("away", ["together", "apart"])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e30])
@pytest.mark.parametrize("rule", CENTRES, ids=lambda rule: rule.name)
def test_a_minority_moves_a_centre_no_further_than_theory_says(rule, size, away, single_precision):
    """With a share a < 1/2 hostile, honest messages within R of their mean h, ||c - h|| is at most

        C R,  C = (1 - a) / sqrt(1 - 2a)   (Minsker 2015, Lemma 2.1)   for the geometric median,
        max(C R, R + a / (1 - a) r)                                    for clipping with radius r.

    For the second: along the direction u from h to c, an honest message pulls back by at least
    min(r sqrt(1 - R^2/D^2), D - R) where D = ||c - h|| > R, and a hostile one by at most r away.
    """
    _, flat, _ = cohort(7, 10, (20,))
    mean = flat[4:].mean(0)
    largest, share = distance(flat[4:], mean).max(), 0.4
    direction = np.ones(20) if away == "together" else np.random.default_rng(1).normal(size=(4, 20))
    flat[:4] = size * direction
    found = joined(rule, [flat.astype("float32")], np.full(10, 0.1))
    bound = (1 - share) / np.sqrt(1 - 2 * share) * largest
    if rule.name == "centred-clipping":
        radius = np.median(distance(flat, np.median(flat, 0)))
        bound = max(bound, largest + share / (1 - share) * radius)
    assert np.linalg.norm(found - mean) <= bound


@pytest.mark.parametrize(
    "rule", [*CENTRES, median(), trimmed_mean(0.2)], ids=lambda rule: rule.name
)
@pytest.mark.parametrize("unit", [1e-25, 1e-3, 1e25])
def test_units_do_not_matter(rule, unit, single_precision):
    """Messages in another unit have the result in that unit, also where squares would overflow."""
    _, flat, weights = cohort(3, 7, (30,))
    flat, wanted = flat.astype("float32"), joined(rule, [flat.astype("float32")], weights)
    found = joined(rule, [np.float32(unit) * flat], weights)
    np.testing.assert_allclose(found / np.float32(unit), wanted, rtol=1e-5)


@pytest.mark.parametrize("rule", CENTRES, ids=lambda rule: rule.name)
def test_a_centre_counts_a_weight_of_two_as_a_client_twice(rule):
    leaves, flat, _ = cohort(4, 4, (5,))
    times = np.array([1, 3, 2, 1])
    wanted = joined(rule, [np.repeat(flat, times, 0)], np.full(7, 1 / 7))
    np.testing.assert_allclose(joined(rule, leaves, times / 7), wanted, rtol=1e-12)


@pytest.mark.parametrize("rule", CENTRES, ids=lambda rule: rule.name)
def test_where_most_messages_agree_exactly_they_are_the_centre(rule):
    """Then the median distance is zero, and must not be divided by."""
    flat = np.array([[1 / 3, 2.0]] * 3 + [[5.0, 6.0], [-1e9, 7.0]])
    np.testing.assert_allclose(joined(rule, [flat], np.full(5, 0.2)), flat[0], rtol=1e-12)
    np.testing.assert_array_equal(joined(rule, [0 * flat], np.full(5, 0.2)), [0, 0])


@pytest.mark.parametrize("rule", ROBUST_RULES, ids=lambda rule: rule.name)
def test_results_have_the_types_of_messages(rule, single_precision):
    kinds = ("float16", "bfloat16", "float32")
    leaves = [jnp.asarray(RNG.normal(size=(5, 3)), kind) for kind in kinds]
    found = rule.combine(leaves, equal(5))
    assert [leaf.dtype.name for leaf in found] == list(kinds)
    if rule in CENTRES:
        wide = rule.combine([leaf.astype("float32") for leaf in leaves], equal(5))
        for one, other in zip(found, wide, strict=True):
            np.testing.assert_allclose(one.astype("float32"), other, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("rule", CENTRES, ids=lambda rule: rule.name)
def test_centres_of_many_cohorts_at_once(rule):
    many, weights = RNG.normal(size=(3, 6, 4)), RNG.uniform(0.5, 1.5, (3, 6))
    (found,) = jax.jit(jax.vmap(rule.combine))([jnp.asarray(many)], jnp.asarray(weights))
    wanted = [joined(rule, [one], w) for one, w in zip(many, weights, strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
