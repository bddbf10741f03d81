"""Losses, folds and weights that the tasks with linear models share."""

import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core.data import federate
from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.tasks import linear
from simfbo.tasks.models import Linear


def test_losses(by_hand):
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(6, 3)), np.array([0, 1, 2, 2, 1, 0], np.int32)
    expected = by_hand.cross_entropy(scores, labels)
    np.testing.assert_allclose(linear.losses(jnp.asarray(scores), labels, 3), expected, rtol=1e-12)
    target = rng.normal(size=6)
    squares = linear.losses(jnp.asarray(scores[:, :1]), target, 0)
    np.testing.assert_allclose(squares, 0.5 * (scores[:, 0] - target) ** 2, rtol=1e-12)


def test_zeros():
    model, stack = linear.zeros(4, 3), linear.zeros(4, 0, 5)
    assert (model.weight.shape, model.bias.shape) == ((4, 3), (3,))
    assert (stack.weight.shape, stack.bias.shape) == ((5, 4, 1), (5, 1))
    assert model.weight.dtype == np.float32


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_are_even_within_strata(folds):
    strata = np.repeat([0, 1, 7], [11, 30, 4])
    order = np.random.default_rng(1).permutation(len(strata))
    fold = linear.assign_folds(strata[order], folds, seed=3)
    assert fold.dtype == np.int32
    for stratum, size in ((0, 11), (1, 30), (7, 4)):
        counts = np.bincount(fold[strata[order] == stratum], minlength=folds)
        assert counts.sum() == size
        assert set(counts) <= {size // folds, -(-size // folds)}


def test_folds_depend_on_the_seed_and_strata_start_at_random_folds():
    strata = np.arange(300)  # a row each: its fold is where the stratum starts
    one, other = (linear.assign_folds(strata, 3, seed) for seed in (0, 1))
    assert np.array_equal(one, linear.assign_folds(strata, 3, 0))
    assert not np.array_equal(one, other)
    assert np.abs(np.bincount(one, minlength=3) - 100).max() < 4 * np.sqrt(300 * 2 / 9)


def test_one_fold_is_too_few():
    with pytest.raises(UserError, match="needs at least 2 folds, got 1"):
        linear.assign_folds(np.zeros(4), 1, seed=0)


def test_cross_validation_by_hand():
    """Model k is trained on all folds but k, scaled by K/(K-1), and checked on fold k."""
    rng = np.random.default_rng(2)
    values, fold = rng.normal(size=10), np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 2], np.int32)
    y = Linear(jnp.asarray(rng.normal(size=(3, 1, 1))), jnp.asarray(rng.normal(size=(3, 1))))

    def train(x, model, rows):
        return x * (model.weight[0, 0] - rows[0]) ** 2

    def check(x, model, rows):
        return (model.bias[0] - rows[0]) ** 2

    problem = linear.cross_validated(train, check, 3, 0.4)
    w, b = np.asarray(y.weight[:, 0, 0]), np.asarray(y.bias[:, 0])
    others = sum((w[k] - values[r]) ** 2 for r in range(10) for k in range(3) if k != fold[r])
    expected = 1.7 * others * 1.5 / 10 + 0.2 * (w @ w + b @ b)
    batch = (values, fold)
    assert float(problem.lower(1.7, y, batch)) == pytest.approx(expected, rel=1e-12)
    own = np.mean([(b[fold[r]] - values[r]) ** 2 for r in range(10)])
    assert float(problem.upper(1.7, y, batch)) == pytest.approx(own, rel=1e-12)
    parts = [np.arange(3), np.arange(3, 10)]
    data = linear.on_both_levels(batch, parts, None)
    state = Point(x=jnp.asarray(1.7), y=y)
    assert linear.upper_loss(problem, data)(state) == pytest.approx(own, rel=1e-12)
    np.testing.assert_allclose(data.p, [0.3, 0.7])


def test_the_mean_of_the_models():
    y = Linear(jnp.arange(6.0).reshape(3, 2, 1), jnp.array([[1.0], [2.0], [6.0]]))
    mean = linear.averaged(y)
    assert mean.weight.tolist() == [[2.0], [3.0]]
    assert mean.bias.tolist() == [3.0]


def test_weights_balance_the_classes_that_are_present():
    shares = np.array([0.5, 0.0, 0.3, 0.2])
    weights = linear.balancing_weights(shares)
    np.testing.assert_allclose(weights * shares, [1 / 3, 0, 1 / 3, 1 / 3], rtol=1e-15)
    assert weights[1] == 0
    assert shares @ weights == pytest.approx(1, rel=1e-15)


def test_both_levels_use_the_same_rows():
    parts = [np.array([3, 0]), np.array([1, 2, 4])]
    rows = np.arange(5.0)
    data, plain = linear.on_both_levels(rows, parts, 2), federate(rows, parts, parts)
    assert data.lower.rows.tolist() == data.upper.rows.tolist() == [3, 0, 1, 2, 4]
    assert (data.lower.batch_size, plain.lower.batch_size) == (2, None)
