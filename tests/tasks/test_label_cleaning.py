"""Label cleaning: hypergradients of the nested problem, the noise, and the clean rows."""

import sys

import numpy as np
import pytest
from scipy.special import expit

from simfbo.core.data import federate, pooled
from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.tasks import linear
from simfbo.tasks._label_cleaning import (
    Network,
    Reference,
    assemble,
    first,
    label_cleaning,
    problem,
    trust_in,
)
from simfbo.tasks.label_noise import corrupted, set_apart
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Training, owners, standardised

ROWS, D, C, PENALTY = 12, 2, 2, 0.1
RNG = np.random.default_rng(5)
INPUTS, LABELS = RNG.normal(size=(ROWS, D)), RNG.permutation(np.repeat([0, 1], 6)).astype(np.int32)
LOWER, UPPER = np.split(np.arange(8), 2), np.split(np.arange(8, 12), 2)
OWNER = owners([np.concatenate(pair) for pair in zip(LOWER, UPPER)], ROWS)
DATA = federate((INPUTS, LABELS, OWNER), LOWER, UPPER, p=[0.3, 0.7])


@pytest.fixture(scope="module")
def checked(by_hand):
    """Return (trust of every row) -> F at the model that this trust trains."""
    train, check = (by_hand.share_rows(part, DATA.p, ROWS) for part in (LOWER, UPPER))

    def loss(trust):
        theta = by_hand.fit(INPUTS, LABELS, train * trust, PENALTY)
        return check @ by_hand.cross_entropy(INPUTS @ theta[:-1] + theta[-1], LABELS)

    return loss


def test_owners():
    assert OWNER.tolist() == [0] * 4 + [1] * 4 + [0] * 2 + [1] * 2


def test_trust_in_clients_by_finite_differences(checked, by_hand):
    x, train = np.array([0.4, -0.7]), by_hand.share_rows(LOWER, DATA.p, ROWS)
    theta = by_hand.fit(INPUTS, LABELS, train * expit(x)[OWNER], PENALTY)
    y = Linear(theta[:-1], theta[-1])
    truth = by_hand.hypergradient(problem("clients", C, PENALTY), DATA, x, y)
    np.testing.assert_allclose(truth.lower_grad, 0, atol=1e-12)
    expected = by_hand.slopes(lambda x: checked(expit(x)[OWNER]), x)
    assert np.abs(expected).min() > 1e-4
    np.testing.assert_allclose(truth.gradient, expected, rtol=1e-6, atol=1e-9)


def test_trust_by_a_network_is_that_of_the_nested_problem(checked, by_hand):
    """First the reference, alone; then the trust in every row; then the model; then F.

    The reference does not depend on x, so nothing may flow through it: its v is zero.
    """
    train = by_hand.share_rows(LOWER, DATA.p, ROWS)
    reference = by_hand.fit(INPUTS, LABELS, train, PENALTY)
    seen = by_hand.cross_entropy(INPUTS @ reference[:-1] + reference[-1], LABELS)

    def trust(x):
        slope, offset, out, bias = np.split(x, [2, 4, 6])
        return expit(np.tanh(seen[:, None] * slope + offset) @ out + bias)

    x = np.array([1.0, -0.5, 0.2, 0.4, 0.8, -1.1, 0.3])
    network = Network(x[:2], x[2:4], x[4:6], x[6])
    theta = by_hand.fit(INPUTS, LABELS, train * trust(x), PENALTY)
    y = Reference(*(Linear(one[:-1], one[-1]) for one in (theta, reference)))
    truth = by_hand.hypergradient(problem("network", C, PENALTY), DATA, network, y)
    np.testing.assert_allclose(truth.lower_grad, 0, atol=1e-12)
    for leaf in truth.v.reference:
        np.testing.assert_allclose(leaf, 0, atol=1e-12)
    expected = by_hand.slopes(lambda x: checked(trust(x)), x)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(truth.gradient, expected, rtol=1e-6, atol=1e-9)
    rows = (INPUTS, LABELS, OWNER)
    np.testing.assert_allclose(trust_in(network, y, rows, C), trust(x), rtol=1e-7)


def test_rows_of_a_level_may_count_equally_and_be_missing_at_clients():
    """Client 0 has no clean rows, client 2 no noisy ones; factors make both losses row means."""
    lower = [np.arange(3), np.array([4]), np.array([], int)]
    upper = [np.array([], int), np.array([3, 5]), np.arange(6, 12)]
    parts = [np.arange(3), np.array([3, 4, 5]), np.arange(6, 12)]
    training = Training(INPUTS.astype("f4"), LABELS, C, parts)
    options = {"trust": "clients", "penalty": 0.0, "batch_size": None, "seed": 0}
    losses, data, x, y, *_ = assemble(training, (lower, upper), by_row=True, **options)
    rng = np.random.default_rng(0)
    y = Linear(rng.normal(size=(D, C)).astype("f4"), rng.normal(size=C).astype("f4"))
    row = np.asarray(linear.losses(training.features @ y.weight + y.bias, LABELS, C))
    for loss, part, own, trust in (
        (losses.lower, data.lower, [0, 1, 2, 4], 0.5),
        (losses.upper, data.upper, [3, 5, 6, 7, 8, 9, 10, 11], 1.0),
    ):
        assert float(pooled(loss, part, data.p)(x, y)) == pytest.approx(trust * row[own].mean())


def test_trust_in_clients_by_row():
    x, y = np.array([0.4, -0.7]), linear.zeros(D, C)
    np.testing.assert_allclose(trust_in(x, y, (INPUTS, LABELS, OWNER), C), expit(x)[OWNER])


@pytest.mark.parametrize(("share", "low", "high"), [(0.5, 0, 1), (0.2, 0, 0.4), (0.8, 0.6, 1)])
def test_rates_spread_evenly_around_the_share(share, low, high):
    size, clients, classes = 400, 11, 4
    parts = np.split(np.arange(size * clients), clients)
    labels = np.random.default_rng(0).integers(0, classes, size * clients)
    noisy = corrupted(labels, parts, share, classes, seed=2)
    np.testing.assert_allclose(np.sort(noisy.rates), np.linspace(low, high, clients), atol=1e-12)
    assert not np.array_equal(np.sort(noisy.rates), noisy.rates)
    np.testing.assert_array_equal(noisy.wrong, noisy.labels != labels)
    for rows, rate in zip(parts, noisy.rates):
        deviation = np.sqrt(rate * (1 - rate) / size)
        assert abs(noisy.wrong[rows].mean() - rate) <= 4 * deviation + 1e-9
    offsets = np.bincount((noisy.labels - labels)[noisy.wrong] % classes, minlength=classes)
    expected = noisy.wrong.sum() / (classes - 1)
    assert offsets[0] == 0
    assert np.abs(offsets[1:] - expected).max() < 4 * np.sqrt(expected)


def test_rows_that_nobody_holds_stay_correct():
    noisy = corrupted(np.zeros(100, int), [np.arange(40), np.arange(60, 90)], 0.5, 3, seed=0)
    assert not noisy.wrong[40:60].any()
    assert not noisy.wrong[90:].any()


def test_one_client_has_the_share_itself():
    noisy = corrupted(np.zeros(1000, int), [np.arange(1000)], 0.3, 2, seed=0)
    assert noisy.rates.tolist() == [0.3]
    assert noisy.wrong.mean() == pytest.approx(0.3, abs=0.06)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2])
def test_a_share_is_a_share(share):
    with pytest.raises(UserError, match="wrong labels must be between 0 and 1, got"):
        corrupted(np.zeros(4, int), [np.arange(4)], share, 2, seed=0)


def test_rows_set_apart_are_disjoint_and_complete():
    parts = [np.arange(0, 9), np.arange(20, 23), np.arange(30, 42)]
    lower, upper = set_apart(parts, 11, seed=1)
    assert [len(rows) for rows in upper] == [4, 2, 3]  # 4, 4, 3, but a client of three keeps one
    for whole, rest, apart in zip(parts, lower, upper):
        assert not set(rest) & set(apart)
        np.testing.assert_array_equal(np.sort([*rest, *apart]), whole)
    other = set_apart(parts, 11, seed=2)[1]
    assert any(set(a) != set(b) for a, b in zip(upper, other))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ([5, 5, 5], "2 clean rows are too few for 3 clients"),
        ([5, 1], "Every client needs at least two rows"),
    ],
)
def test_every_client_needs_a_row_of_each_kind(sizes, sentence):
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for end, size in zip(ends, sizes)]
    with pytest.raises(UserError, match=sentence):
        set_apart(parts, 2, seed=0)


def test_all_labels_are_trusted_equally_at_first():
    x, y = first("network", 3, D, C, seed=0)
    batch = (INPUTS.astype("f4"), LABELS, OWNER)
    np.testing.assert_array_equal(trust_in(x, y, batch, C), 0.5)
    assert np.abs(x.slope).min() > 0
    assert first("clients", 3, D, C, seed=0)[0].tolist() == [0, 0, 0]


@pytest.fixture(scope="module")
def task():
    parts = np.split(np.arange(60), 4)
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(60, D)), rng.integers(0, 3, 60)
    samples = standardised(inputs, labels, inputs[:9], labels[:9], classes=3)
    return label_cleaning(samples, parts, clean=8, trust="clients", seed=1), samples


def test_upper_labels_are_correct_and_lower_ones_partly_wrong(task):
    task, samples = task
    labels, data = np.asarray(task.data.lower.samples[1]), task.data
    upper, lower = np.asarray(data.upper.rows), np.asarray(data.lower.rows)
    np.testing.assert_array_equal(labels[upper], samples.target[upper])
    assert (len(upper), len(lower)) == (8, 52)
    assert 0.3 < np.mean(labels[lower] != samples.target[lower]) < 0.7
    np.testing.assert_array_equal(data.lower.samples[2], np.repeat(np.arange(4), 15))


def test_metrics(task):
    """Trust ranks rows; with one number per client, the area under the curve counts pairs."""
    task, samples = task
    rng, rows = np.random.default_rng(1), np.asarray(task.data.lower.rows)
    y = Linear(rng.normal(size=(D, 3)).astype("f4"), rng.normal(size=3).astype("f4"))
    x = np.array([0.3, -1.0, 2.0, 0.3], np.float32)
    found = task.evaluate(Point(x=x, y=y))
    guess = (samples.test_features @ y.weight + y.bias).argmax(1)
    assert found["test_accuracy"] == pytest.approx(np.mean(guess == samples.test_target))
    right = np.asarray(task.data.lower.samples[1])[rows] == samples.target[rows]
    score = x[rows // 15]
    gaps = score[right][:, None] - score[~right]
    assert found["trust_auc"] == pytest.approx(np.mean((gaps > 0) + 0.5 * (gaps == 0)))
    assert "trust_auc" not in task.evaluate(Point(y=y))
    goals = {"test_accuracy": "max", "upper_loss": "min", "trust_auc": "max"}
    assert {name: task.goal_of(name) for name in found} == goals


def test_a_missing_scikit_learn_is_one_sentence(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(UserError, match=r"This needs scikit-learn, which is not installed: pip"):
        label_cleaning(task[1], np.split(np.arange(60), 4))


def test_baselines_train_on_what_their_names_say(task):
    task, samples = task
    noisy, clean, both, searched, oracle = task.baselines
    assert [len(b.candidates) for b in task.baselines] == [1, 1, 1, 8, 1]
    together = {*np.asarray(task.data.lower.rows), *np.asarray(task.data.upper.rows)}
    assert set(np.asarray(both.data.lower.rows)) == together
    assert np.exp(noisy.candidates[0]) == pytest.approx(0.01, rel=1e-6)
    np.testing.assert_array_equal(clean.data.lower.rows, task.data.upper.rows)
    np.testing.assert_array_equal(noisy.data.lower.rows, task.data.lower.rows)
    np.testing.assert_array_equal(oracle.data.lower.samples[1], samples.target)
    np.testing.assert_allclose(np.diff(np.ravel(searched.candidates)), 1, rtol=1e-6)
