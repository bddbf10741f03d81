"""The memory of stateful clients: one array per leaf, client after client.

The engines on this machine keep it here; on other machines every node keeps that of its clients
(`simfbo.flower.memory`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.core.trees import on_device

Rows = Any  # of clients: an array of NumPy's outside of a trace, of JAX's inside


def fresh(initial: PyTree, clients: int) -> PyTree:
    """Repeat the initial memory of a client for each of `clients`.

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

    A client that was sampled more than once keeps the memory of its last draw.

    Args:
        memory: of all clients, before the exchange.
        rows: of the cohort after it, by position.
        ids: the cohort, ascending.
        admitted: whether each reply counts; None if all do.
    """
    count = len(jax.tree.leaves(memory)[0])
    ids = jnp.asarray(ids)
    ends = jnp.append(ids[1:] != ids[:-1], True)
    keeps = ends if admitted is None else ends & jnp.asarray(admitted)
    places = jnp.where(keeps, ids, count)
    return jax.tree.map(lambda a, b: a.at[places].set(b, mode="drop"), memory, rows)
