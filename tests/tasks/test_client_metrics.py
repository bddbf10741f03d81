"""What clients measure of a task adds up to what the server measures."""

import jax
import numpy as np
import pytest

from simfbo import Point, SimulatedFederation, tasks
from simfbo.datasets import ImageData
from simfbo.runs.client_metrics import evaluation_of
from simfbo.tasks.models import mlp
from simfbo.tasks.samples import Samples

RNG = np.random.default_rng(1)
FEATURES, LABELS = RNG.normal(size=(40, 3)).astype("f4"), np.arange(40, dtype=np.int32) % 3
SAMPLES = Samples(FEATURES, LABELS, FEATURES, LABELS, ("a", "b", "c"), 3)
PARTS = np.split(np.arange(40), [5, 12, 30])
GROUPS = np.arange(40) % 2


def asked(task):
    """Return a random state, and the clients' metrics of it."""
    draw = lambda a: RNG.normal(size=np.shape(a)).astype("f4")  # noqa: E731
    state = Point(x=jax.tree.map(draw, task.x0), y=jax.tree.map(draw, task.y0))
    evaluation = evaluation_of(task.client_metrics)
    return state, evaluation.ask(SimulatedFederation(task.data), state, jax.random.key(0))


@pytest.mark.parametrize(
    ("build", "options"),
    [(tasks.regularisation, {}), (tasks.long_tail, {}), (tasks.label_cleaning, {"clean": 20})],
)
def test_the_mean_of_the_upper_losses(build, options, single_precision):
    task = build(SAMPLES, PARTS, **options)
    state, scores = asked(task)
    assert scores.mean("upper_loss") == pytest.approx(task.evaluate(state)["upper_loss"], rel=1e-5)
    assert scores.goals == {"upper_loss": "min", "accuracy": "max"}


def test_rows_are_judged_by_the_model_of_their_fold(single_precision):
    task = tasks.fair(SAMPLES, PARTS, (GROUPS, GROUPS), folds=2)
    state, scores = asked(task)
    fold = np.asarray(task.data.upper.samples[3])
    weight, bias = state.y.models
    right = np.array([
        np.argmax(row @ weight[k] + bias[k]) == label
        for row, label, k in zip(FEATURES, LABELS, fold, strict=True)
    ])  # fmt: skip
    wanted = [right[rows].mean() for rows in PARTS]
    np.testing.assert_allclose(scores.values["accuracy"], wanted, rtol=1e-6)


@pytest.mark.parametrize("build", [tasks.hyper_representation, tasks.private_heads])
def test_images(build, single_precision):
    pixels = RNG.integers(0, 256, (40, 2, 2)).astype(np.uint8)
    images = ImageData(pixels, LABELS, pixels, LABELS, name="noise")
    task = build(images, PARTS, model=mlp(4, 5, 3), batch_size=None)
    state, scores = asked(task)
    flat, part = pixels.reshape(40, 4).astype(float), task.data.upper
    scaled = (flat - pixels.mean()) / pixels.std()
    hidden = np.maximum(scaled @ state.x.weight + state.x.bias, 0)
    right = (hidden @ state.y.weight + state.y.bias).argmax(1) == LABELS
    starts = zip(part.start, part.count, strict=True)
    rows = [np.asarray(part.rows)[start : start + count] for start, count in starts]
    wanted = [right[own].mean() for own in rows]
    np.testing.assert_allclose(scores.values["accuracy"], wanted, rtol=1e-6)
