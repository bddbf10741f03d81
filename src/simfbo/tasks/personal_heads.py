"""Personal heads: how useful a shared representation is to clients that were not in training.

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
    """Split each client's images into those it fits on and those it is tested on."""
    fitted, tested = halve(parts, 0.5, seed)
    return padded(images, labels, fitted), padded(images, labels, tested)


def padded(images: np.ndarray, labels: np.ndarray, parts: Rows) -> Half:
    """Return the samples of each client, padded to a common length."""
    longest = max(map(len, parts))
    rows = np.stack([np.resize(part, longest) for part in parts])
    own = np.stack([np.arange(longest) < len(part) for part in parts])
    weights = own / own.sum(1, keepdims=True)
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
        pull: how strongly the head is pulled towards it.
    """
    # Half the mean squared norm (with the 1 of the bias) bounds the curvature of cross-entropy.
    bound = 0.5 * (weights @ (inputs**2).sum(1) + 1.0) + pull

    def loss(head: Linear) -> jax.Array:
        found = optax.softmax_cross_entropy_with_integer_labels(head(inputs), labels)
        return weights @ found + 0.5 * pull * trees.squared_norm(trees.subtract(head, shared))

    def step(_: PyTree, carry: tuple[Linear, Linear]) -> tuple[Linear, Linear]:
        head, speed = carry
        speed = trees.add_scaled(trees.scale(_MOMENTUM, speed), -1 / bound, jax.grad(loss)(head))
        return trees.add(head, speed), speed

    return jax.lax.fori_loop(0, _STEPS, step, (shared, trees.zeros_like(shared)))[0]


def own_accuracies(
    features: Features, split: tuple[Half, Half], pull: float
) -> Callable[[PyTree, Linear], jax.Array]:
    """Return (x, y) -> the accuracy of every client's own head, which starts at y.

    Args:
        features: (x, images) -> features.
        split: what each client fits its head on, and what it is tested on.
        pull: how strongly heads are pulled towards y.
    """

    @jax.jit
    def accuracies(x: PyTree, y: Linear) -> jax.Array:
        def one(pair: tuple[Half, Half]) -> jax.Array:
            fit, test = pair
            weights = fit.weights.astype(y.weight.dtype)
            own = fit_head(features(x, fit.images), fit.labels, weights, y, pull)
            return _accuracy(own(features(x, test.images)), test)

        return jax.lax.map(one, split)

    return accuracies


def personal_accuracies(
    features: Features, split: tuple[Half, Half], pull: float
) -> Callable[[PyTree, Linear], tuple[jax.Array, jax.Array]]:
    """Return (x, y) -> mean accuracy over clients of their own heads and of the shared head."""
    fitted, tested = split

    @jax.jit
    def accuracies(x: PyTree, y: Linear) -> tuple[jax.Array, jax.Array]:
        def one(fit: Half, test: Half) -> tuple[jax.Array, jax.Array]:
            weights = fit.weights.astype(y.weight.dtype)
            own = fit_head(features(x, fit.images), fit.labels, weights, y, pull)
            inputs = features(x, test.images)
            return _accuracy(own(inputs), test), _accuracy(y(inputs), test)

        return jax.tree.map(jnp.mean, jax.lax.map(lambda pair: one(*pair), (fitted, tested)))

    return accuracies


def _accuracy(scores: jax.Array, test: Half) -> jax.Array:
    right = scores.argmax(-1).astype(test.labels.dtype) == test.labels
    return test.weights @ right.astype(test.weights.dtype)
