"""Perceptrons with learnt L2 weights: one for every feature or layer.

The losses are those of `_regularisation`, with networks in place of linear models. Their weights
are s_j u, where u has the same small penalty everywhere, s_j = sqrt(lambda_min / lambda_j), and j
is the feature that a weight of the first layer belongs to, or the layer.

The Hessian of a network's loss has negative eigenvalues, for which the linear system of the
hypergradient diverges. It is replaced by the Gauss-Newton matrix (`gauss_newton`), which is
positive semidefinite. Values and gradients stay exact, so the lower solution does not change; the
hypergradient neglects the curvature of the network, which is multiplied by residuals.
"""

import itertools
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.keys import Purpose, seed_rng
from simfbo.tasks._regularisation import Form, first_x
from simfbo.tasks.layers import gauss_newton
from simfbo.tasks.models import Linear

Layers = tuple[Linear, ...]


def network(layers: Layers, features: jax.Array) -> jax.Array:
    """Return the outputs of a network with tanh units."""
    for layer in layers[:-1]:
        features = jnp.tanh(layer(features))
    return layers[-1](features)


def scaled(x: jax.Array, layers: Layers) -> Layers:
    """Return the network in the features' own units.

    Args:
        x: [d + L] with an entry for every feature, or [1 + L] with one for all, and one for each of
            the L other layers.
        layers: u.
    """
    first, *others = layers
    s, count = jnp.sqrt(jax.nn.sigmoid(-x)), len(others)
    later = zip(s[len(s) - count :], others, strict=True)
    return (
        Linear(s[: len(s) - count, None] * first.weight, first.bias),
        *(Linear(scale * layer.weight, layer.bias) for scale, layer in later),
    )


@lru_cache(maxsize=32)
def form(hidden: tuple[int, ...], by_feature: bool) -> Form:
    """Return networks as a kind of model; cached.

    Args:
        hidden: the sizes of the hidden layers.
        by_feature: one L2 weight per feature rather than one for the first layer.
    """

    def outputs(x: jax.Array, model: Layers, features: jax.Array) -> jax.Array:
        return gauss_newton(lambda layers: network(layers, features), scaled(x, model))

    def start(width: int, classes: int, floor: float, seed: int) -> tuple[np.ndarray, Layers]:
        x0 = first_x((width if by_feature else 1) + len(hidden), floor)
        scale, rng = float(np.sqrt(1 / (1 + np.exp(x0[0])))), seed_rng(seed, Purpose.NETWORKS)
        sizes = itertools.pairwise((width, *hidden, classes))
        return x0, tuple(_drawn(rng, *pair, scale) for pair in sizes)

    return Form(outputs, start)


def _drawn(rng: np.random.Generator, inputs: int, outputs: int, scale: float) -> Linear:
    """Draw an initial layer u, whose weights s u have a variance of one over the inputs."""
    weight = rng.normal(0, 1 / (scale * np.sqrt(inputs)), (inputs, outputs))
    parts: Any = weight.astype(np.float32), np.zeros(outputs, np.float32)
    return Linear(*parts)
