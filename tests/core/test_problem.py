"""Points, and the derivative products against dense Hessians."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core import problem as bp
from simfbo.core.problem import BilevelProblem, Point, Weighted

RNG = np.random.default_rng(0)
X, Y, V = RNG.normal(size=(3, 2)), RNG.normal(size=2), RNG.normal(size=2)
LOWER = RNG.normal(size=(6, 3)), RNG.normal(size=6)
UPPER = RNG.normal(size=(4, 3)), RNG.normal(size=4)


def lower(x, y, batch):
    inputs, targets = batch
    return jnp.mean(jnp.cosh(jnp.tanh(inputs @ x) @ y - targets)) + 0.05 * jnp.vdot(y, y)


def upper(x, y, batch):
    inputs, targets = batch
    return jnp.mean((jnp.sin(inputs @ x) @ y - targets) ** 2)


PROBLEM = BilevelProblem(upper=upper, lower=lower)


# Compiled, since every operation on its own would be compiled by itself.
directions = jax.jit(partial(bp.directions, PROBLEM))
independent_directions = jax.jit(partial(bp.independent_directions, PROBLEM))


@jax.jit
def dense_directions(zeta, psi, xi):
    """Return the three directions from explicit Hessians."""
    d_y = jax.grad(lower, 1)(X, Y, zeta)
    hessian = jax.hessian(lower, 1)(X, Y, psi[0])
    d_v = hessian @ V - jax.grad(upper, 1)(X, Y, psi[1])
    cross = jax.jacfwd(jax.grad(lower, 0), 1)(X, Y, xi[0])
    d_x = jax.grad(upper, 0)(X, Y, xi[1]) - cross @ V
    return Point(d_x, d_y, d_v)


def assert_close(found, expected, tolerance=1e-13):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), found, expected
    )


def test_points_come_in_the_order_x_y_v():
    assert Point._fields == ("x", "y", "v")
    assert Point(1, 2, 3) == Point(v=3, y=2, x=1) == (1, 2, 3)
    assert Point() == (None, None, None)


def test_a_point_is_a_pytree_of_what_it_holds():
    point = Point(x={"a": 1.0, "b": 2.0}, v=3.0)
    assert jax.tree.leaves(point) == [1.0, 2.0, 3.0]  # nothing in the place of y
    assert jax.tree.map(lambda leaf: -leaf, point) == Point(x={"a": -1.0, "b": -2.0}, v=-3.0)
    with pytest.raises(ValueError, match="pytree structure error"):
        jax.tree.map(lambda a, b: a, point, Point(x={"a": 1.0, "b": 2.0}, y=3.0))


def test_a_point_may_hold_anything():
    assert Point[float](0.1, 0.2, 0.3) == Point(0.1, 0.2, 0.3)
    assert hash(Point(x=max)) == hash(Point(x=max))
    assert Point(x=0.1)._replace(y=0.2) == Point(0.1, 0.2, None)


def test_directions_are_those_of_dense_hessians():
    found = directions(X, Y, V, LOWER, UPPER)
    assert_close(found, dense_directions(LOWER, (LOWER, UPPER), (LOWER, UPPER)))


def test_independent_directions_use_their_own_batches():
    def half(batch, part):
        return jax.tree.map(lambda a: a[part], batch)

    first, second = slice(0, 2), slice(2, 4)
    psi = half(LOWER, first), half(UPPER, first)
    xi = half(LOWER, second), half(UPPER, second)
    found = independent_directions(X, Y, V, LOWER, psi, xi)
    assert_close(found, dense_directions(LOWER, psi, xi))
    shared = directions(X, Y, V, LOWER, UPPER)
    assert float(np.abs(found.x - shared.x).max()) > 1e-3


def test_products_one_by_one():
    @jax.jit
    def products():
        cross = jax.jacfwd(jax.grad(lower, 0), 1)(X, Y, LOWER) @ V
        hessian = jax.hessian(lower, 1)(X, Y, LOWER)
        found = (
            bp.grad_lower_y(PROBLEM, X, Y, LOWER),
            bp.hvp(PROBLEM, X, Y, V, LOWER),
            bp.mixed(PROBLEM, X, Y, V, LOWER),
            bp.grad_upper_y(PROBLEM, X, Y, UPPER),
            bp.grad_upper_x(PROBLEM, X, Y, UPPER),
        )
        upper_x, upper_y = jax.grad(upper, (0, 1))(X, Y, UPPER)
        return found, (jax.grad(lower, 1)(X, Y, LOWER), hessian @ V, cross, upper_y, upper_x)

    assert_close(*products())


@pytest.mark.parametrize("real", [1, 4])
def test_weighted_batch_is_the_mean_over_the_real_samples(real):
    weights = jnp.where(jnp.arange(6) < real, 1 / real, 0.0)
    part = jax.tree.map(lambda a: a[:real], LOWER)
    found = directions(X, Y, V, Weighted(LOWER, weights), UPPER)
    assert_close(found, directions(X, Y, V, part, UPPER))
