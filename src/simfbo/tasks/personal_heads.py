"""Personal heads: the usefulness of a shared representation to clients outside of training.

A client outside the federation takes the representation x and the shared head y, fits a head of its
own on half of its images,

    h = argmin mean cross-entropy(h(features(x, image)), label) + pull/2 ||h - y||^2,

and is tested on the other half.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.core import trees
from simfbo.core.partition import Rows, halve
from simfbo.core.problem import PyTree
from simfbo.tasks.models import Linear

Features = Callable[[PyTree, jax.Array], jax.Array]
_STEPS = 100
_MOMENTUM = 0.9


class Half(NamedTuple):
    """Half of some clients' samples, padded to a common length; padding has weight zero."""

    images: jax.Array
    labels: jax.Array
    weights: jax.Array


def halves(images: np.ndarray, labels: np.ndarray, parts: Rows, seed: int) -> tuple[Half, Half]:
    """Split each client's images into halves for fitting and testing."""
    fitted, tested = halve(parts, 0.5, seed)
    return padded(images, labels, fitted), padded(images, labels, tested)


def padded(images: np.ndarray, labels: np.ndarray, parts: Rows) -> Half:
    """Stack the samples of the clients, padded to a common length."""
    longest = max(map(len, parts))
    rows = np.stack([np.resize(part, longest) for part in parts])
    is_sample = np.stack([np.arange(longest) < len(part) for part in parts])
    weights = is_sample / is_sample.sum(1, keepdims=True)
    return Half(
        jnp.asarray(images[rows]), jnp.asarray(labels[rows]), jnp.asarray(weights, jnp.float32)
    )


def fit_head(
    inputs: jax.Array, labels: jax.Array, weights: jax.Array, shared: Linear, pull: float
) -> Linear:
    """Fit one client's own head by gradient steps with momentum, starting at the shared one.

    Args:
        inputs: features [m, width].
        labels: [m].
        weights: of the samples; they sum to one.
        shared: the shared head.
        pull: the weight of the penalty on the distance from it.
    """
    # Half the mean squared norm (with the 1 of the bias) bounds the curvature of cross-entropy.
    bound = 0.5 * (weights @ (inputs**2).sum(1) + 1.0) + pull

    def loss(head: Linear) -> jax.Array:
        cross_entropies = optax.softmax_cross_entropy_with_integer_labels(head(inputs), labels)
        return weights @ cross_entropies + 0.5 * pull * trees.squared_norm(
            trees.subtract(head, shared)
        )

    def step(_: PyTree, carry: tuple[Linear, Linear]) -> tuple[Linear, Linear]:
        head, velocity = carry
        velocity = trees.add_scaled(
            trees.scale(_MOMENTUM, velocity), -1 / bound, jax.grad(loss)(head)
        )
        return trees.add(head, velocity), velocity

    return jax.lax.fori_loop(0, _STEPS, step, (shared, trees.zeros_like(shared)))[0]


def own_accuracies(
    features: Features, split: tuple[Half, Half], pull: float
) -> Callable[[PyTree, Linear], jax.Array]:
    """Return (x, y) -> the accuracy of every client's own head, which starts at y.

    Args:
        features: (x, images) -> features.
        split: the halves for fitting and testing.
        pull: the weight of the penalty on the distance from y.
    """

    @jax.jit
    def accuracies(x: PyTree, y: Linear) -> jax.Array:
        def accuracy_of_client(pair: tuple[Half, Half]) -> jax.Array:
            fit, test = pair
            weights = fit.weights.astype(y.weight.dtype)
            head = fit_head(features(x, fit.images), fit.labels, weights, y, pull)
            return _accuracy(head(features(x, test.images)), test)

        return jax.lax.map(accuracy_of_client, split)

    return accuracies


def personal_accuracies(
    features: Features, split: tuple[Half, Half], pull: float
) -> Callable[[PyTree, Linear], tuple[jax.Array, jax.Array]]:
    """Return (x, y) -> the mean accuracies of the clients' own heads and of the shared head."""
    fitted, tested = split

    @jax.jit
    def accuracies(x: PyTree, y: Linear) -> tuple[jax.Array, jax.Array]:
        def accuracies_of_client(fit: Half, test: Half) -> tuple[jax.Array, jax.Array]:
            weights = fit.weights.astype(y.weight.dtype)
            head = fit_head(features(x, fit.images), fit.labels, weights, y, pull)
            inputs = features(x, test.images)
            return _accuracy(head(inputs), test), _accuracy(y(inputs), test)

        return jax.tree.map(
            jnp.mean, jax.lax.map(lambda pair: accuracies_of_client(*pair), (fitted, tested))
        )

    return accuracies


def _accuracy(scores: jax.Array, test: Half) -> jax.Array:
    correct = scores.argmax(-1).astype(test.labels.dtype) == test.labels
    return test.weights @ correct.astype(test.weights.dtype)
