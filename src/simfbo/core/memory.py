"""The memory of stateful clients in engines on this machine: an array per leaf, by client.

On other machines every node stores the memory of its clients (`simfbo.flower.memory`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.core.trees import on_device

Rows = Any  # a NumPy array or, in a trace, a JAX array, by client


def fresh(initial: PyTree, clients: int) -> PyTree:
    """Repeat the initial memory of a client for all clients.

    Example:
        >>> fresh({"y": np.zeros(2)}, 3)["y"].shape
        (3, 2)
    """
    return on_device(jax.tree.map(lambda a: np.repeat(np.asarray(a)[None], clients, 0), initial))


def rows_of(memory: PyTree, ids: Rows) -> PyTree:
    """Return the memory of some clients, by position in `ids`."""
    return jax.tree.map(lambda a: jnp.asarray(a)[ids], memory)


def kept(memory: PyTree, rows: PyTree, ids: Rows, admitted: Rows | None) -> PyTree:
    """Update the memory after an exchange.

    For a client that was sampled more than once, the last occurrence counts.

    Args:
        memory: of all clients, before the exchange.
        rows: of the cohort after it, by position.
        ids: the cohort, ascending.
        admitted: a mask of the replies; None if all are admitted.
    """
    count = len(jax.tree.leaves(memory)[0])
    ids = jnp.asarray(ids)
    is_last = jnp.append(ids[1:] != ids[:-1], True)
    updated = is_last if admitted is None else is_last & jnp.asarray(admitted)
    indices = jnp.where(updated, ids, count)  # out of bounds are dropped
    return jax.tree.map(lambda a, b: a.at[indices].set(b, mode="drop"), memory, rows)
