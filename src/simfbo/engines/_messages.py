"""What clients receive and send: running a client step, and sums and stacks of messages."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.federation import Client, ClientStep, WithMemory
from simfbo.core.ledger import is_per_client
from simfbo.core.problem import PyTree, Scalar
from simfbo.errors import UserError


def answer(client_step: ClientStep, payload: PyTree, client: Client) -> tuple[PyTree, PyTree]:
    """Run a client step; return its message and what the client remembers after it."""
    reply = client_step(payload, client)
    if not isinstance(reply, WithMemory):
        return as_message(client_step, reply), client.memory
    return as_message(client_step, reply.message), _as_memory(client_step, reply.memory, client)


def _as_memory(client_step: ClientStep, found: PyTree, client: Client) -> PyTree:
    """Return a new memory as arrays, after a check that it is shaped as the old one."""
    new, old = jax.tree.map(jnp.asarray, found), jax.tree.map(jnp.asarray, client.memory)
    if form(new) == form(old):
        return new
    step = client_step.__name__
    if client.memory is None:
        raise UserError(
            f"'{step}' returns a memory, but its clients have none: declare it as "
            "Method.client_memory, and start with `run` or `federation.remember`."
        )
    raise UserError(f"'{step}' returns a memory of another shape than Method.client_memory.")


def as_message(client_step: ClientStep, reply: PyTree) -> PyTree:
    """Return a client's message as arrays, after a check that it can be weighted and added."""
    message = jax.tree.map(jnp.asarray, reply)
    for leaf in jax.tree.leaves(message):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"'{client_step.__name__}' returns {leaf.dtype} numbers: return floats, which can "
                "be weighted and added."
            )
    return message


def form(tree: PyTree) -> PyTree:
    """Return structure, shapes and dtypes of a tree, as a hashable value."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def slice_for(payload: PyTree, position: Scalar) -> PyTree:
    """Return what the client at a position of the cohort receives.

    Example:
        >>> from simfbo.core.ledger import PerClient
        >>> slice_for({"all": 1.0, "own": PerClient(np.array([5, 6, 7]))}, 1)
        {'all': 1.0, 'own': np.int64(6)}
    """

    def part(given: PyTree) -> PyTree:
        if not is_per_client(given):
            return given
        return jax.tree.map(lambda a: a[position], given.slices)

    return jax.tree.map(part, payload, is_leaf=is_per_client)


def zeros_for(size: int, stacked: bool, message: PyTree) -> PyTree:
    """Return zeros shaped like the sum, or the stack, of `size` messages such as this."""
    first = (size,) if stacked else ()
    return jax.tree.map(lambda a: jnp.zeros(first + a.shape, a.dtype), message)


def combined(messages: Sequence[Any], weights: np.ndarray, stacked: bool, like: PyTree) -> PyTree:
    """Return the weighted sum, or the stack, of the messages there are; None is left out."""
    total = zeros_for(len(messages), stacked, like)
    for j, message in enumerate(messages):
        if message is None:
            continue
        if stacked:
            total = jax.tree.map(lambda rows, own, j=j: rows.at[j].set(own), total, message)
        else:
            total = trees.add_scaled(total, weights[j], message)
    return total
