"""What is checked and made before the first round of a run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.federation import Algorithm
from simfbo.core.problem import PyTree
from simfbo.errors import UserError


def require_arrays(name: str, state: PyTree) -> None:
    """Raise before the run starts if its state cannot be saved."""
    for leaf in jax.tree.leaves(state):
        plain = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if not plain or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            kind = "random key" if plain else type(leaf).__name__
            raise UserError(
                f"The state of {name} holds a {kind}, which cannot be saved: use arrays (for a "
                "random key, its key_data)."
            )


def first_memory(algorithm: Algorithm, federation: Any, x0: PyTree, y0: PyTree) -> PyTree:
    """Let the clients forget earlier runs; return what they remember, if that is kept here."""
    if hasattr(federation, "remember"):
        federation.remember(algorithm, x0, y0)
        return federation.client_memory
    if algorithm.memory is not None:
        raise UserError(
            f"The clients of {algorithm.name} remember, and this federation has no `remember`: use "
            "an engine of simfbo."
        )
    return None
