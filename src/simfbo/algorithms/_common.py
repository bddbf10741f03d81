"""What several methods share: client oracles, local steps, and the server's step."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.algorithms._settings import once_per_problem
from simfbo.core import trees
from simfbo.core.federation import Client, ClientStep
from simfbo.core.keys import Purpose, host_rng
from simfbo.core.local_work import LocalPlan
from simfbo.core.problem import (
    BilevelProblem,
    Point,
    PyTree,
    Scalar,
    directions,
    grad_lower_y,
    grad_upper_y,
    hvp,
    independent_directions,
    residual,
)
from simfbo.errors import UserError

Draw = Callable[[Point[PyTree], Client, jax.Array], Point[PyTree]]
Direction = Callable[[PyTree, jax.Array], PyTree]
Mode = Literal["paper", "as_released"]
Rule = float | optax.GradientTransformation
Server = Point[Rule] | optax.GradientTransformation

add = jax.jit(trees.add)
add_scaled = jax.jit(trees.add_scaled)
scale = jax.jit(trees.scale)


class State(NamedTuple):
    """The three variables, the server's optimiser states, and how often the projection acted."""

    x: PyTree
    y: PyTree
    v: PyTree
    server: PyTree
    projected: jax.Array


ServerSide = tuple[Callable[[PyTree, PyTree], State], Callable[[State, Point[PyTree]], State]]


class Oracles(NamedTuple):
    """Client steps that answer one question each, on the channel that the answer is for.

    Attributes:
        lower_grad: (x, y) -> y: grad_y g_i.
        upper_grad_y: (x, y) -> v: grad_y f_i.
        hessian_product: (x, y, p) -> v: grad^2_yy g_i p.
        hypergrad: (x, y, p) -> x: grad_x f_i - grad^2_xy g_i p.
    """

    lower_grad: ClientStep
    upper_grad_y: ClientStep
    hessian_product: ClientStep
    hypergrad: ClientStep


@once_per_problem
def oracles(problem: BilevelProblem, full: bool = False) -> Oracles:
    """Return the oracles, each on a minibatch; with `full`, on all of the client's samples."""

    def lower_batch(client: Client, key: jax.Array) -> PyTree:
        data = client.data
        return data.lower.full(data.client) if full else data.lower_batch(key)

    def upper_batch(client: Client, key: jax.Array) -> PyTree:
        data = client.data
        return data.upper.full(data.client) if full else data.upper_batch(key)

    def lower_grad(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y = payload
        return Point(y=grad_lower_y(problem, x, y, lower_batch(client, client.key)))

    def upper_grad_y(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y = payload
        return Point(v=grad_upper_y(problem, x, y, upper_batch(client, client.key)))

    def hessian_product(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y, p = payload
        return Point(v=hvp(problem, x, y, p, lower_batch(client, client.key)))

    def hypergrad(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y, p = payload
        lower, upper = jax.random.split(client.key)
        batches = lower_batch(client, lower), upper_batch(client, upper)
        return Point(x=jax.grad(lambda x: -residual(problem, x, y, p, *batches))(x))

    return Oracles(lower_grad, upper_grad_y, hessian_product, hypergrad)


def drawn_directions(problem: BilevelProblem, independent_batches: bool = False) -> Draw:
    """Return (at, client, key) -> the three directions at a point, from batches of the client."""

    def shared(at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
        lower, upper = jax.random.split(key)
        batches = client.data.lower_batch(lower), client.data.upper_batch(upper)
        return directions(problem, *at, *batches)

    def independent(at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
        """Use five batches: zeta; psi and xi, a lower and an upper one each."""
        zeta, *keys = jax.random.split(key, 5)
        lower, upper = client.data.lower_batch, client.data.upper_batch
        psi, xi = (lower(keys[0]), upper(keys[1])), (lower(keys[2]), upper(keys[3]))
        return independent_directions(problem, *at, lower(zeta), psi, xi)

    return independent if independent_batches else shared


def accumulate(plan: LocalPlan, k: Scalar, d: PyTree, speed: PyTree) -> PyTree:
    """Return c_k d with the client's momentum: what its local rule adds to q in step k.

    Args:
        plan: of the client.
        k: the step.
        d: the direction.
        speed: what this returned in the step before; zero at first.
    """
    change = trees.scale(jnp.asarray(plan.steps)[k], d)
    return change if plan.momentum is None else trees.add_scaled(change, plan.momentum, speed)


def kept(plan: LocalPlan, q: PyTree) -> PyTree:
    """Return the part of q that the client's local rule keeps at each step."""
    return q if plan.keep is None else trees.scale(plan.keep, q)


def local_steps(draw: Draw, start: Point[PyTree], client: Client) -> Point[PyTree]:
    """Take tau_i local steps and return q = sum_k a_k d_k, the weighted sum of the directions."""
    plan = client.plan

    def moved(q: Point[PyTree]) -> Point[PyTree]:
        parts = zip(start, client.eta, q, strict=True)
        return Point(*(z if d is None else trees.add_scaled(z, -e, d) for z, e, d in parts))

    def step(
        k: Scalar, carry: tuple[Point[PyTree], PyTree], at: Point[PyTree]
    ) -> tuple[Point[PyTree], PyTree]:
        q, speed = carry
        change = accumulate(plan, k, draw(at, client, jax.random.fold_in(client.key, k)), speed)
        return trees.add(kept(plan, q), change), () if plan.momentum is None else change

    zero = trees.zeros_like(start)
    carry = zero, () if plan.momentum is None else zero
    if plan.steps.shape[-1] == 1:
        return step(0, carry, start)[0]
    return jax.lax.fori_loop(0, plan.tau, lambda k, carry: step(k, carry, moved(carry[0])), carry)[
        0
    ]


def start(x: PyTree, y: PyTree) -> Point[PyTree]:
    """Return the initial state of a method with x, y and v: v is zero."""
    x, y = trees.on_device((x, y))
    return Point(x, y, trees.host_zeros(y))


def descend(z: PyTree, direction: Direction, client: Client, step: Scalar) -> PyTree:
    """Return the change of z over tau_i steps  z -= (step / tau_i) direction(z, key)."""
    size, most = _step_plan(client, step)

    def move(k: Scalar, change: PyTree) -> PyTree:
        d = direction(trees.add(z, change), jax.random.fold_in(client.key, k))
        return trees.add_scaled(change, -size, d)

    zero = trees.zeros_like(z)
    return move(0, zero) if most == 1 else jax.lax.fori_loop(0, client.plan.tau, move, zero)


def drift(z: PyTree, gradient: Direction, mean: PyTree, client: Client, step: Scalar) -> PyTree:
    """Return how far tau_i variance-reduced local steps (SVRG) lead away from z - step * mean.

        z_i -= (step / tau_i) [gradient(z_i) - gradient(z) + mean]

    where both gradients see the same batch and `mean` is the cohort's gradient at z. In the first
    step they cancel, so none is computed, and a client with one step has no drift.
    """
    size, most = _step_plan(client, step)

    def move(k: Scalar, change: PyTree) -> PyTree:
        key = jax.random.fold_in(client.key, k)
        here = trees.add_scaled(trees.add(z, change), -size * jnp.asarray(k, float), mean)
        gap = trees.subtract(gradient(here, key), gradient(z, key))
        return trees.add_scaled(change, -size, gap)

    zero = trees.zeros_like(z)
    return zero if most == 1 else jax.lax.fori_loop(1, client.plan.tau, move, zero)


def server_side(gamma: Server, radius: float | None) -> ServerSide:
    """Return the server's `init(x0, y0)` and its compiled `advance(state, direction)`.

    Step sizes are inputs of the compiled step; Optax transformations are part of it. One
    transformation in place of a point moves the three variables together: it sees all of them.
    """
    require_radius(radius)
    if isinstance(gamma, optax.GradientTransformation):
        return _moved_together(gamma, radius)
    given: list[Any] = list(gamma)
    if any(rule is None for rule in given):
        raise UserError("Give a step size for each variable: Point(x=..., y=..., v=...).")
    pairs = [_split(rule) for rule in gamma]
    rules, sizes = (Point(*part) for part in zip(*pairs, strict=True))

    def init(x: PyTree, y: PyTree) -> State:
        at = start(x, y)
        states = Point(*map(_initial, rules, at))
        return State(*at, states, trees.on_device(np.zeros((), np.int32)))

    def advance(state: State, d: Point[PyTree]) -> State:
        return _advance(rules, radius, sizes, state, d)

    return init, advance


def _moved_together(rule: optax.GradientTransformation, radius: float | None) -> ServerSide:
    """Return `init` and `advance` of a server with one rule for the three variables."""

    def init(x: PyTree, y: PyTree) -> State:
        at = start(x, y)
        return State(*at, rule.init(at), trees.on_device(np.zeros((), np.int32)))

    return init, partial(_advance_together, rule, radius)


def server_step(
    gamma: Rule,
) -> tuple[Callable[[PyTree], PyTree], Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]]:
    """Return `init(z)` and the compiled `move(direction, state, z)` for a single variable."""
    rule, size = _split(gamma)

    def init(z: PyTree) -> PyTree:
        return _initial(rule, z)

    def move(d: PyTree, state: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
        return _move(rule, size, d, state, z)

    return init, move


@partial(jax.jit, static_argnums=(0, 1))
def _advance(
    rules: Point[PyTree], radius: float | None, sizes: Point[PyTree], state: State, d: Point[PyTree]
) -> State:
    """Move the three variables along the aggregated directions, and project v."""
    x, opt_x = _apply(rules.x, sizes.x, d.x, state.server.x, state.x)
    y, opt_y = _apply(rules.y, sizes.y, d.y, state.server.y, state.y)
    v, opt_v = _apply(rules.v, sizes.v, d.v, state.server.v, state.v)
    v, acted = project(v, radius)
    return State(x, y, v, Point(opt_x, opt_y, opt_v), state.projected + acted)


@partial(jax.jit, static_argnums=(0, 1))
def _advance_together(
    rule: optax.GradientTransformation, radius: float | None, state: State, d: Point[PyTree]
) -> State:
    """Move the three variables by one rule, and project v."""
    at = Point(*state[:3])
    updates, server = rule.update(d, state.server, at)
    x, y, v = trees.add(at, updates)
    v, acted = project(v, radius)
    return State(x, y, v, server, state.projected + acted)


def _apply(
    rule: optax.GradientTransformation | None, size: float, d: PyTree, state: PyTree, z: PyTree
) -> tuple[PyTree, PyTree]:
    """Move z along d by a step size or by one Optax step; return it and the optimiser's state."""
    if rule is None:
        return trees.add_scaled(z, -size, d), state
    updates, state = rule.update(d, state, z)
    return optax.apply_updates(z, updates), state


_move = jax.jit(_apply, static_argnums=0)


def _split(rule: Rule) -> tuple[optax.GradientTransformation | None, float | None]:
    """Return a rule as a transformation, which is compiled, or as a step size, an input."""
    return (rule, None) if isinstance(rule, optax.GradientTransformation) else (None, rule)


def _initial(rule: optax.GradientTransformation | None, z: PyTree) -> PyTree:
    """Return the initial state of a rule for a variable."""
    return () if rule is None else rule.init(z)


def project(v: PyTree, radius: float | None) -> tuple[PyTree, jax.Array]:
    """Return v within the ball of `radius`, and 1 if that moved it, else 0."""
    if radius is None:
        return v, jnp.zeros((), jnp.int32)
    acted = (jnp.sqrt(trees.squared_norm(v)) > radius).astype(jnp.int32)
    return optax.projections.projection_l2_ball(v, radius), acted


def draw_terms(key: jax.Array, count: int) -> int:
    """Draw a number uniformly from {0 .. count-1}."""
    return int(host_rng(key, Purpose.SERIES_LENGTH).integers(count))


def is_released(mode: str) -> bool:
    """Return whether a mode is that of the published code, after a check that it exists."""
    if mode not in get_args(Mode):
        raise UserError(f"The mode must be one of {', '.join(get_args(Mode))}, got '{mode}'.")
    return mode == "as_released"


def require_counts(**counts: int) -> None:
    """Raise unless every count is at least 1."""
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} must be at least 1, got {count}.")


def require_radius(radius: float | None) -> None:
    """Raise unless a radius is positive, or there is none."""
    if radius is not None and not radius > 0:
        raise UserError(f"The radius of v must be positive, got {radius}; omit it for none.")


def require_plain(client: Client) -> None:
    """Raise unless the client's local optimiser is plain gradient steps."""
    if not client.plan.plain:
        raise UserError(
            "This method takes plain local steps: local momentum, proximal terms and coefficients "
            "work with SimFBO, ShroFBO, MimeFBO and MemFBO."
        )


def _step_plan(client: Client, step: Scalar) -> tuple[Any, int]:
    """Return the size of one local step, step / tau_i, and the most steps any client takes."""
    require_plain(client)
    return step / jnp.asarray(client.plan.tau, float), client.plan.steps.shape[-1]
