"""What several methods share: client oracles, local steps, and the server's step."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.core import trees
from simfbo.core.federation import Client
from simfbo.core.keys import Purpose, host_rng
from simfbo.core.local_work import LocalPlan
from simfbo.core.method import Method, client_step
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
from simfbo.errors import UserError, brief

Draw = Callable[[Point[PyTree], Client, jax.Array], Point[PyTree]]
Direction = Callable[[PyTree, jax.Array], PyTree]
Mode = Literal["paper", "as_released"]
Rule = float | optax.GradientTransformation
Server = Point[Rule] | optax.GradientTransformation

STALE = "What clients remember is from when they last took part, also where all are the same."
BIASED = {
    "unequal local work": "SimFBO weighs clients by p_i ||a_i||_1, so unequal local work moves its "
    "solution.",
    "exact at any local step": "SimFBO's clients drift apart the more the larger eta is.",
}
add = jax.jit(trees.add)
add_scaled = jax.jit(trees.add_scaled)
scale = jax.jit(trees.scale)


def require_shared(problem: BilevelProblem) -> BilevelProblem:
    """Return a problem, after a check that all clients share its lower level."""
    if problem.lower_level == "private":
        raise UserError(
            "This method needs a lower problem that all clients share: for a personal lower level "
            "use simfbo, shrofbo or fedbioacc_local."
        )
    return problem


def require_point(name: str, steps: Any) -> Point[Any]:
    """Return step sizes, after a check that there is one for each variable."""
    if not isinstance(steps, tuple) or len(steps) != 3:
        raise UserError(f"Give {name} as Point(x=..., y=..., v=...), got {brief(steps)}.")
    return Point(*steps)


def require_radius(radius: float | None) -> float | None:
    """Return a radius, after a check that it is positive and finite where there is one."""
    if radius is not None and not 0 < radius < float("inf"):
        raise UserError(f"The radius of v must be positive, got {radius}; omit it for none.")
    return radius


as_local, as_steps = partial(require_point, "local"), partial(require_point, "steps")


class Oracles(eqx.Module):
    """Client steps that answer one question each, on the channel that the answer is for.

    Attributes:
        problem: the two losses.
        full: whether they use all of the client's samples rather than a minibatch.
    """

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


def local_steps(
    draw: Draw, start: Point[PyTree], client: Client, eta: Point[PyTree]
) -> Point[PyTree]:
    """Take tau_i local steps of sizes eta; return q = sum_k a_k d_k, the weighted directions."""
    plan = client.plan

    def moved(q: Point[PyTree]) -> Point[PyTree]:
        parts = zip(start, eta, q, strict=True)
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


class State(NamedTuple):
    """The three variables, the server's optimiser states, and how often the projection acted."""

    x: PyTree
    y: PyTree
    v: PyTree
    server: PyTree
    projected: jax.Array


class ServerSteps(eqx.Module):
    """gamma: for each variable a step size, which is a number, or an Optax transformation.

    One transformation in place of a point moves the three variables together: it sees all of them.
    """

    sizes: Point[Any]
    rules: Any = eqx.field(static=True)

    @classmethod
    def of(cls, gamma: "Server | ServerSteps") -> "ServerSteps":
        """Divide step sizes and transformations into numbers and rules."""
        if isinstance(gamma, ServerSteps):
            return gamma
        if isinstance(gamma, optax.GradientTransformation):
            return cls(Point(), gamma)
        given: list[Any] = [*require_point("server", gamma)]
        if any(part is None for part in given):
            raise UserError("Give a step size for each variable: Point(x=..., y=..., v=...).")
        rules = Point(*(part if is_rule(part) else None for part in given))
        return cls(Point(*(None if is_rule(part) else part for part in given)), rules)

    def init(self, x: PyTree, y: PyTree) -> State:
        at = start(x, y)
        if isinstance(self.rules, Point):
            server = Point(*map(_initial, self.rules, at))
        else:
            server = self.rules.init(at)
        return State(*at, server, trees.on_device(np.zeros((), np.int32)))

    def advance(self, state: State, d: Point[PyTree], radius: float | None = None) -> State:
        """Move the three variables along the aggregated directions, and project v."""
        return _advance(self, radius, state, d)


@jax.jit
def _advance(steps: ServerSteps, radius: float | None, state: State, d: Point[PyTree]) -> State:
    at, rules = Point(*state[:3]), steps.rules
    if isinstance(rules, Point):
        pairs = list(map(_apply, rules, steps.sizes, d, state.server, at))
        x, y, v = (z for z, _ in pairs)
        server = Point(*(own for _, own in pairs))
    else:
        updates, server = rules.update(d, state.server, at)
        x, y, v = trees.add(at, updates)
    v, acted = project(v, radius)
    return State(x, y, v, server, state.projected + acted)


class ServerStep(eqx.Module):
    """gamma of a single variable: a step size or an Optax transformation."""

    size: Any
    rule: Any = eqx.field(static=True)

    @classmethod
    def of(cls, gamma: "Rule | ServerStep") -> "ServerStep":
        """Return a step size as a number, a transformation as a static field."""
        if isinstance(gamma, ServerStep):
            return gamma
        return cls(None, gamma) if is_rule(gamma) else cls(gamma, None)

    def init(self, z: PyTree) -> PyTree:
        return _initial(self.rule, z)

    def move(self, d: PyTree, state: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
        """Return the variable moved along a direction, and the optimiser's state."""
        return _move(self, d, state, z)


@jax.jit
def _move(step: ServerStep, d: PyTree, state: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
    return _apply(step.rule, step.size, d, state, z)


def is_rule(gamma: Any) -> bool:
    """Return whether a part of gamma is an Optax transformation rather than a step size."""
    return isinstance(gamma, optax.GradientTransformation)


def _apply(
    rule: optax.GradientTransformation | None, size: Any, d: PyTree, state: PyTree, z: PyTree
) -> tuple[PyTree, PyTree]:
    """Move z along d by a step size or by one Optax step; return it and the optimiser's state."""
    if rule is None:
        return trees.add_scaled(z, -size, d), state
    updates, state = rule.update(d, state, z)
    return optax.apply_updates(z, updates), state


def _initial(rule: optax.GradientTransformation | None, z: PyTree) -> PyTree:
    """Return the initial state of a rule for a variable."""
    return () if rule is None else rule.init(z)


class SingleLoop(Method):
    """A method that moves x, y and v together, by local steps and the server's.

    Attributes:
        problem: the two losses.
        local: eta, the clients' step sizes.
        server: gamma.
        radius: r of the projection of v on the server; None for no projection.
    """

    problem: BilevelProblem = eqx.field(static=True, converter=require_shared)
    local: Point[float] = eqx.field(converter=as_local)
    server: ServerSteps = eqx.field(converter=ServerSteps.of)
    radius: float | None = eqx.field(converter=require_radius, default=None)

    def point(self, state: Any) -> Point[PyTree]:
        return Point(*_base(state)[:3])

    def counters(self, state: Any) -> dict[str, int]:
        return {"projected": int(_base(state).projected)}


def _base(state: Any) -> State:
    return getattr(state, "base", state)


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
