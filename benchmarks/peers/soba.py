"""Centralised SOBA (Dagréou, Ablin, Vaiter, Moreau 2022) in JAX: all rounds in one program.

SimFBO with a single client that holds all data. A round computes, from one lower and one upper
batch and all at once,

    d_y = grad_y g;   d_v = grad^2_yy g v - grad_y f;   d_x = grad_x f - grad^2_xy g v

and takes a step along each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Loss = Callable[[Any, Any, Any], jax.Array]
Draw = Callable[[jax.Array], tuple[Any, Any]]


def soba(
    upper: Loss, lower: Loss, draw: Draw, x0: Any, y0: Any, steps: tuple[float, float, float]
) -> Callable[[int], Any]:
    """Return the function that runs a number of rounds and returns (x, y, v).

    Args:
        upper: f(x, y, batch).
        lower: g(x, y, batch).
        draw: key -> (lower batch, upper batch).
        x0: initial x.
        y0: initial y.
        steps: the step sizes (x, y, v).
    """

    def one(point: Any, key: jax.Array) -> tuple[Any, None]:
        x, y, v = point
        lower_batch, upper_batch = draw(key)
        d_y, pull = jax.vjp(lambda x, y: jax.grad(lower, 1)(x, y, lower_batch), x, y)
        cross, hessian = pull(v)
        f_x, f_y = jax.grad(upper, (0, 1))(x, y, upper_batch)
        directions = (_less(f_x, cross), d_y, _less(hessian, f_y))
        moved = [
            jax.tree.map(lambda a, d, s=size: a - s * d, part, direction)
            for part, direction, size in zip(point, directions, steps, strict=True)
        ]
        return tuple(moved), None

    @partial(jax.jit, static_argnums=1)
    def program(key: jax.Array, rounds: int) -> Any:
        x, y = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (x0, y0))
        start = (x, y, jax.tree.map(jnp.zeros_like, y))
        return jax.lax.scan(one, start, jax.random.split(key, rounds))[0]

    return lambda rounds: jax.block_until_ready(program(jax.random.key(0), rounds))


def on_one_client(problem: Any, data: Any, x0: Any, y0: Any, steps: Any) -> Callable[[int], Any]:
    """Return SOBA on the only client of simfbo's federated data."""
    lower, upper = (batches(part) for part in (data.lower, data.upper))

    def draw(key: jax.Array) -> tuple[Any, Any]:
        one, two = jax.random.split(key)
        return lower(one), upper(two)

    return soba(problem.upper, problem.lower, draw, x0, y0, steps)


def batches(part: Any) -> Callable[[jax.Array], Any]:
    """Return the function key -> batch, drawn with replacement, or all samples."""
    held = jax.tree.map(lambda a: a[part.rows], part.samples)
    if part.batch_size is None:
        return lambda key: held

    def batch(key: jax.Array) -> Any:
        rows = jax.random.randint(key, (part.batch_size,), 0, len(part.rows))
        return jax.tree.map(lambda a: a[rows], held)

    return batch


def _less(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.subtract, a, b)
