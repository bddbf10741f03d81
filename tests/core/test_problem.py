"""The derivative products against dense Hessians and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core import problem as bp
from simfbo.core.problem import BilevelProblem, Weighted

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (3, 2))
Y = jax.random.normal(KEYS[1], (2,))
V = jax.random.normal(KEYS[2], (2,))
LOWER = jax.random.normal(KEYS[3], (6, 3)), jax.random.normal(KEYS[4], (6,))
UPPER = jax.random.normal(KEYS[5], (4, 3)), jax.random.normal(KEYS[6], (4,))


def lower(x, y, batch):
    inputs, targets = batch
    return jnp.mean(jnp.cosh(jnp.tanh(inputs @ x) @ y - targets)) + 0.05 * jnp.vdot(y, y)


def upper(x, y, batch):
    inputs, targets = batch
    return jnp.mean((jnp.sin(inputs @ x) @ y - targets) ** 2)


PROBLEM = BilevelProblem(upper=upper, lower=lower)


def dense_directions(zeta, psi, xi):
    """Return the three directions from explicit Hessians."""
    d_y = jax.grad(lower, 1)(X, Y, zeta)
    hessian = jax.hessian(lower, 1)(X, Y, psi[0])
    d_v = hessian @ V - jax.grad(upper, 1)(X, Y, psi[1])
    cross = jax.jacfwd(jax.grad(lower, 0), 1)(X, Y, xi[0])
    d_x = jax.grad(upper, 0)(X, Y, xi[1]) - cross @ V
    return d_x, d_y, d_v


def assert_close(found, expected, tolerance=1e-13):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), found, expected
    )


def test_directions_are_those_of_dense_hessians():
    found = bp.directions(PROBLEM, X, Y, V, LOWER, UPPER)
    assert_close(tuple(found), dense_directions(LOWER, (LOWER, UPPER), (LOWER, UPPER)))


def test_independent_directions_use_their_own_batches():
    def half(batch, part):
        return jax.tree.map(lambda a: a[part], batch)

    first, second = slice(0, 2), slice(2, 4)
    psi = half(LOWER, first), half(UPPER, first)
    xi = half(LOWER, second), half(UPPER, second)
    found = bp.independent_directions(PROBLEM, X, Y, V, LOWER, psi, xi)
    assert_close(tuple(found), dense_directions(LOWER, psi, xi))
    shared = bp.directions(PROBLEM, X, Y, V, LOWER, UPPER)
    assert float(jnp.abs(found.x - shared.x).max()) > 1e-3


def test_products_one_by_one():
    d_x, d_y, _ = dense_directions(LOWER, (LOWER, UPPER), (LOWER, UPPER))
    assert_close(bp.grad_lower_y(PROBLEM, X, Y, LOWER), d_y)
    assert_close(bp.hvp(PROBLEM, X, Y, V, LOWER), jax.hessian(lower, 1)(X, Y, LOWER) @ V)
    assert_close(bp.mixed(PROBLEM, X, Y, V, LOWER), bp.grad_upper_x(PROBLEM, X, Y, UPPER) - d_x)
    assert_close(bp.grad_upper_y(PROBLEM, X, Y, UPPER), jax.grad(upper, 1)(X, Y, UPPER))


@pytest.mark.parametrize("real", [1, 4, 6])
def test_weighted_batch_is_the_mean_over_the_real_samples(real):
    weights = jnp.where(jnp.arange(6) < real, 1 / real, 0.0)
    part = jax.tree.map(lambda a: a[:real], LOWER)
    found = bp.directions(PROBLEM, X, Y, V, Weighted(LOWER, weights), UPPER)
    assert_close(found, bp.directions(PROBLEM, X, Y, V, part, UPPER))
