"""What is to be known of a round of a block, as one row of numbers."""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree


def flat(tree: PyTree) -> jax.Array:
    """Return all numbers of a tree, one after the other."""
    leaves = [jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves) if leaves else jnp.zeros(0)


class Notes(NamedTuple):
    """The shape of what is to be known of a round: it comes as one row of numbers."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tree: PyTree) -> "Notes":
        """Return the shape of a tree."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(leaf.shape for leaf in leaves))

    @property
    def width(self) -> int:
        """Return the numbers in a row."""
        return sum(map(math.prod, self.shapes))

    def unpacked(self, rows: np.ndarray) -> PyTree:
        """Return the tree in rows of numbers; its leaves have the rows as their first axis."""
        ends = np.cumsum([0, *map(math.prod, self.shapes)]).tolist()
        parts = zip(pairwise(ends), self.shapes, strict=True)
        leaves = [rows[:, a:b].reshape(len(rows), *shape) for (a, b), shape in parts]
        return jax.tree.unflatten(self.structure, leaves)
