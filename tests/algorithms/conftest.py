"""On quadratics with full batches a round is an affine map: what its walks end at, exactly."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree


class Affine(NamedTuple):
    """The map z -> matrix z + offset of all variables of a state, one after the other."""

    matrix: np.ndarray
    offset: np.ndarray

    @property
    def rate(self):
        """Return by which factor a round shrinks errors in the long run."""
        return np.abs(np.linalg.eigvals(self.matrix)).max()

    @property
    def fixed_point(self):
        """Return where a round moves nothing."""
        return np.linalg.solve(np.eye(len(self.offset)) - self.matrix, self.offset)


@pytest.fixture(scope="session")
def affine():
    """Return a function that finds the map of one round from its values at 0 and unit vectors."""

    def find(algorithm, federation, x0, y0, variables=3):
        """Return the map of a state's first variables, x, y and v; all else stays as it begins."""
        leaves, structure = jax.tree.flatten(algorithm.init(x0, y0))
        flat, back = ravel_pytree(leaves[:variables])
        key = jax.random.key(0)

        def step(z):
            state = jax.tree.unflatten(structure, [*back(z), *leaves[variables:]])
            after = jax.tree.leaves(algorithm.round(state, federation, key))
            return np.concatenate(after[:variables])

        offset = step(np.zeros(flat.size))
        matrix = np.stack([step(unit) - offset for unit in np.eye(flat.size)], axis=1)
        return Affine(matrix, offset)

    return find
