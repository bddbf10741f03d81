"""Arithmetic on pytrees that keeps every leaf's dtype."""

from typing import Any

import jax
import jax.numpy as jnp

from simfbo.core.problem import PyTree


def zeros_like(tree: PyTree) -> Any:
    """Return zeros of the tree's shapes and dtypes; the tree may be abstract."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def scale(factor: Any, tree: PyTree) -> Any:
    """Return factor * tree."""
    return jax.tree.map(lambda a: jnp.asarray(factor, a.dtype) * a, tree)


def add_scaled(base: PyTree, factor: Any, tree: PyTree) -> Any:
    """Return base + factor * tree."""
    return jax.tree.map(lambda b, a: b + jnp.asarray(factor, b.dtype) * a, base, tree)


def add_weighed(total: PyTree, weights: Any, tree: PyTree) -> Any:
    """Return total + weights (outer) tree: for a vector of weights, a sum for each of them."""

    def leaf(b: Any, a: Any) -> Any:
        return b + jnp.multiply.outer(jnp.asarray(weights, a.dtype), a)

    return jax.tree.map(leaf, total, tree)


def add(a: PyTree, b: PyTree) -> Any:
    """Return a + b."""
    return jax.tree.map(jnp.add, a, b)


def subtract(a: PyTree, b: PyTree) -> Any:
    """Return a - b."""
    return jax.tree.map(jnp.subtract, a, b)


def dot(a: PyTree, b: PyTree) -> jax.Array:
    """Return <a, b>."""
    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b))))


def squared_norm(tree: PyTree) -> jax.Array:
    """Return ||tree||^2."""
    return dot(tree, tree)
