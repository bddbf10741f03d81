"""Hyper-representation learning: clients share a representation x with a linear head y on top.

    f_i = cross-entropy on client i's validation images,
    g_i = cross-entropy on its training images + lambda/2 ||y||^2

The experiment of Yang, Xiao, Ji (2023), Section 6; the split into two levels follows FedNest.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import optax

from simfbo.core import trees
from simfbo.core.data import FederatedData, federate
from simfbo.core.keys import Purpose
from simfbo.core.partition import Rows, halve
from simfbo.core.problem import BilevelProblem, Loss, Point, PyTree
from simfbo.datasets import ImageData
from simfbo.errors import UserError
from simfbo.runs.client_metrics import ClientMetric
from simfbo.tasks.models import Linear, Model, mlp, moments, standardise
from simfbo.tasks.personal_heads import Features, halves, personal_accuracies
from simfbo.tasks.task import Baseline, Metrics, Task

Logits = Callable[[PyTree, Any, Any], jax.Array]
Part = tuple[PyTree, PyTree]  # images and labels

_CHUNK = 2000
_TRAIN_SAMPLE = 10_000
_ACCURACIES = frozenset(
    {"unseen_accuracy", "unseen_shared_accuracy", "test_accuracy", "train_accuracy"}
)


def hyper_representation(
    images: ImageData,
    parts: Rows,
    *,
    model: Model | None = None,
    upper_share: float = 0.5,
    batch_size: int | None = 64,
    regularisation: float = 1e-3,
    unseen: int = 0,
    pull: float = 0.2,
    together: bool = False,
    seed: int = 0,
) -> Task:
    """Build the task of learning a representation across clients.

    Args:
        images: a dataset from `simfbo.datasets.load`.
        parts: each client's rows of the training images, from `simfbo.core.partition`.
        model: the network; by default a perceptron with 200 hidden units.
        upper_share: share of each client's images that the upper loss uses.
        batch_size: images in a minibatch at either level.
        regularisation: lambda, which makes g strongly convex in y.
        unseen: the number of clients, the last ones, left out of training; they fit and test heads
            of their own.
        pull: how strongly those heads are pulled towards the shared one.
        together: build a one-level problem, for `fedavg`: y is the whole network, trained on all
            of a client's images, and x is not used.
        seed: of the initial weights and of the split into levels.

    Returns:
        The task; its metrics are accuracy and loss on the test images and accuracy on (up to 10,000
        of) the training images. With `unseen` clients, their accuracy comes first and baselines are
        added.
    """
    pixels, labels = images.train_images, images.train_labels
    classes = int(labels.max()) + 1
    model = model or mlp(int(np.prod(pixels.shape[1:])), 200, classes)
    if not 0 <= unseen < len(parts):
        raise UserError(f"unseen must leave some of {len(parts)} clients to train, got {unseen}.")
    seen, left_out = parts[: len(parts) - unseen], parts[len(parts) - unseen :]
    lower, upper = halve(seen, upper_share, seed)
    data = federate((pixels, labels), lower, upper, batch_size=batch_size)
    # Rounds fold 1, 2, ... into the seed's key; 0 is reserved for the initial weights.
    x0, y0 = model.init(jax.random.fold_in(jax.random.key(seed), 0))
    if left_out:  # metrics and pixel scale must not depend on unseen clients' images
        training_rows = np.sort(np.concatenate(seen))
        images = images._replace(
            train_images=pixels[training_rows], train_labels=labels[training_rows]
        )
    scale = moments(images.train_images)
    problem = losses(model, *scale, regularisation)
    evaluate = evaluator(
        scores(model, *scale),
        (images.test_images, images.test_labels),
        (images.train_images, images.train_labels),
    )
    metric, baselines = "test_accuracy", ()
    if together:
        if left_out:
            raise UserError("unseen clients need a representation of its own: omit together.")
        data = federate((pixels, labels), seen, seen, batch_size=batch_size)
        return Task(
            "hyper-representation, one level",
            _one_level(problem),
            data,
            _NOTHING,
            Point(x=x0, y=y0),
            lambda state: evaluate(state.y),
            metric,
            "max",
            "train_accuracy",
            _ACCURACIES,
        )
    if left_out:
        metric, scaled = "unseen_accuracy", scaled_features(model, *scale)
        personal = personal_accuracies(scaled, halves(pixels, labels, left_out, seed), pull)
        evaluate = _with_unseen(personal, evaluate)
        one_level_data = federate((pixels, labels), seen, seen, batch_size=batch_size)
        baselines = _baselines(problem, data, one_level_data, x0, y0, evaluate)
    return Task(
        "hyper-representation",
        problem,
        data,
        x0,
        y0,
        evaluate,
        metric,
        "max",
        "train_accuracy",
        _ACCURACIES,
        baselines,
        own_metrics(model, *scale),
    )


@lru_cache(maxsize=32)
def losses(model: Model, mean: float, deviation: float, weight: float) -> BilevelProblem:
    """Build the two losses on batches (images, labels); cached.

    Args:
        model: the network.
        mean: of the pixels.
        deviation: of the pixels.
        weight: lambda.
    """
    loss = cross_entropy(scores(model, mean, deviation))
    return BilevelProblem(loss, regularised(loss, weight))


@lru_cache(maxsize=32)
def own_metrics(model: Model, mean: float, deviation: float) -> dict[str, ClientMetric]:
    """Return the metrics that clients measure on their own images besides the upper loss."""
    return {"accuracy": ClientMetric(accuracy(scores(model, mean, deviation)), "max")}


def scaled_features(model: Model, mean: float, deviation: float) -> Features:
    """Return the function (x, images) -> features, on standardised pixels."""

    def features(x: PyTree, images: jax.Array) -> jax.Array:
        dtype = jax.tree.leaves(x)[0].dtype
        return model.features(x, standardise(images, mean, deviation, dtype))

    return features


def _with_unseen(
    personal: Callable[[PyTree, Linear], tuple[jax.Array, jax.Array]], evaluate: Metrics
) -> Metrics:
    """Add the metrics of unseen clients, before the others."""

    def evaluate_all(state: PyTree) -> dict[str, float]:
        personal_accuracy, shared_accuracy = map(float, personal(state.x, state.y))
        return {
            "unseen_accuracy": personal_accuracy,
            "unseen_shared_accuracy": shared_accuracy,
            **evaluate(state),
        }

    return evaluate_all


def _baselines(
    problem: BilevelProblem,
    data: FederatedData,
    together: FederatedData,
    x0: PyTree,
    y0: Linear,
    evaluate: Metrics,
) -> tuple[Baseline, ...]:
    """Return two baselines: a head on random features, and both levels trained jointly."""
    joint = _one_level(problem)
    return (
        Baseline("random representation", problem, data, y0, (x0,), evaluate),
        Baseline(
            "trained together, one level",
            joint,
            together,
            Point(x=x0, y=y0),
            (_NOTHING,),
            lambda state: evaluate(state.y),
        ),
    )


_NOTHING = np.zeros(1, np.float32)


@lru_cache(maxsize=32)
def _one_level(problem: BilevelProblem) -> BilevelProblem:
    """Return the lower loss with representation and head both in y."""

    def one_level(x: PyTree, y: Point[PyTree], batch: PyTree) -> jax.Array:
        return problem.lower(y.x, y.y, batch)

    return BilevelProblem(one_level, one_level)


def scores(model: Model, mean: float, deviation: float) -> Logits:
    """Return the function (x, y, images) -> class scores, on standardised pixels."""

    def logits(x: PyTree, y: Linear, images: jax.Array) -> jax.Array:
        return y(model.features(x, standardise(images, mean, deviation, y.weight.dtype)))

    return logits


def cross_entropy(logits: Logits) -> Loss:
    """Return the mean cross-entropy on a batch (images, labels)."""

    def loss(x: PyTree, y: Linear, batch: PyTree) -> jax.Array:
        images, labels = batch
        return optax.softmax_cross_entropy_with_integer_labels(logits(x, y, images), labels).mean()

    return loss


def accuracy(logits: Logits) -> Loss:
    """Return the share of a batch (images, labels) that is classified correctly."""

    def correct_share(x: PyTree, y: Linear, batch: PyTree) -> jax.Array:
        images, labels = batch
        scores_of_images = logits(x, y, images)
        return (scores_of_images.argmax(-1).astype(labels.dtype) == labels).mean(
            dtype=scores_of_images.dtype
        )

    return correct_share


def regularised(loss: Loss, weight: float) -> Loss:
    """Return `loss + weight/2 ||y||^2`."""
    return lambda x, y, batch: loss(x, y, batch) + 0.5 * weight * trees.squared_norm(y)


def _sample(count: int) -> np.ndarray:
    """Return the same 10,000 random rows, or all if there are fewer.

    Every k-th row would be a biased sample, since MNIST's digits follow a periodic pattern.
    """
    rows = np.random.default_rng(int(Purpose.EVALUATION_ROWS)).permutation(count)[:_TRAIN_SAMPLE]
    return np.sort(rows)


def evaluator(
    logits: Logits, test: Part, train: Part, *, chunk: int = _CHUNK, name: str = "test"
) -> Callable[[PyTree], dict[str, float]]:
    """Return the function (state) -> accuracies and test loss.

    Args:
        logits: (x, y, inputs) -> class scores.
        test: inputs and labels to test on.
        train: inputs and labels trained on, of which a sample is evaluated.
        chunk: the number of rows computed at once.
        name: of the metrics on `test`.
    """
    rows = _sample(len(train[1]))
    train = jax.tree.map(lambda a: a[rows], train)

    @jax.jit
    def totals(x: PyTree, y: PyTree, batch: Part) -> tuple[jax.Array, jax.Array]:
        outputs = logits(x, y, batch[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(outputs, batch[1])
        correct = outputs.argmax(-1).astype(batch[1].dtype) == batch[1]
        return correct.sum(), loss.sum()

    def means(state: PyTree, dataset: Part) -> tuple[float, float]:
        count = len(dataset[1])
        cuts = (slice(i, i + chunk) for i in range(0, count, chunk))
        chunks = (jax.tree.map(lambda a, cut=cut: a[cut], dataset) for cut in cuts)
        total_correct, loss = map(
            sum,
            zip(
                *(totals(state.x, state.y, rows_of_chunk) for rows_of_chunk in chunks), strict=True
            ),
        )
        return float(total_correct) / count, float(loss) / count

    def evaluate(state: PyTree) -> dict[str, float]:
        accuracy, loss = means(state, test)
        return {
            f"{name}_accuracy": accuracy,
            f"{name}_loss": loss,
            "train_accuracy": means(state, train)[0],
        }

    return evaluate
