"""Rows of features: scales, products, held-out rows, and that columns stay aligned."""

import numpy as np
import pytest

from simfbo.datasets import ImageData, TableData
from simfbo.tasks.samples import consecutive, from_images, from_table, standardised, synthetic

RNG = np.random.default_rng(0)
SIZES = [4, 9, 3, 12]
COUNT = sum(SIZES)
OWNER = RNG.permutation(np.repeat(np.arange(4), SIZES)).astype(np.int32)
CODE = RNG.permutation(COUNT).astype(float)  # a number that identifies each row


def table(binary=False, clients=OWNER):
    """Return a table in which target, group and flag follow from the first feature, the code."""
    flag = (CODE % 2).astype(float)
    features = np.column_stack([CODE, flag, 1 - flag])
    target = (CODE % 3 == 0).astype(float) if binary else 10 * CODE + 7
    groups = (CODE % 4 == 1).astype(np.int32)
    names = ("code", "odd", "even")
    return TableData(features, names, target, binary, clients, groups, ("no", "yes"), "synthetic")


def codes(found):
    """Return the code of every training row and of every test row, from what was standardised."""
    samples = found.samples
    whole = np.concatenate([samples.features[:, 0], samples.test_features[:, 0]])
    ranks = np.argsort(np.argsort(whole))  # standardising keeps the order, and codes are 0, 1, ...
    return ranks[: len(samples.target)], ranks[len(samples.target) :]


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_targets_groups_and_clients_stay_aligned(seed):
    found = from_table(table(), seed=seed)
    trained, tested = codes(found)
    assert sorted([*trained, *tested]) == list(range(COUNT))
    owner = dict(zip(CODE, OWNER))
    for client, rows in enumerate(found.parts):
        assert {owner[code] for code in trained[rows]} == {client}
        assert len(rows) == SIZES[client] - SIZES[client] // 4
    left = [owner[code] for code in tested]
    assert np.bincount(left, minlength=4).tolist() == [1, 2, 0, 3]
    for group, code in zip(found.groups, (trained, tested)):
        np.testing.assert_array_equal(group, code % 4 == 1)
    exact = 10 * trained + 7
    for target, code in ((found.samples.target, trained), (found.samples.test_target, tested)):
        expected = (10 * code + 7 - exact.mean()) / exact.std()
        np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)
    assert found.group_names == ("no", "yes")


def test_clients_may_be_the_groups():
    found = from_table(table(), by_client=True)
    owner = dict(zip(CODE, OWNER))
    for group, code in zip(found.groups, codes(found)):
        assert group.tolist() == [owner[one] for one in code]
    assert found.group_names == tuple(f"client {i}" for i in range(4))


def test_classes_stay_classes():
    found = from_table(table(binary=True))
    trained, tested = codes(found)
    assert found.samples.classes == 2
    assert found.samples.target.dtype == np.int32
    np.testing.assert_array_equal(found.samples.target, trained % 3 == 0)
    np.testing.assert_array_equal(found.samples.test_target, tested % 3 == 0)


def test_held_out_rows_depend_on_the_seed():
    one, same, other = (codes(from_table(table(), seed=s))[1].tolist() for s in (0, 0, 1))
    assert one == same
    assert sorted(one) != sorted(other)


def test_given_parts_are_used_if_there_are_no_clients():
    parts = [np.arange(0, 8), np.arange(8, COUNT)]
    found = from_table(table(clients=None), parts)
    trained, _ = codes(found)
    place = {code: row for row, code in enumerate(CODE)}
    assert {place[code] for code in trained[found.parts[0]]} <= set(range(8))
    assert [len(rows) for rows in found.parts] == [6, 15]


def test_products_without_constants_or_copies():
    """odd^2 = odd, even^2 = even and odd * even = 0 bring nothing."""
    found = from_table(table())
    assert found.samples.names == ("code", "odd", "even", "code²", "code * odd", "code * even")
    trained, _ = codes(found)
    raw = trained.astype(float)
    columns = [raw, raw % 2, 1 - raw % 2, raw**2, raw * (raw % 2), raw * (1 - raw % 2)]
    for column, values in zip(found.samples.features.T, columns, strict=True):
        np.testing.assert_allclose(
            column, (values - values.mean()) / values.std(), rtol=1e-4, atol=1e-5
        )


def test_standardised():
    inputs, unseen = RNG.normal(3, 5, size=(40, 3)), RNG.normal(size=(7, 3))
    inputs[:, 1] = 4.0  # never varies
    target, wanted = RNG.normal(2, 9, size=40), RNG.normal(size=7)
    found = standardised(inputs, target, unseen, wanted)
    np.testing.assert_allclose(found.features.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(found.features.std(0), [1, 0, 1], rtol=1e-5)
    mean, deviation = inputs.mean(0), np.array([inputs[:, 0].std(), 1, inputs[:, 2].std()])
    np.testing.assert_allclose(found.test_features, (unseen - mean) / deviation, rtol=1e-4)
    np.testing.assert_allclose(
        found.test_target, (wanted - target.mean()) / target.std(), rtol=1e-5
    )
    assert found.names == ("feature 0", "feature 1", "feature 2")
    assert {part.dtype.name for part in found[:4]} == {"float32"}
    still = standardised(inputs, np.full(40, 3.0), unseen, wanted)
    assert not still.target.any()


def test_a_constant_without_an_exact_binary_fraction_does_not_vary():
    inputs = np.full((7, 1), 0.1)
    found = standardised(inputs, np.arange(7.0), np.array([[0.3]]), np.zeros(1))
    np.testing.assert_allclose(found.features, 0, atol=1e-6)
    np.testing.assert_allclose(found.test_features, 0.2, rtol=1e-5)


def test_images_share_one_scale():
    train = RNG.integers(0, 256, (5, 2, 3), dtype=np.uint8)
    test = RNG.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    labels = np.array([0, 1, 3, 1, 0], np.int32)
    found = from_images(ImageData(train, labels, test, labels[:2], "noise"))
    flat = train.reshape(5, 6).astype(float)
    expected = (test.reshape(2, 6) - flat.mean(0)) / flat.std()
    np.testing.assert_allclose(found.test_features, expected, rtol=1e-5)
    assert (found.classes, len(found.names)) == (4, 6)


def test_only_the_relevant_synthetic_features_matter():
    found = synthetic(clients=8, per_client=40, features=10, relevant=3, noise=0.0, seed=4)
    assert found.relevant.sum() == 3
    samples = found.samples
    wide = np.column_stack([samples.features, np.ones(320)])
    solution = np.linalg.lstsq(wide, samples.target, rcond=None)[0][:-1]
    np.testing.assert_array_equal(np.abs(solution) > 1e-3, found.relevant)
    assert np.abs(solution[~found.relevant]).max() < 1e-5
    error = samples.test_features @ solution - samples.test_target
    assert np.abs(error).max() < 1e-4
    assert samples.test_features.shape == (800, 10)
    np.testing.assert_array_equal(np.concatenate(found.parts), np.arange(320))
    assert {len(rows) for rows in found.parts} == {40}


def test_synthetic_clients_are_shifted_apart_and_noise_is_noise():
    found = synthetic(clients=40, per_client=50, features=4, relevant=1, noise=2.0, seed=0)
    means = np.stack([found.samples.features[rows].mean(0) for rows in found.parts])
    spread = means.var(0)  # 0.25 + 1/50 of 1.25, in units of the whole deviation
    np.testing.assert_allclose(spread, (0.25 + 1 / 50) / 1.25, rtol=0.6)
    column = found.samples.features[:, found.relevant][:, 0]
    slope = np.polyfit(column, found.samples.target, 1)[0]
    rest = found.samples.target - slope * column
    assert rest.var() == pytest.approx(1 - slope**2, rel=1e-3)
    assert 0.05 < slope**2 < 0.5  # truth between 0.5 and 1.5 times 1.25, against 4


def test_consecutive():
    parts = consecutive([np.array([9, 2]), np.array([], int), np.array([4, 7, 1])])
    assert [rows.tolist() for rows in parts] == [[0, 1], [], [2, 3, 4]]
