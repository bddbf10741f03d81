"""Clients' data: exact means for unequal clients, batches of own rows only, drawn uniformly."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core.data import federate, from_clients
from simfbo.core.problem import BilevelProblem, Weighted, directions, evaluate
from simfbo.errors import UserError

SIZES = (1, 3, 7)
ROWS = np.split(np.random.default_rng(0).permutation(11), np.cumsum(SIZES)[:-1])
POINTS = np.random.default_rng(1).normal(size=(11, 2))


def squares(x, y, batch):
    """Return mean ||y - s||^2 / 2 + ||x||^2; its gradient in y is y - mean(s)."""
    return 0.5 * jnp.mean(jnp.sum((y - batch) ** 2, axis=-1)) + jnp.sum(x**2)


PROBLEM = BilevelProblem(upper=squares, lower=squares)
DIRECTIONS = jax.jit(partial(directions, PROBLEM))
VALUE = jax.jit(partial(evaluate, squares))


@pytest.fixture(scope="module")
def unequal():
    return federate(POINTS, lower=ROWS, upper=ROWS[::-1])


@pytest.mark.parametrize("client", range(3))
def test_full_batches_of_unequal_clients_are_exact_means(unequal, client):
    y, x = jnp.array([0.3, -0.2]), jnp.array([1.0])
    lower, upper = POINTS[ROWS[client]], POINTS[ROWS[::-1][client]]
    batch = unequal.client(client).lower_batch(jax.random.key(0))
    assert isinstance(batch, Weighted)
    mean = 0.5 * np.mean(np.sum((np.asarray(y) - lower) ** 2, axis=1)) + 1
    np.testing.assert_allclose(VALUE(x, y, batch), mean, rtol=1e-14)

    v = jnp.array([2.0, 5.0])
    other = unequal.client(client).upper_batch(jax.random.key(0))
    d = DIRECTIONS(x, y, v, batch, other)
    np.testing.assert_allclose(d.y, y - lower.mean(axis=0), atol=1e-14)
    np.testing.assert_allclose(d.v, v - (y - upper.mean(axis=0)), atol=1e-14)
    np.testing.assert_allclose(d.x, 2 * x, atol=1e-14)


def test_weights_are_one_over_the_count_and_zero_on_padding(unequal):
    for client, size in enumerate(SIZES):
        weights = np.asarray(unequal.lower.full(client).weights)
        np.testing.assert_allclose(weights, [1 / size] * size + [0] * (7 - size), rtol=1e-15)


def test_weights_are_single_where_the_user_is(single_precision):
    data = federate(POINTS.astype(np.float32), lower=ROWS, upper=ROWS)
    y = jnp.zeros(2)
    value = VALUE(jnp.zeros(1), y, data.lower.full(1))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, 0.5 * np.mean(np.sum(POINTS[ROWS[1]] ** 2, 1)), rtol=1e-6)


@pytest.mark.parametrize("client", range(3))
def test_padding_holds_nothing_of_others(client):
    # Whatever is not this client's is NaN, which even a weight of zero would let through.
    points = np.full_like(POINTS, np.nan)
    points[ROWS[client]] = POINTS[ROWS[client]]
    data = federate(points, lower=ROWS, upper=ROWS)
    batch = data.lower.full(client)
    assert np.isfinite(np.asarray(batch.samples)).all()
    slope = jax.jit(jax.grad(VALUE, 1))(np.zeros(1), np.zeros(2), batch)
    np.testing.assert_allclose(slope, -POINTS[ROWS[client]].mean(axis=0), atol=1e-14)


def test_full_batches_of_equal_clients_are_plain(unequal):
    rows = [np.array([4, 2]), np.array([9, 0])]
    data = federate(POINTS, lower=rows, upper=ROWS[:2])
    np.testing.assert_array_equal(data.client(1).lower_batch(jax.random.key(0)), POINTS[[9, 0]])
    assert (data.lower.equal, data.upper.equal) == (True, False)


@pytest.fixture(scope="module")
def drawn():
    """Return, for every client, the rows in 3,000 minibatches of 4."""
    data = federate(np.arange(11), lower=ROWS, upper=ROWS[::-1], batch_size=4)
    keys = jax.random.split(jax.random.key(5), 3000)

    @jax.jit
    @jax.vmap
    def batches(key):
        return [data.client(i).lower_batch(key) for i in range(3)]

    return [np.asarray(batch) for batch in batches(keys)]


def test_minibatches_hold_own_rows_uniformly_often(drawn):
    for rows, batches in zip(ROWS, drawn, strict=True):
        assert batches.shape == (3000, 4)
        found, counts = np.unique(batches, return_counts=True)
        np.testing.assert_array_equal(found, np.sort(rows))
        expected = 12_000 / len(rows)
        # Six degrees of freedom at most: 22.5 is passed once in a thousand.
        assert np.sum((counts - expected) ** 2 / expected) < 22.5


def test_minibatches_are_drawn_with_replacement_and_by_key(drawn):
    repeats = np.mean([len(set(batch)) < 4 for batch in drawn[2].tolist()])
    np.testing.assert_allclose(repeats, 1 - 6 * 5 * 4 / 7**3, atol=0.03)
    assert len(np.unique(drawn[2], axis=0)) > 1000


def test_the_same_key_draws_the_same_batch():
    data = federate(np.arange(11), lower=ROWS, upper=ROWS, batch_size=5)
    one, two = (data.client(2).lower_batch(jax.random.key(3)) for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_samples_are_held_once():
    samples = {"points": POINTS, "labels": np.arange(11, dtype=np.int32)}
    data = federate(samples, lower=ROWS, upper=ROWS[::-1])
    assert data.lower.samples["points"] is data.upper.samples["points"]
    assert data.lower.samples["labels"] is data.upper.samples["labels"]
    batch = data.lower.full(1).samples
    np.testing.assert_array_equal(batch["points"][:3], POINTS[ROWS[1]])
    np.testing.assert_array_equal(batch["labels"][:3], ROWS[1])
    assert batch["labels"].dtype == np.int32


def test_weights_follow_sizes_unless_given():
    assert federate(POINTS, lower=ROWS, upper=ROWS[::-1]).p.tolist() == [8 / 22, 6 / 22, 8 / 22]
    assert federate(POINTS, lower=ROWS, upper=ROWS).p.tolist() == [1 / 11, 3 / 11, 7 / 11]
    assert federate(POINTS, lower=ROWS, upper=ROWS, p=[1, 1, 2]).p.tolist() == [0.25, 0.25, 0.5]


def test_from_clients_is_federate_of_the_same_rows(unequal):
    lower = [POINTS[rows] for rows in ROWS]
    data = from_clients(lower, lower[::-1])
    np.testing.assert_array_equal(data.p, unequal.p)
    for client in range(3):
        for mine, theirs in ((data.lower, unequal.lower), (data.upper, unequal.upper)):
            jax.tree.map(np.testing.assert_array_equal, mine.full(client), theirs.full(client))


def test_the_data_passes_through_jit(unequal):
    weights = jax.jit(lambda client: client.lower_batch(jax.random.key(0)).weights)
    np.testing.assert_allclose(weights(unequal.client(1)), [1 / 3] * 3 + [0.0] * 4)


EMPTY = np.zeros(0, int)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: federate(POINTS, ROWS, ROWS[:2]),
            "Give lower and upper parts for the same clients: got 3 and 2.",
        ),
        (
            lambda: federate(POINTS, [], []),
            "Give lower and upper parts for the same clients: got 0 and 0.",
        ),
        (lambda: from_clients([], []), "Give at least one client's lower and upper samples."),
        (
            lambda: federate(POINTS, [ROWS[0], EMPTY], ROWS[:2]),
            "Client 1 has no lower samples: use fewer clients or another partition.",
        ),
        (
            lambda: federate(POINTS, ROWS[:2], [EMPTY, ROWS[0]]),
            "Client 0 has no upper samples: use fewer clients or another partition.",
        ),
        (
            lambda: federate(POINTS, ROWS, ROWS, batch_size=0),
            "batch_size must be a whole number of at least 1, got 0.",
        ),
        *(
            (
                lambda p=p: federate(POINTS, ROWS, ROWS, p=p),
                "The weights p must be 3 positive numbers, one per client.",
            )
            for p in ([1, 1], [1, 1, 0], [1, 1, -1], [1, 1, np.nan], [1, 1, np.inf])
        ),
    ],
)
def test_mistakes_are_sentences(make, sentence):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == sentence


@pytest.mark.parametrize("rows", [[0, 4], [-1, 0]])
def test_rows_beyond_the_data_are_refused(rows):
    good = [np.array([0, 1])]
    with pytest.raises(UserError, match="must lie between 0 and 3"):
        federate(np.arange(4.0), lower=[np.array(rows)], upper=good)
    with pytest.raises(UserError, match="must lie between 0 and 3"):
        federate(np.arange(4.0), lower=good, upper=[np.array(rows)])


def test_arrays_of_unequal_lengths_are_refused():
    torn = [(np.ones((3, 2)), np.ones(4))]
    with pytest.raises(UserError, match=r"one number of samples, got \[3, 4\]"):
        from_clients(torn, torn)


WIDE, NARROW = np.ones((3, 4)), np.ones((5, 3))


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([WIDE, WIDE, NARROW], r"Client 2's lower samples are float64 \(n, 3\), the others' "
         r"float64 \(n, 4\): give every client the same features"),
        ([NARROW, WIDE, WIDE], r"Client 0's lower samples are float64 \(n, 3\), the others'"),
        ([(WIDE, WIDE[:, 0].astype(int)), (WIDE, WIDE[:, 0]), (WIDE, WIDE[:, 0])],
         r"Client 0's lower samples are \(float64 \(n, 4\), int64 \(n,\)\), the others'"),
        ([{"a": WIDE}, {"b": WIDE}, {"a": WIDE}], r"Client 1's .* \{'b': float64 \(n, 4\)\}"),
        ([WIDE, [[1.0, 2.0]], WIDE], "Client 1's lower samples hold single numbers: give arrays"),
        ([WIDE, np.array(["a"]), WIDE], "Client 1's lower samples hold text, dates or objects"),
    ],
)  # fmt: skip
def test_a_client_that_differs_is_named_with_what_it_has(parts, sentence):
    with pytest.raises(UserError, match=sentence):
        from_clients(parts, [WIDE] * 3)
    with pytest.raises(UserError, match="Client 7's upper samples are"):
        from_clients([WIDE] * 3, [WIDE, WIDE, NARROW], ids=[5, 6, 7])


def test_one_kind_of_numbers_in_several_precisions_is_one_form():
    data = from_clients([WIDE, WIDE.astype(np.float32)], [WIDE, WIDE])
    assert data.lower.samples.dtype == np.float64


@pytest.mark.parametrize(
    ("samples", "rows", "sentence"),
    [
        (POINTS, [np.arange(11) < 5] * 2, "np.flatnonzero makes them of a mask"),
        (POINTS, [0, 1], "Give each client an array of row numbers"),
        (POINTS, [np.array([0.0, 1.0])] * 2, "Give each client an array of row numbers"),
        (np.array(["a", "b"]), [[0], [1]], "The samples hold text, dates or objects"),
    ],
)
def test_what_is_no_row_number_is_refused(samples, rows, sentence):
    with pytest.raises(UserError, match=sentence):
        federate(samples, lower=rows, upper=rows)


def test_ids_are_one_per_client():
    with pytest.raises(UserError, match="Give one of ids per client: got 1 for 2 clients"):
        from_clients([WIDE] * 2, [WIDE] * 2, ids=[0])


def test_clients_whose_samples_are_not_finite_are_found():
    points = POINTS.copy()
    points[ROWS[1][2], 1], points[ROWS[2][0], 0] = np.nan, -np.inf
    own = [points[rows] for rows in ROWS]
    data = from_clients([(a, np.arange(len(a))) for a in own], own[:1] * 3, ids=[4, 5, 8])
    assert data.not_finite == [5, 8]
    assert federate(points, lower=ROWS[:1], upper=ROWS[:1]).not_finite == []  # nobody has the rows
    assert federate(POINTS, lower=ROWS, upper=ROWS).not_finite == []
