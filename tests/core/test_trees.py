"""Arithmetic on pytrees: leaf by leaf, and every leaf keeps its dtype."""

import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.problem import Point

A = Point(x=jnp.array([1.0, 2.0]), y=(jnp.array([3.0], jnp.float32), jnp.array(4.0, jnp.float16)))
B = Point(x=jnp.array([5.0, 6.0]), y=(jnp.array([7.0], jnp.float32), jnp.array(8.0, jnp.float16)))


def check(tree, x, y, z):
    assert [leaf.dtype for leaf in (tree.x, *tree.y)] == [jnp.float64, jnp.float32, jnp.float16]
    assert (tree.x.tolist(), tree.y[0].tolist(), tree.y[1].tolist()) == (x, y, z)


def test_arithmetic():
    check(trees.add(A, B), [6, 8], [10], 12)
    check(trees.subtract(A, B), [-4, -4], [-4], -4)
    check(trees.scale(np.float64(0.5), A), [0.5, 1], [1.5], 2)
    check(trees.add_scaled(A, np.float64(-0.5), B), [-1.5, -1], [-0.5], 0)
    check(trees.zeros_like(A), [0, 0], [0], 0)


def test_products():
    a = Point(x=jnp.array([1.0, 2.0]), v=jnp.array([[3.0]]))
    b = Point(x=jnp.array([4.0, 5.0]), v=jnp.array([[-6.0]]))
    assert float(trees.dot(a, b)) == 4 + 10 - 18
    assert float(trees.squared_norm(a)) == 14


def test_leaves_by_name():
    arrays = trees.as_arrays({"b": A, "a": jnp.ones(2)})
    assert list(arrays) == ["['a']", "['b'].x", "['b'].y[0]", "['b'].y[1]"]
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    np.testing.assert_array_equal(arrays["['b'].x"], [1, 2])
