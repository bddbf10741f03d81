"""What several methods share: oracles of a client, plain local steps, and variance-reduced ones."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from simfbo.core import trees
from simfbo.core.federation import Client, ClientWork
from simfbo.core.keys import host_rng
from simfbo.core.local_work import sgd
from simfbo.core.problem import (
    BilevelProblem,
    Point,
    PyTree,
    grad_lower_y,
    grad_upper_y,
    hvp,
    residual,
)
from simfbo.errors import UserError

Direction = Callable[[PyTree, jax.Array], PyTree]
Mode = Literal["paper", "as_released"]

_TERMS = 7  # purpose of a key: how many terms of a series

add = jax.jit(trees.add)
add_scaled = jax.jit(trees.add_scaled)
scale = jax.jit(trees.scale)


class Oracles(NamedTuple):
    """Client works that answer one question each, on the channel that the answer is for.

    Attributes:
        lower_grad: (x, y) -> y: grad_y g_i.
        upper_grad_y: (x, y) -> v: grad_y f_i.
        hessian_product: (x, y, p) -> v: grad^2_yy g_i p.
        hypergrad: (x, y, p) -> x: grad_x f_i - grad^2_xy g_i p.
    """

    lower_grad: ClientWork
    upper_grad_y: ClientWork
    hessian_product: ClientWork
    hypergrad: ClientWork


def oracles(problem: BilevelProblem, full: bool = False) -> Oracles:
    """Return the oracles, each on a minibatch; with `full`, on all of the client's samples."""

    def lower_batch(client: Client, key: jax.Array) -> PyTree:
        data = client.data
        return data.lower.full(data.client) if full else data.lower_batch(key)

    def upper_batch(client: Client, key: jax.Array) -> PyTree:
        data = client.data
        return data.upper.full(data.client) if full else data.upper_batch(key)

    def lower_grad(payload: PyTree, client: Client) -> Point:
        x, y = payload
        return Point(y=grad_lower_y(problem, x, y, lower_batch(client, client.key)))

    def upper_grad_y(payload: PyTree, client: Client) -> Point:
        x, y = payload
        return Point(v=grad_upper_y(problem, x, y, upper_batch(client, client.key)))

    def hessian_product(payload: PyTree, client: Client) -> Point:
        x, y, p = payload
        return Point(v=hvp(problem, x, y, p, lower_batch(client, client.key)))

    def hypergrad(payload: PyTree, client: Client) -> Point:
        x, y, p = payload
        lower, upper = jax.random.split(client.key)
        batches = lower_batch(client, lower), upper_batch(client, upper)
        return Point(x=jax.grad(lambda x: -residual(problem, x, y, p, *batches))(x))

    return Oracles(lower_grad, upper_grad_y, hessian_product, hypergrad)


def start(x: PyTree, y: PyTree) -> Point:
    """Return the initial state of a method with x, y and v: v is zero."""
    x, y = jax.tree.map(jnp.asarray, (x, y))
    return Point(x, y, trees.zeros_like(y))


def descend(z: PyTree, direction: Direction, client: Client, step: float) -> PyTree:
    """Return the change of z over tau_i steps  z -= (step / tau_i) direction(z, key)."""
    size, last = _plan(client, step)

    def move(k: Any, change: PyTree) -> PyTree:
        d = direction(trees.add(z, change), jax.random.fold_in(client.key, k))
        return trees.add_scaled(change, -size, d)

    zero = trees.zeros_like(z)
    return move(0, zero) if last == 1 else jax.lax.fori_loop(0, client.coefs.tau, move, zero)


def drift(z: PyTree, gradient: Direction, mean: PyTree, client: Client, step: float) -> PyTree:
    """Return how far tau_i variance-reduced local steps (SVRG) lead away from z - step * mean.

        z_i -= (step / tau_i) [gradient(z_i) - gradient(z) + mean]

    where both gradients see the same batch and `mean` is the cohort's gradient at z. In the first
    step they cancel, so none is computed, and a client with one step has no drift.
    """
    size, last = _plan(client, step)

    def move(k: Any, change: PyTree) -> PyTree:
        key = jax.random.fold_in(client.key, k)
        here = trees.add_scaled(trees.add(z, change), -size * jnp.asarray(k, float), mean)
        gap = trees.subtract(gradient(here, key), gradient(z, key))
        return trees.add_scaled(change, -size, gap)

    zero = trees.zeros_like(z)
    return zero if last == 1 else jax.lax.fori_loop(1, client.coefs.tau, move, zero)


def draw_terms(key: jax.Array, count: int) -> int:
    """Return a number drawn uniformly from {0 .. count-1}."""
    return int(host_rng(key, _TERMS).integers(count))


def is_released(mode: str) -> bool:
    """Return whether a mode is that of the published code, after a check that it is one."""
    if mode not in get_args(Mode):
        raise UserError(f"The mode must be one of {', '.join(get_args(Mode))}, got '{mode}'.")
    return mode == "as_released"


def require_counts(**counts: int) -> None:
    """Raise unless every count is at least 1."""
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} must be at least 1, got {count}.")


def require_plain(client: Client) -> None:
    """Raise unless the client's local optimiser is plain gradient steps."""
    if client.coefs.rule != sgd():
        raise UserError(
            "This method takes plain local steps: leave local momentum, proximal terms and "
            "coefficients to SimFBO, ShroFBO and MemFBO."
        )


def _plan(client: Client, step: float) -> tuple[Any, int]:
    """Return the size of one local step, step / tau_i, and the most steps anybody takes."""
    require_plain(client)
    return step / jnp.asarray(client.coefs.tau, float), client.coefs.steps.shape[-1]
