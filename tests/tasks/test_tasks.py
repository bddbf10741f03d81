"""The tasks: sizes of models, closed forms, metrics and training."""

import jax
import numpy as np
import pytest

from simfbo import Point, SimulatedFederation, datasets, run
from simfbo.algorithms import simfbo
from simfbo.core.partition import iid
from simfbo.core.sampling import without_replacement
from simfbo.tasks import hyper_representation, quadratic, random_quadratic
from simfbo.tasks.models import cnn, mlp, moments, standardise
from simfbo.tasks.task import goal_of


def sizes(model):
    """Return the numbers of parameters of representation and head."""
    parts = jax.eval_shape(model.init, jax.random.key(0))
    return tuple(sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts)


def test_the_papers_model_sizes():
    assert sizes(mlp(784, 200, 10)) == (157_000, 2_010)
    assert sizes(cnn(32, 3, 10)) == (61_156, 850)


def test_models_of_the_same_sizes_are_one_object():
    assert mlp(64, 20, 10) is mlp(64, 20, 10)
    assert cnn(16, 1, 10) is cnn(16, 1, 10)


def test_weights_start_uniform_within_the_fan_in_bound():
    x, y = jax.jit(mlp(784, 200, 10).init)(jax.random.key(0))
    for leaf, fan_in in ((x.weight, 784), (x.bias, 784), (y.weight, 200)):
        bound = fan_in**-0.5
        assert float(abs(leaf).max()) <= bound
        assert float(leaf.std()) == pytest.approx(bound / np.sqrt(3), rel=0.1)


def test_bytes_are_standardised():
    images = np.arange(256, dtype=np.uint8)[None]
    found = standardise(images, 127.5, 50.0, np.dtype("float64"))
    np.testing.assert_allclose(found[0], (np.arange(256) - 127.5) / 50)


def test_moments_of_bytes_are_exact():
    pixels = np.random.default_rng(0).integers(0, 256, (5001, 3, 2), dtype=np.uint8)
    assert moments(pixels) == pytest.approx((pixels.mean(), pixels.std()), rel=1e-12)


@pytest.mark.usefixtures("single_precision")
def test_training_on_digits_reaches_nine_out_of_ten():
    images = datasets.load("digits")
    task = hyper_representation(images, iid(len(images.train_labels), 20), batch_size=32)
    history = run(
        simfbo(task.problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0),
        SimulatedFederation(task.data, without_replacement(10)),
        task.x0,
        task.y0,
        rounds=100,
        every=100,
        evaluate=task.evaluate,
    )
    first, last = history.records
    assert first["test_accuracy"] < 0.3
    assert last["test_accuracy"] > 0.9
    assert last["train_accuracy"] > 0.9
    assert last["test_loss"] < first["test_loss"]
    goals = {"test_accuracy": "max", "test_loss": "min", "train_accuracy": "max"}
    assert {name: task.goal_of(name) for name in goals} == goals
    again = hyper_representation(images, iid(len(images.train_labels), 20, seed=1))
    assert again.problem is task.problem


def test_cnn_scores_ten_classes_and_learns_from_a_step():
    model, rng = cnn(16, 1, 10), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    x, y = jax.tree.map(lambda like: 0.1 * rng.normal(size=like.shape), shapes)
    images = rng.normal(size=(3, 16, 16))
    assert jax.eval_shape(model.features, x, images).shape == (3, 84)
    slopes = jax.jit(jax.grad(lambda x: y(model.features(x, images)).sum()))(x)
    assert all(float(abs(leaf).max()) > 0 for leaf in jax.tree.leaves(slopes))


def test_heterogeneity_zero_makes_clients_the_same():
    same, differ = random_quadratic(3, heterogeneity=0.0), random_quadratic(3, heterogeneity=1.0)
    assert all(np.ptp(values, axis=0).max() == 0 for values in same)
    assert all(np.ptp(values, axis=0).max() > 0.1 for values in differ)
    spectra = np.linalg.eigvalsh(differ.A)
    assert spectra.min() >= 1
    assert spectra.max() <= 3


def test_scatter_leaves_the_full_batch_at_the_closed_form():
    tasks = quadratic(samples=7, noise=2.0, heterogeneity=0.5), quadratic(heterogeneity=0.5)
    x, y = np.ones(4), np.ones(5)
    for client in (0, 9):
        noisy, plain = (t.problem.lower(x, y, t.data.lower.full(client)) for t in tasks)
        assert float(noisy) == pytest.approx(float(plain), rel=1e-12)
    assert np.ptp(np.asarray(tasks[0].data.lower.samples[2])[:7], axis=0).min() > 0.1


def test_goals_of_metrics_in_histories_without_a_task():
    large = ("test_accuracy", "trust_auc", "irrelevant_shut")
    small = ("test_loss", "upper_loss", "grad_norm_squared", "relevant_shut")
    assert {goal_of(name) for name in large} == {"max"}
    assert {goal_of(name) for name in small} == {"min"}
