"""Small image models in two parts: a representation (the upper variable) and a linear head."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.tasks.layers import conv2d, max_pool

_CHUNK = 2000  # images at a time


class Linear(NamedTuple):
    """The weights of an affine map."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return inputs @ weight + bias."""
        return inputs @ self.weight + self.bias


class Model(NamedTuple):
    """A classifier: `y(features(x, images))`.

    Attributes:
        init: (key) -> (x, y), the representation's and the head's initial weights.
        features: (x, images as floats) -> [batch, width].
    """

    init: Callable[[jax.Array], tuple[PyTree, Linear]]
    features: Callable[[PyTree, jax.Array], jax.Array]


def moments(pixels: np.ndarray) -> tuple[float, float]:
    """Return the exact mean and standard deviation of bytes without converting them to floats."""
    chunks = (pixels[i : i + _CHUNK] for i in range(0, len(pixels), _CHUNK))
    counts = sum(np.bincount(chunk.ravel(), minlength=256) for chunk in chunks)
    mean = np.average(np.arange(256), weights=counts)
    return float(mean), float(np.sqrt(np.average((np.arange(256) - mean) ** 2, weights=counts)))


def standardise(images: jax.Array, mean: float, deviation: float, dtype: jnp.dtype) -> jax.Array:
    """Return (images - mean) / deviation as floats.

    Images are stored as bytes and converted per batch, which takes a quarter of the memory and
    is faster.
    """
    factor = jnp.asarray(1 / deviation, dtype)
    return (images.astype(dtype) - jnp.asarray(mean, dtype)) * factor


@cache
def mlp(inputs: int, hidden: int, classes: int) -> Model:
    """Build a perceptron with one hidden layer of rectified linear units.

    On MNIST, 784-200-10: x has 157,000 parameters, y 2,010.
    """

    def init(key: jax.Array) -> tuple[Linear, Linear]:
        lower, upper = jax.random.split(key)
        return _linear(lower, inputs, hidden), _linear(upper, hidden, classes)

    def features(x: Linear, images: jax.Array) -> jax.Array:
        return jax.nn.relu(x(images.reshape(len(images), -1)))

    return Model(init, features)


@cache
def cnn(size: int, channels: int, classes: int) -> Model:
    """Build a network like LeNet-5: two 5x5 convolutions with pooling, then 120, 84 and the head.

    On CIFAR-10: x has 61,156 parameters, y 850.
    """
    side = ((size - 4) // 2 - 4) // 2

    def init(key: jax.Array) -> tuple[list[Linear], Linear]:
        keys = jax.random.split(key, 5)
        x = [
            _kernel(keys[0], channels, 6),
            _kernel(keys[1], 6, 16),
            _linear(keys[2], side * side * 16, 120),
            _linear(keys[3], 120, 84),
        ]
        return x, _linear(keys[4], 84, classes)

    def features(x: list[Linear], images: jax.Array) -> jax.Array:
        images = images.reshape(len(images), size, size, channels)
        for weights in x[:2]:
            images = max_pool(jax.nn.relu(conv2d(images, weights.weight, weights.bias)))
        flat = images.reshape(len(images), -1)
        return jax.nn.relu(x[3](jax.nn.relu(x[2](flat))))

    return Model(init, features)


def _linear(key: jax.Array, inputs: int, outputs: int) -> Linear:
    """Draw weights and biases uniformly from +-1/sqrt(inputs), like PyTorch."""
    return _uniform(key, inputs, (inputs, outputs))


def _kernel(key: jax.Array, inputs: int, outputs: int) -> Linear:
    """Draw the weights of a 5x5 convolution in the same way."""
    return _uniform(key, 25 * inputs, (5, 5, inputs, outputs))


def _uniform(key: jax.Array, fan_in: int, shape: tuple[int, ...]) -> Linear:
    weight, bias = jax.random.split(key)
    bound = fan_in**-0.5
    return Linear(
        jax.random.uniform(weight, shape, minval=-bound, maxval=bound),
        jax.random.uniform(bias, shape[-1:], minval=-bound, maxval=bound),
    )
