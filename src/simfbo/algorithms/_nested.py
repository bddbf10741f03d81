"""Oracles and variance-reduced steps of FedNest, LFedNest, FBO-AggITD and FedMBO."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp

from simfbo.algorithms._common import SteppedMethod, require_plain
from simfbo.core import BilevelProblem, Point, grad_lower_y, grad_upper_x, grad_upper_y, hvp, trees
from simfbo.core.federation import Client
from simfbo.core.keys import Purpose, host_rng
from simfbo.core.method import client_step
from simfbo.core.problem import PyTree, Scalar, residual
from simfbo.errors import UserError

Direction = Callable[[PyTree, jax.Array], PyTree]
Mode = Literal["paper", "as_released"]


def inexact(reason: str) -> dict[str, str]:
    """Return the laws violated by an inexact or fluctuating v, with the reason."""
    return dict.fromkeys(("sends changes", "finds the solution", "unequal local work"), reason)


def is_released(mode: str) -> bool:
    """Validate a mode; True for that of the published code."""
    if mode not in get_args(Mode):
        raise UserError(f"The mode must be one of {', '.join(get_args(Mode))}, got '{mode}'.")
    return mode == "as_released"


def draw_terms(key: jax.Array, count: int) -> int:
    """Sample a number uniformly from {0 .. count-1}."""
    return int(host_rng(key, Purpose.SERIES_LENGTH).integers(count))


def require_counts(**counts: int) -> None:
    """Raise unless every count is at least 1."""
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} must be at least 1, got {count}.")


class NestedLoops(SteppedMethod):
    """A method with K updates of y and a Neumann series of N terms in every iteration."""

    lower_rounds: int = eqx.field(static=True)
    neumann_terms: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        require_counts(lower_rounds=self.lower_rounds, neumann_terms=self.neumann_terms)


class Oracles(eqx.Module):
    """Client steps that return a single gradient or product, on a minibatch or all samples."""

    problem: BilevelProblem = eqx.field(static=True)
    full: bool = eqx.field(static=True, default=False)

    @client_step
    def lower_grad(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y) -> y: grad_y g_i."""
        x, y = payload
        return Point(y=grad_lower_y(self.problem, x, y, self._lower(client, client.key)))

    @client_step
    def upper_grad_y(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y) -> v: grad_y f_i."""
        x, y = payload
        return Point(v=grad_upper_y(self.problem, x, y, self._upper(client, client.key)))

    @client_step
    def hessian_product(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, p) -> v: grad^2_yy g_i p."""
        x, y, p = payload
        return Point(v=hvp(self.problem, x, y, p, self._lower(client, client.key)))

    @client_step
    def hypergrad(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, p) -> x: grad_x f_i - grad^2_xy g_i p."""
        x, y, p = payload
        lower, upper = jax.random.split(client.key)
        batches = self._lower(client, lower), self._upper(client, upper)
        return Point(x=jax.grad(lambda x: -residual(self.problem, x, y, p, *batches))(x))

    def _lower(self, client: Client, key: jax.Array) -> PyTree:
        data = client.data
        return data.lower.full(data.client) if self.full else data.lower_batch(key)

    def _upper(self, client: Client, key: jax.Array) -> PyTree:
        data = client.data
        return data.upper.full(data.client) if self.full else data.upper_batch(key)


class Drifts(eqx.Module):
    """FedInn's and FedOut's local steps.

    The server adds the term -beta q, which is common to all clients: a sum over clients would
    multiply it by sum_C w_i, and the weights of a cohort sum to one only in expectation. With
    `one_upper_step` clients take one step on x, without drift.
    """

    problem: BilevelProblem = eqx.field(static=True)
    steps: Point[float]
    one_upper_step: bool = eqx.field(static=True, default=False)

    @client_step
    def lower_drift(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, q) -> y: y_i - (y - beta q)."""
        x, y, q = payload
        return Point(y=drift(y, lower_gradient(self.problem, x, client), q, client, self.steps.y))

    @client_step
    def upper_drift(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, h) -> x: x_i - (x - alpha h)."""
        x, y, h = payload
        if self.one_upper_step:
            return Point(x=trees.zeros_like(x))

        def gradient(x: PyTree, key: jax.Array) -> PyTree:
            return grad_upper_x(self.problem, x, y, client.data.upper_batch(key))

        return Point(x=drift(x, gradient, h, client, self.steps.x))


def lower_gradient(problem: BilevelProblem, x: PyTree, client: Client) -> Direction:
    """Return (y, key) -> grad_y g_i(x, y) on a minibatch."""
    return lambda y, key: grad_lower_y(problem, x, y, client.data.lower_batch(key))


def descend(z: PyTree, direction: Direction, client: Client, step: Scalar) -> PyTree:
    """Compute the change of z over tau_i steps  z -= (step / tau_i) direction(z, key)."""
    size, most = _step_plan(client, step)

    def move(k: Scalar, change: PyTree) -> PyTree:
        d = direction(trees.add(z, change), jax.random.fold_in(client.key, k))
        return trees.add_scaled(change, -size, d)

    zero = trees.zeros_like(z)
    return move(0, zero) if most == 1 else jax.lax.fori_loop(0, client.plan.tau, move, zero)


def drift(z: PyTree, gradient: Direction, mean: PyTree, client: Client, step: Scalar) -> PyTree:
    """Compute the drift of tau_i variance-reduced local steps (SVRG) from z - step * mean.

        z_i -= (step / tau_i) [gradient(z_i) - gradient(z) + mean]

    where both gradients use the same batch and `mean` is the cohort's gradient at z. In the first
    step they cancel and are not computed, so that a client with one step has no drift.
    """
    size, most = _step_plan(client, step)

    def move(k: Scalar, change: PyTree) -> PyTree:
        key = jax.random.fold_in(client.key, k)
        z_k = trees.add_scaled(trees.add(z, change), -size * jnp.asarray(k, float), mean)
        difference = trees.subtract(gradient(z_k, key), gradient(z, key))
        return trees.add_scaled(change, -size, difference)

    zero = trees.zeros_like(z)
    return zero if most == 1 else jax.lax.fori_loop(1, client.plan.tau, move, zero)


def _step_plan(client: Client, step: Scalar) -> tuple[Any, int]:
    """Return the size of a local step, step / tau_i, and the maximum number of steps."""
    require_plain(client)
    return step / jnp.asarray(client.plan.tau, float), client.plan.steps.shape[-1]
