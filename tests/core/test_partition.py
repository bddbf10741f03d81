"""Partitions: every row once, and what each kind promises about labels and sizes."""

import numpy as np
import pytest

from simfbo.core import partition
from simfbo.errors import UserError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))

PARTITIONS = {
    "iid": lambda seed: partition.iid(600, 7, seed),
    "shards": lambda seed: partition.shards(LABELS, 15, 2, seed),
    "uneven shards": lambda seed: partition.shards(LABELS, 7, 3, seed),
    "dirichlet": lambda seed: partition.dirichlet(LABELS, 12, 0.5, seed=seed),
    "spiky dirichlet": lambda seed: partition.dirichlet(LABELS, 5, 0.05, seed=seed),
}


def distinct_labels(parts: partition.Rows) -> np.ndarray:
    return np.array([len(np.unique(LABELS[rows])) for rows in parts])


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_row_goes_to_one_client(name):
    rows = np.concatenate(PARTITIONS[name](seed=3))
    np.testing.assert_array_equal(np.sort(rows), np.arange(600))


@pytest.mark.parametrize("name", PARTITIONS)
def test_the_seed_decides(name):
    first, again, other = (np.concatenate(PARTITIONS[name](seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_iid_is_even_and_mixed():
    parts = partition.iid(600, 7)
    assert sorted(map(len, parts)) == [85, 85, 86, 86, 86, 86, 86]
    assert (distinct_labels(parts) == 10).all()


def test_shards_hold_whole_labels():
    # 600 rows in 30 shards of 20: every label is three shards, so nobody sees more than two.
    parts = partition.shards(LABELS, 15, 2)
    assert {len(rows) for rows in parts} == {40}
    assert set(distinct_labels(parts)) <= {1, 2}
    assert (distinct_labels(parts) == 2).sum() >= 10
    for rows in parts:
        assert set(np.unique(LABELS[rows], return_counts=True)[1]) <= {20, 40}


def test_one_shard_each_is_one_label_each():
    assert (distinct_labels(partition.shards(LABELS, 10, 1)) == 1).all()


def test_small_alpha_concentrates_labels():
    few = distinct_labels(partition.dirichlet(LABELS, 5, 0.05)).mean()
    many = distinct_labels(partition.dirichlet(LABELS, 5, 100.0)).mean()
    assert few < 5
    assert many == 10
    sizes = np.array([len(rows) for rows in partition.dirichlet(LABELS, 5, 1e4)])
    np.testing.assert_allclose(sizes, 120, atol=10)


@pytest.mark.parametrize("minimum", [1, 10, 20])
def test_dirichlet_leaves_everyone_the_minimum(minimum):
    parts = [partition.dirichlet(LABELS, 12, 0.3, minimum, seed) for seed in range(5)]
    assert min(len(rows) for part in parts for rows in part) >= minimum


def test_dirichlet_says_when_no_draw_will_do():
    with pytest.raises(UserError) as caught:
        partition.dirichlet(LABELS, 50, 0.001)
    assert str(caught.value) == (
        "No Dirichlet draw with alpha=0.001 left 2 samples for each of 50 clients: raise alpha or "
        "use fewer clients."
    )
    with pytest.raises(UserError, match=r"^The Dirichlet alpha must be positive, got 0\.$"):
        partition.dirichlet(LABELS, 5, 0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: partition.iid(3, 4), "3 samples cannot fill 4 places: use fewer clients."),
        (lambda: partition.iid(3, 0), "3 samples cannot fill 0 places: use fewer clients."),
        (
            lambda: partition.shards(np.zeros(9), 5, 2),
            "9 samples cannot fill 10 places: use fewer clients.",
        ),
        (
            lambda: partition.dirichlet(np.zeros(9), 5, minimum=2),
            "9 samples cannot fill 10 places: use fewer clients.",
        ),
        (
            lambda: partition.halve([np.arange(3), np.arange(1)]),
            "Every client needs two samples, one for each level: use fewer clients.",
        ),
        (
            lambda: partition.halve([np.arange(3)], 1.0),
            "The upper share must lie between 0 and 1, got 1.0.",
        ),
        (
            lambda: partition.halve([np.arange(3)], 0.0),
            "The upper share must lie between 0 and 1, got 0.0.",
        ),
    ],
)
def test_too_few_samples(make, sentence):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == sentence


def test_by_user_is_sorted_by_id_and_keeps_the_order_of_rows():
    parts = partition.by_user(np.array([30, 10, 30, 20, 10, 30]))
    assert [rows.tolist() for rows in parts] == [[1, 4], [3], [0, 2, 5]]
    assert [rows.tolist() for rows in partition.by_user(["b"])] == [[0]]


@pytest.mark.parametrize(("share", "sizes"), [(0.2, [2, 20, 1]), (0.5, [5, 50, 1])])
def test_halve_keeps_the_proportion_and_at_least_one_each(share, sizes):
    parts = [np.arange(10), np.arange(10, 110), np.array([200, 201])]
    lower, upper = partition.halve(parts, share)
    assert [len(rows) for rows in upper] == sizes
    for below, above, rows in zip(lower, upper, parts, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([below, above])), rows)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_halve_never_empties_a_level(share):
    lower, upper = partition.halve([np.arange(2), np.arange(3)], share)
    assert min(map(len, lower + upper)) == 1


def test_halve_is_random_and_the_seed_decides():
    rows = [np.arange(50)]
    first, again, other = (partition.halve(rows, 0.5, seed)[1][0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)
    assert set(first) != set(range(25))
