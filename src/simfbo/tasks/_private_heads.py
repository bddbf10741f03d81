"""A shared representation with one head per client: a personal lower level.

    min_x  sum_i p_i f_i(x, y_i*(x)),    y_i*(x) = argmin_y g_i(x, y)

with the losses of `hyper_representation`. Only x is communicated; heads stay on the clients. A
client is tested on images of its own, with the head that fits its training images best.
"""

from collections.abc import Callable

import jax
import numpy as np

from simfbo.core import trees
from simfbo.core.data import federate
from simfbo.core.partition import Rows, by_user, halve
from simfbo.core.problem import PyTree
from simfbo.datasets import ImageData
from simfbo.tasks._hyper_representation import losses, own_metrics, scaled_features
from simfbo.tasks.models import Model, mlp, moments
from simfbo.tasks.personal_heads import own_accuracies, padded
from simfbo.tasks.task import Task

_HELD_OUT = 0.2
_ACCURACIES = frozenset({"personal_accuracy", "worst_accuracy"})


def private_heads(
    images: ImageData,
    parts: Rows,
    *,
    model: Model | None = None,
    upper_share: float = 0.5,
    batch_size: int | None = 64,
    regularisation: float = 1e-3,
    seed: int = 0,
) -> Task:
    """Build the task of learning a representation for heads that stay with the clients.

    If the data set assigns its test images to clients, a client is tested on its own; otherwise a
    fifth of its training images is held out.

    Args:
        images: a dataset from `simfbo.datasets.load`.
        parts: each client's rows of the training images, from `simfbo.core.partition`.
        model: the network; by default a perceptron with 200 hidden units.
        upper_share: share of each client's images that the upper loss uses.
        batch_size: images in a minibatch at either level.
        regularisation: lambda, which makes g_i strongly convex in y.
        seed: of the initial weights, the split into levels and the held-out images.

    Returns:
        The task; its metrics are the accuracies of the clients' own heads, on average and of the
        worst client.
    """
    pixels, labels = images.train_images, images.train_labels
    model = model or mlp(int(np.prod(pixels.shape[1:])), 200, int(labels.max()) + 1)
    if images.test_clients is None:
        parts, held_out = halve(parts, _HELD_OUT, seed)
        tested = padded(pixels, labels, held_out)
    else:
        tested = padded(images.test_images, images.test_labels, by_user(images.test_clients))
    lower, upper = halve(parts, upper_share, seed)
    scale = moments(pixels)
    fitted = padded(pixels, labels, lower)
    accuracies = own_accuracies(scaled_features(model, *scale), (fitted, tested), regularisation)
    # Rounds fold 1, 2, ... into the seed's key; 0 is reserved for the initial weights.
    x0, y0 = model.init(jax.random.fold_in(jax.random.key(seed), 0))
    return Task(
        "hyper-representation, personal heads",
        losses(model, *scale, regularisation)._replace(lower_level="private"),
        federate((pixels, labels), lower, upper, batch_size=batch_size),
        x0,
        trees.host_zeros(y0),
        _metrics(accuracies, trees.host_zeros(y0)),
        "personal_accuracy",
        "max",
        maximise=_ACCURACIES,
        own_metrics=own_metrics(model, *scale),
    )


def _metrics(
    accuracies: Callable[[PyTree, PyTree], jax.Array], start: PyTree
) -> Callable[[PyTree], dict[str, float]]:
    """Return (state) -> the accuracies of heads fitted by the clients at its x, from zero."""

    def evaluate(state: PyTree) -> dict[str, float]:
        by_client = np.asarray(accuracies(state.x, start))
        return {
            "personal_accuracy": float(by_client.mean()),
            "worst_accuracy": float(by_client.min()),
        }

    return evaluate
