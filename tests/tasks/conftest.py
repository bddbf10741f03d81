"""Second implementations in NumPy that several tests of tasks share."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from simfbo.core.data import pooled


class Toolbox(NamedTuple):
    """Functions on arrays; only `hypergradient` uses JAX, for derivatives."""

    cross_entropy: object
    fit: object
    slopes: object
    share_rows: object
    hypergradient: object


class Dense(NamedTuple):
    """Derivatives at a point: grad_y G, v = (grad_yy G)^-1 grad_y F, grad_x F - grad_xy G v."""

    lower_grad: np.ndarray
    v: object
    gradient: np.ndarray


def hypergradient(problem, data, x, y):
    """Return the hypergradient at a solution y of the lower problem, by dense matrices."""
    (x, to_x), (y, to_y) = ravel_pytree(x), ravel_pytree(y)

    def total(loss, part):
        mean = pooled(loss, part, data.p)
        return lambda x, y: mean(to_x(x), to_y(y))

    lower, upper = total(problem.lower, data.lower), total(problem.upper, data.upper)
    slope = jax.grad(lower, 1)

    @jax.jit
    def derivatives(x, y):
        return slope(x, y), jax.jacfwd(slope, (0, 1))(x, y), jax.grad(upper, (0, 1))(x, y)

    found = jax.tree.map(np.asarray, derivatives(x, y))
    lower_grad, (cross, hessian), (grad_x, grad_y) = found
    v = np.linalg.solve(hessian, grad_y)
    return Dense(lower_grad, to_y(v), grad_x - cross.T @ v)


def cross_entropy(scores, labels):
    """Return each row's loss."""
    top = scores.max(1, keepdims=True)
    sums = np.log(np.exp(scores - top).sum(1)) + top[:, 0]
    return sums - scores[np.arange(len(labels)), labels]


def fit(features, labels, weights, penalty, scale=None, shift=None):
    """Return the minimiser [d + 1, C] of sum_r w_r loss_r + penalty/2 ||.||^2, by Newton's method.

    Scores are scale_c (a'w_c + b_c) + shift_c; the last row of what is returned is b.
    """
    wide = np.column_stack([features, np.ones(len(features))])
    classes = int(labels.max()) + 1
    scale = np.ones(classes) if scale is None else scale
    shift = np.zeros(classes) if shift is None else shift
    theta, hot = np.zeros((wide.shape[1], classes)), np.eye(classes)[labels]
    for _ in range(30):
        scores = scale * (wide @ theta) + shift
        odds = np.exp(scores - scores.max(1, keepdims=True))
        odds /= odds.sum(1, keepdims=True)
        gradient = wide.T @ (weights[:, None] * (odds - hot) * scale) + penalty * theta
        spread = np.einsum("rc,ck->rck", odds, np.eye(classes)) - odds[:, :, None] * odds[:, None]
        spread = spread * weights[:, None, None] * scale[:, None] * scale
        hessian = np.einsum("rck,ri,rj->icjk", spread, wide, wide).reshape(theta.size, -1)
        step = np.linalg.solve(hessian + penalty * np.eye(theta.size), gradient.ravel())
        theta = theta - step.reshape(theta.shape)
        if np.abs(step).max() < 1e-14:
            break
    return theta


def slopes(function, x, step=1e-4):
    """Return the gradient of a function of a vector by central differences of fourth order."""
    found = []
    for e in np.eye(len(x)):
        near, far = (function(x + k * step * e) - function(x - k * step * e) for k in (1, 2))
        found.append((8 * near - far) / (12 * step))
    return np.array(found)


def share_rows(parts, p, count):
    """Return the weight p_i / n_i of every row in the federation's mean."""
    weights = np.zeros(count)
    for rows, own in zip(parts, p, strict=True):
        weights[rows] = own / len(rows)
    return weights


@pytest.fixture(scope="session")
def by_hand():
    return Toolbox(cross_entropy, fit, slopes, share_rows, hypergradient)
