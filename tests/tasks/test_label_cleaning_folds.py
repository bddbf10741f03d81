"""Label cleaning with folds of clean rows: hypergradients of the nested problem, by hand."""

import numpy as np
import pytest
from scipy.special import expit

from simfbo.tasks._label_cleaning import Network, Reference
from simfbo.tasks._label_cleaning_folds import assemble, outputs, trust_in
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Training

ROWS, D, C, FOLDS, PENALTY = 16, 2, 2, 2, 0.1
RNG = np.random.default_rng(5)
INPUTS, LABELS = RNG.normal(size=(ROWS, D)), RNG.permutation(np.repeat([0, 1], 8)).astype(np.int32)
CELLS = np.repeat([0, 1, 2], [4, 6, 6]).astype(np.int32)
PARTS = [np.arange(4), np.arange(4, 16)]  # the first client has one trust, the second two
CLEAN = np.isin(np.arange(ROWS), [5, 7, 8, 10, 11, 12, 14, 15])  # the first has none


def setting(trust):
    return assemble(
        Training(INPUTS, LABELS, C, PARTS), CLEAN, trust=trust, penalty=PENALTY, folds=FOLDS,
        batch_size=None, seed=0, cells=CELLS,
    )  # fmt: skip


def fold_of(made):
    return np.asarray(made.data.lower.samples[5])


def trained(by_hand, weights):
    return [by_hand.fit(INPUTS, LABELS, each, PENALTY) for each in weights]


def stacked(thetas):
    return Linear(np.stack([t[:-1] for t in thetas]), np.stack([t[-1] for t in thetas]))


def models(by_hand, fold, trust):
    """Train the model of every fold: on clean rows outside it in full, on others by trust."""
    rows = [np.where(CLEAN, fold != k, each) / ROWS for k, each in enumerate(trust)]
    return trained(by_hand, rows)


def validated(by_hand, fold, trust):
    """Return the mean loss of clean rows under the models of their folds."""
    total = 0.0
    for k, theta in enumerate(models(by_hand, fold, trust)):
        loss = by_hand.cross_entropy(INPUTS @ theta[:-1] + theta[-1], LABELS)
        total += loss[fold == k].sum() / CLEAN.sum()
    return total


def test_trust_in_cells_by_finite_differences(by_hand):
    made, x = setting("clients"), np.array([0.4, -0.7, 0.2])
    fold = fold_of(made)
    assert sorted(np.bincount(fold[CLEAN])) == [4, 4]
    assert (fold[~CLEAN] == -1).all()
    y = stacked(models(by_hand, fold, [expit(x)[CELLS]] * FOLDS))
    truth = by_hand.hypergradient(made.problem, made.data, x, y)
    np.testing.assert_allclose(truth.lower_grad, 0, atol=1e-7)
    expected = by_hand.slopes(lambda x: validated(by_hand, fold, [expit(x)[CELLS]] * FOLDS), x)
    assert np.abs(expected).min() > 1e-4
    np.testing.assert_allclose(truth.gradient, expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(trust_in(x, y, (INPUTS, LABELS, CELLS), C), expit(x)[CELLS])


@pytest.mark.slow
def test_trust_by_a_network_is_that_of_the_nested_problem(by_hand):
    """First each fold's reference, on clean rows alone; then trust; then the models; then F."""
    made = setting("network")
    fold = fold_of(made)
    references = trained(by_hand, [(CLEAN & (fold != k)) / CLEAN.sum() for k in range(FOLDS)])
    seen = [by_hand.cross_entropy(INPUTS @ r[:-1] + r[-1], LABELS) for r in references]

    def trust(x):
        slope, offset, out, bias = np.split(x, [2, 4, 6])
        return [expit(np.tanh(one[:, None] * slope + offset) @ out + bias) for one in seen]

    x = np.array([1.0, -0.5, 0.2, 0.4, 0.8, -1.1, 0.3])
    network = Network(x[:2], x[2:4], x[4:6], x[6])
    y = Reference(stacked(models(by_hand, fold, trust(x))), stacked(references))
    truth = by_hand.hypergradient(made.problem, made.data, network, y)
    np.testing.assert_allclose(truth.lower_grad, 0, atol=1e-7)
    for leaf in truth.v.reference:
        np.testing.assert_allclose(leaf, 0, atol=1e-7)
    expected = by_hand.slopes(lambda x: validated(by_hand, fold, trust(x)), x)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(truth.gradient, expected, rtol=1e-5, atol=1e-8)
    rows = (INPUTS, LABELS, CELLS)
    np.testing.assert_allclose(trust_in(network, y, rows, C), np.mean(trust(x), 0), rtol=1e-6)


def test_clean_rows_are_judged_by_models_that_did_not_see_them():
    made = setting("clients")
    y = Linear(RNG.normal(size=(FOLDS, D, C)), RNG.normal(size=(FOLDS, C)))
    rows = tuple(np.asarray(column) for column in made.data.upper.samples)
    found, fold = np.asarray(outputs(made.x0, y, rows)), fold_of(made)
    for row in np.flatnonzero(CLEAN):
        expected = INPUTS[row] @ y.weight[fold[row]] + y.bias[fold[row]]
        np.testing.assert_allclose(found[row], expected, rtol=1e-6)
    assert np.isnan(found[:4]).all()
    assert made.data.p == pytest.approx([0.25, 0.75])
