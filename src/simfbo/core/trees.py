"""Pytrees: arithmetic that keeps every leaf's dtype, and the names of leaves."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree, Scalar


def on_device(tree: PyTree) -> PyTree:
    """Convert all leaves to JAX arrays without compilation."""

    def put(leaf: object) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return leaf
        array = np.asarray(leaf)
        return jax.device_put(array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False))

    return jax.tree.map(put, tree)


def host_zeros(tree: PyTree) -> PyTree:
    """Return zeros of the tree's shapes and dtypes as concrete JAX arrays."""
    return on_device(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), tree))


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


def host_norm(tree: PyTree) -> float:
    """Return ||tree|| of arrays, computed on the host."""
    return math.hypot(*(float(np.linalg.norm(np.ravel(leaf))) for leaf in jax.tree.leaves(tree)))


def names(tree: PyTree) -> list[str]:
    """Return the names of a tree's leaves in messages and files.

    Example:
        >>> from simfbo.core.problem import Point
        >>> names(Point(x={"w": 1.0}, y=2.0))
        [".x['w']", '.y']
    """
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def as_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """Return a tree's leaves as NumPy arrays by name."""
    return dict(zip(names(tree), map(np.asarray, jax.tree.leaves(tree)), strict=True))
