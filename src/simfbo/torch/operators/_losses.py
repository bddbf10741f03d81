"""Losses whose decomposition in PyTorch loses derivatives at kinks."""

import jax
import jax.numpy as jnp

_LARGEST = 100.0  # bound on logarithms in PyTorch's binary cross-entropy
_LEAST = 1e-12  # lower bound on p (1 - p) in its derivative


def reduced(losses: jax.Array, reduction: int) -> jax.Array:
    """Return all losses, their mean (1) or their sum (2)."""
    if reduction == 0:
        return losses
    return losses.mean() if reduction == 1 else losses.sum()


def huber(a: jax.Array, b: jax.Array, reduction: int = 1, delta: float = 1.0) -> jax.Array:
    """Return Huber's loss: quadratic for differences within delta, linear beyond."""
    difference = a - b
    size = jnp.sign(difference) * difference
    line = delta * (size - 0.5 * delta)
    return reduced(jnp.where(size <= delta, 0.5 * difference * difference, line), reduction)


def smooth_l1(a: jax.Array, b: jax.Array, reduction: int = 1, beta: float = 1.0) -> jax.Array:
    """Return Huber's loss over beta; for beta 0, the absolute difference."""
    difference = a - b
    size = jnp.sign(difference) * difference
    if beta == 0:
        return reduced(size, reduction)
    square = 0.5 * difference * difference / beta
    return reduced(jnp.where(size < beta, square, size - 0.5 * beta), reduction)


def log_sigmoid(a: jax.Array) -> tuple[jax.Array, None]:
    """Return log(1 / (1 + exp(-a)))."""
    return jax.nn.log_sigmoid(a), None


def binary_cross_entropy(
    p: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = 1
) -> jax.Array:
    """Return -target log p - (1 - target) log(1 - p), with logarithms of at least -100."""
    losses = _binary(p, target)
    return reduced(losses if weight is None else losses * weight, reduction)


@jax.custom_jvp
def _binary(p: jax.Array, target: jax.Array) -> jax.Array:
    yes, no = _log(p), _log(1 - p)
    return -target * yes - (1 - target) * no


@_binary.defjvp
def _binary_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the loss and its tangent, with PyTorch's lower bound on the denominator."""
    p, target = primals
    slope = (p - target) / jnp.maximum(p * (1 - p), _LEAST)
    across = _log(1 - p) - _log(p)
    return _binary(p, target), slope * tangents[0] + across * tangents[1]


def _log(p: jax.Array) -> jax.Array:
    """Return the logarithm, at least -100, with derivative 0 there."""
    least = jnp.exp(jnp.asarray(-_LARGEST, p.dtype))
    return jnp.where(p <= least, -_LARGEST, jnp.log(jnp.where(p <= least, 1.0, p)))


LOSSES = {
    "binary_cross_entropy": binary_cross_entropy,
    "huber_loss": huber,
    "log_sigmoid_forward": log_sigmoid,
    "smooth_l1_loss": smooth_l1,
}
"""Losses, by name."""
