"""Pytrees: arithmetic that keeps every leaf's dtype, and the names of leaves."""

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree, Scalar


def zeros_like(tree: PyTree) -> PyTree:
    """Return zeros of the tree's shapes and dtypes; the tree may be abstract."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def scale(factor: Scalar, tree: PyTree) -> PyTree:
    """Return factor * tree."""
    return jax.tree.map(lambda a: jnp.asarray(factor, a.dtype) * a, tree)


def add_scaled(base: PyTree, factor: Scalar, tree: PyTree) -> PyTree:
    """Return base + factor * tree."""
    return jax.tree.map(lambda b, a: b + jnp.asarray(factor, b.dtype) * a, base, tree)


def add(a: PyTree, b: PyTree) -> PyTree:
    """Return a + b."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """Return a - b."""
    return jax.tree.map(jnp.subtract, a, b)


def dot(a: PyTree, b: PyTree) -> jax.Array:
    """Return <a, b>."""
    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b))))


def squared_norm(tree: PyTree) -> jax.Array:
    """Return ||tree||^2."""
    return dot(tree, tree)


def names(tree: PyTree) -> list[str]:
    """Return the names of a tree's leaves, as messages and files carry them.

    Example:
        >>> from simfbo.core.problem import Point
        >>> names(Point(x={"w": 1.0}, y=2.0))
        [".x['w']", '.y']
    """
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def as_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """Return a tree's leaves as NumPy arrays by name."""
    return dict(zip(names(tree), map(np.asarray, jax.tree.leaves(tree)), strict=True))
