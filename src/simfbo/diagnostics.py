"""The exact hypergradient of a bilevel problem, and the distance of a state from the solution.

These functions pool all clients' data, which no server can do: they are for simulations and tests,
and count no communication.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg

from simfbo.algorithms._common import drawn_directions, local_steps
from simfbo.core import trees
from simfbo.core.data import FederatedData, pooled
from simfbo.core.federation import Client
from simfbo.core.local_work import LocalWork
from simfbo.core.method import client_step
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.engines.simulated import SimulatedFederation
from simfbo.errors import UserError

__all__ = [
    "Truth",
    "client_drift",
    "effective_weights",
    "errors",
    "hypergradient",
    "solve_lower",
    "work_warning",
]

Scalar = Callable[[PyTree, PyTree], jax.Array]


class Truth(NamedTuple):
    """The exact quantities at x.

    Attributes:
        y: y*(x), the solution of the lower problem.
        v: v*(x), the solution of the linear system.
        gradient: grad Phi(x), the hypergradient.
    """

    y: PyTree
    v: PyTree
    gradient: PyTree


def solve_lower(
    problem: BilevelProblem,
    data: FederatedData,
    x: PyTree,
    y0: PyTree,
    tolerance: float = 1e-10,
    iterations: int = 100,
) -> PyTree:
    """Find y*(x) by Newton's method, with conjugate gradients and backtracking.

    Args:
        problem: the two losses; the lower one strongly convex in y.
        data: the clients' data.
        x: the upper variable.
        y0: the initial value.
        tolerance: on ||grad_y G||; reached only as far as the precision of the dtype allows.
        iterations: the most Newton steps.

    Returns:
        The minimiser of G(x, .).
    """
    if problem.lower_level == "private":
        raise UserError(
            "With a personal lower level every client has a y*(x) of its own: call this with one "
            "client's data and a problem whose lower level is shared."
        )
    lower = jax.jit(pooled(problem.lower, data.lower, data.p))
    value_and_grad = jax.jit(jax.value_and_grad(lower, argnums=1))
    newton = jax.jit(lambda x, y, g: _solve_hessian(lower, x, y, g))
    y = jax.tree.map(jnp.asarray, y0)
    for _ in range(iterations):
        value, gradient = value_and_grad(x, y)
        if trees.squared_norm(gradient) <= tolerance**2:
            return y
        step = newton(x, y, gradient)
        if not 0 < float(trees.dot(gradient, step)) < np.inf:
            _require_rounding(value, gradient)
            return y
        moved = trees.subtract(y, step)
        # Near the end G is flat up to rounding, and only its gradient shows progress.
        slope = value_and_grad(x, moved)[1]
        if not 4 * trees.squared_norm(slope) <= trees.squared_norm(gradient):
            moved = _backtrack(lower, x, y, value, gradient, step)
        if moved is None:
            return y
        y = moved
    raise UserError(f"y*(x) was not found in {iterations} Newton steps: allow more.")


def hypergradient(
    problem: BilevelProblem, data: FederatedData, x: PyTree, y0: PyTree, tolerance: float = 1e-10
) -> Truth:
    """Compute the true hypergradient at any x, with y*(x) and v*(x).

        grad Phi(x) = grad_x F(x, y*) - grad^2_xy G(x, y*) v*,   grad^2_yy G(x, y*) v* = grad_y F

    with the *global* Hessian, by conjugate gradients; averaging clients' own hypergradients would
    be biased.

    Args:
        problem: the two losses.
        data: the clients' data.
        x: the upper variable.
        y0: the initial value in the search for y*(x).
        tolerance: of that search.

    Returns:
        y*(x), v*(x) and grad Phi(x).
    """
    y = solve_lower(problem, data, x, y0, tolerance)
    lower = pooled(problem.lower, data.lower, data.p)
    upper = pooled(problem.upper, data.upper, data.p)

    @jax.jit
    def at(x: PyTree, y: PyTree) -> Truth:
        grad_x, grad_y = jax.grad(upper, (0, 1))(x, y)
        v = _solve_hessian(lower, x, y, grad_y)
        cross = jax.grad(lambda x: _slope(lower, x, y, v))(x)
        return Truth(y, v, trees.subtract(grad_x, cross))

    return at(x, y)


def errors(problem: BilevelProblem, data: FederatedData, state: PyTree) -> dict[str, float]:
    """Measure ||grad Phi(x)||^2, ||y - y*(x)|| and, if the state has a v, ||v - v*(x)||."""
    truth = hypergradient(problem, data, state.x, state.y)
    metrics = {
        "grad_norm_squared": float(trees.squared_norm(truth.gradient)),
        "y_error": _distance(state.y, truth.y),
    }
    if getattr(state, "v", None) is not None:
        metrics["v_error"] = _distance(state.v, truth.v)
    return metrics


def client_drift(
    problem: BilevelProblem,
    data: FederatedData,
    state: PyTree,
    local: Point[float],
    local_work: LocalWork,
    key: jax.Array,
) -> dict[str, float]:
    """Measure how far clients drift apart within one round, for x, y and v.

        sum_i p_i || (z_i - z) - sum_j p_j (z_j - z) ||^2

    where z_i is client i's iterate after its local steps. It is zero if all clients and their local
    work are the same, and grows with the local step sizes.

    Args:
        problem: the two losses.
        data: the clients' data.
        state: the state at the start of the round, with x, y and v.
        local: the clients' step sizes.
        local_work: the clients' local work.
        key: of the batches.

    Returns:
        The drift of each variable.
    """
    federation = SimulatedFederation(data, local_work=local_work)
    start, cohort = Point(state.x, state.y, state.v), federation.cohort(key)
    nowhere = jax.tree.map(jnp.zeros_like, start)
    moves = Moves(problem, local).moves
    mean, _ = federation.sum(moves, (start, nowhere), cohort, key)
    _, spread = federation.sum(moves, (start, mean), cohort, key)
    return dict(zip(Point._fields, map(float, spread), strict=True))


class Moves(eqx.Module):
    """The client step that measures the change over local work."""

    problem: BilevelProblem = eqx.field(static=True)
    local: Point[float]

    @client_step
    def moves(self, payload: tuple[Point[PyTree], Point[PyTree]], client: Client) -> PyTree:
        """(start, centre) -> the change of each variable, its squared distance from the centre."""
        start, centre = payload
        q = local_steps(drawn_directions(self.problem), start, client, self.local)
        move = Point(*(trees.scale(e, part) for e, part in zip(self.local, q, strict=True)))
        return move, Point(*map(trees.squared_norm, trees.subtract(move, centre)))


def effective_weights(p: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Return w_i = p_i ||a_i||_1 / sum_j p_j ||a_j||_1, SimFBO's effective client weights.

    Example:
        >>> effective_weights(np.array([0.5, 0.5]), np.array([1.0, 3.0])).tolist()
        [0.25, 0.75]
    """
    return p * norms / (p @ norms)


def work_warning(p: np.ndarray, norms: np.ndarray, name: str = "SimFBO") -> str | None:
    """Return a warning if unequal local work makes the effective weights differ from p; else None.

    It concerns methods that add up local work, such as SimFBO, FedBiO and MemFBO.

    Args:
        p: the clients' weights.
        norms: ||a_i||_1 of every client.
        name: of the method.
    """
    w = effective_weights(p, norms)
    gap = float(np.abs(w - p).sum() / 2)
    if gap < 1e-9:
        return None
    worst = int(np.argmax(np.abs(w / p - 1)))
    return (
        f"unequal local work biases {name}: use ShroFBO "
        f"({gap:.0%} of the weight is misplaced; client {worst} counts {w[worst] / p[worst]:.2g} "
        "times what it should)"
    )


def _slope(lower: Scalar, x: PyTree, y: PyTree, v: PyTree) -> jax.Array:
    """Return <grad_y G(x, y), v>."""
    return trees.dot(jax.grad(lower, argnums=1)(x, y), v)


def _solve_hessian(lower: Scalar, x: PyTree, y: PyTree, right: PyTree) -> PyTree:
    """Return v with grad^2_yy G(x, y) v = right."""

    def product(v: PyTree) -> PyTree:
        return jax.grad(lambda y: _slope(lower, x, y, v))(y)

    return cg(product, right, tol=1e-12)[0]


def _backtrack(
    lower: Scalar, x: PyTree, y: PyTree, value: jax.Array, gradient: PyTree, step: PyTree
) -> PyTree | None:
    """Return y - size * step with sufficient decrease of G; None if rounding allows none."""
    expected = float(trees.dot(gradient, step))
    for size in 0.5 ** np.arange(30):
        moved = trees.add_scaled(y, -size, step)
        fall = float(value) - float(lower(x, moved))
        if fall > 0 and fall >= 1e-4 * size * expected:
            return moved
    return None


def _require_rounding(value: jax.Array, gradient: PyTree) -> None:
    """Raise unless the gradient is so small that rounding explains an ascent direction."""
    small = jnp.sqrt(jnp.finfo(value.dtype).eps) * (1 + jnp.abs(value))
    if not trees.squared_norm(gradient) <= small**2:
        raise UserError("The lower problem has no minimum here: is g strongly convex in y?")


def _distance(a: PyTree, b: PyTree) -> float:
    return float(jnp.sqrt(trees.squared_norm(trees.subtract(a, b))))
