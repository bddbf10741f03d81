"""SimFBO rounds with JAX alone: one compiled `lax.scan`, a `vmap` over the clients' stacked data.

What is left of a round without a federation: no sampling, no admission of replies, no ledger, no
history. For full batches and clients with equal numbers of samples; one local step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from simfbo.core.problem import Point, directions


def prepare(problem: Any, data: Any, x0: Any, y0: Any, steps: Any) -> Callable[[int], Any]:
    """Return the function that runs a number of rounds and returns (x, y, v).

    Args:
        problem: the two losses.
        data: simfbo's federated data.
        x0: initial x.
        y0: initial y.
        steps: the step sizes (x, y, v).
    """
    batches = _stacked(data.lower), _stacked(data.upper)
    weights = jnp.asarray(data.p, jnp.float32)
    each = jax.vmap(partial(directions, problem), in_axes=(None, None, None, 0, 0))

    @partial(jax.jit, static_argnums=3)
    def program(start: Any, batches: Any, weights: Any, rounds: int) -> Any:
        def one(point: Any, _: None) -> tuple[Any, None]:
            sums = jax.tree.map(lambda d: jnp.tensordot(weights, d, 1), each(*point, *batches))
            moved = (_moved(*parts) for parts in zip(point, sums, steps, strict=True))
            return Point(*moved), None

        return jax.lax.scan(one, start, length=rounds)[0]

    x, y = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (x0, y0))
    start = Point(x, y, jax.tree.map(jnp.zeros_like, y))
    return lambda rounds: jax.block_until_ready(program(start, batches, weights, rounds))


def _stacked(part: Any) -> Any:
    """Return the samples as [clients, samples, ...]."""
    assert part.equal
    assert part.batch_size is None
    clients = len(part.count)
    return jax.tree.map(lambda a: a[part.rows].reshape(clients, -1, *a.shape[1:]), part.samples)


def _moved(value: Any, direction: Any, step: float) -> Any:
    return jax.tree.map(lambda z, d: z - step * d, value, direction)
