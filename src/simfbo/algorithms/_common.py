"""Common parts of methods: settings, directions, local steps and server steps."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.core import BilevelProblem, Client, Federation, Method, Point, directions, trees
from simfbo.core.local_work import LocalPlan
from simfbo.core.problem import PyTree, Scalar, independent_directions
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError, brief

Draw = Callable[[Point[PyTree], Client, jax.Array], Point[PyTree]]
Rule = float | optax.GradientTransformation
Server = Point[Rule] | optax.GradientTransformation

STALE = "The memory of a client is from its last participation, also if all clients are identical."
add = jax.jit(trees.add)
add_scaled = jax.jit(trees.add_scaled)
scale = jax.jit(trees.scale)


def weighs_work(name: str) -> dict[str, str]:
    """Return the law violated by methods that add up directions, with the reason."""
    reason = "weights clients by p_i ||a_i||_1, so unequal local work changes its solution."
    return {"unequal local work": f"{name} {reason}"}


def adds_changes(name: str) -> dict[str, str]:
    """Return the law violated by methods that add up clients' changes, with the reason."""
    reason = "adds up the changes of clients, so those with more local steps have more weight."
    return {"unequal local work": f"{name} {reason}"}


def require_point(name: str, steps: Any) -> Point[Any]:
    """Raise unless `steps` has three parts; convert it to a point."""
    if not isinstance(steps, tuple) or len(steps) != 3:
        raise UserError(f"Give {name} as Point(x=..., y=..., v=...), got {brief(steps)}.")
    return Point(*steps)


def require_radius(radius: float | None) -> float | None:
    """Raise unless a radius is positive and finite, or None."""
    if radius is not None and not 0 < radius < float("inf"):
        raise UserError(f"The radius of v must be positive, got {radius}; omit it for none.")
    return radius


def require_plain(client: Client) -> None:
    """Raise unless all clients take plain gradient steps."""
    if not client.plan.plain:
        raise UserError(
            "This method takes plain local steps: local momentum, proximal terms and coefficients "
            "work with SimFBO, ShroFBO, MimeFBO and MemFBO."
        )


def drawn_directions(problem: BilevelProblem, independent_batches: bool = False) -> Draw:
    """Return (at, client, key) -> the three directions at a point on sampled minibatches."""

    def draw(at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
        lower, upper = client.data.lower_batch, client.data.upper_batch
        if not independent_batches:
            of_lower, of_upper = jax.random.split(key)
            return directions(problem, *at, lower(of_lower), upper(of_upper))
        zeta, *keys = jax.random.split(key, 5)
        psi, xi = (lower(keys[0]), upper(keys[1])), (lower(keys[2]), upper(keys[3]))
        return independent_directions(problem, *at, lower(zeta), psi, xi)

    return draw


def project(v: PyTree, radius: float | None) -> tuple[PyTree, jax.Array]:
    """Project v onto the ball of `radius`; return it, and 1 if the projection was active."""
    if radius is None:
        return v, jnp.zeros((), jnp.int32)
    active = (jnp.sqrt(trees.squared_norm(v)) > radius).astype(jnp.int32)
    return optax.projections.projection_l2_ball(v, radius), active


def moved(
    z: Point[PyTree], eta: Point[Any], d: Point[PyTree], radius: float | None = None
) -> Point[PyTree]:
    """Compute z - eta d, with v projected; variables without a direction are unchanged."""
    triples = zip(z, eta, d, strict=True)
    x, y, v = (old if d is None else trees.add_scaled(old, -size, d) for old, size, d in triples)
    return Point(x, y, project(v, radius)[0])


def zero_sum(plan: LocalPlan, like: PyTree) -> tuple[PyTree, PyTree]:
    """Return the initial q and momentum (empty without one) for `add_direction`."""
    zero = trees.zeros_like(like)
    return zero, () if plan.momentum is None else zero


def add_direction(
    plan: LocalPlan, k: Scalar, d: PyTree, q: PyTree, speed: PyTree
) -> tuple[PyTree, PyTree]:
    """Add the direction of step k to q by the client's local rule; return q and the momentum.

    speed = momentum * speed + c_k d,     q = keep * q + speed
    """
    change = trees.scale(jnp.asarray(plan.steps)[k], d)
    if plan.momentum is not None:
        change = speed = trees.add_scaled(change, plan.momentum, speed)
    return trees.add(q if plan.keep is None else trees.scale(plan.keep, q), change), speed


def local_steps(
    draw: Draw, start: Point[PyTree], client: Client, eta: Point[PyTree]
) -> Point[PyTree]:
    """Take tau_i local steps of sizes eta; return q = sum_k a_k d_k, the weighted directions."""
    plan = client.plan

    def step(k: Scalar, at: Point[PyTree], walk: tuple[Any, Any]) -> tuple[Any, Any]:
        return add_direction(plan, k, draw(at, client, jax.random.fold_in(client.key, k)), *walk)

    walk = zero_sum(plan, start)
    if plan.steps.shape[-1] == 1:
        return step(0, start, walk)[0]
    return jax.lax.fori_loop(
        0, plan.tau, lambda k, walk: step(k, moved(start, eta, walk[0]), walk), walk
    )[0]


def pairs(first: Point[PyTree], second: Point[PyTree]) -> Point[PyTree]:
    """Combine two points to a point of pairs, which preserves the channels."""
    return Point(*zip(first, second, strict=True))


def apart(pairs: Any) -> tuple[Point[PyTree], Point[PyTree]]:
    """Split a point of pairs into two points."""
    first, second = zip(*pairs, strict=True)
    return Point(*first), Point(*second)


def start(x: PyTree, y: PyTree) -> Point[PyTree]:
    """Return the initial x, y and v, which is zero."""
    x, y = trees.on_device((x, y))
    return Point(x, y, trees.host_zeros(y))


def is_rule(gamma: Any) -> bool:
    """Check if gamma is an Optax transformation."""
    return isinstance(gamma, optax.GradientTransformation)


class ServerStep(eqx.Module):
    """gamma of one variable, or of all three together: a step size or an Optax transformation."""

    size: Any
    rule: Any = eqx.field(static=True)

    @classmethod
    def of(cls, gamma: Rule) -> "ServerStep":
        return cls(None, gamma) if is_rule(gamma) else cls(gamma, None)

    def init(self, z: PyTree) -> PyTree:
        return () if self.rule is None else self.rule.init(z)

    def apply(self, d: PyTree, state: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
        """Update z along d; return it and the optimiser's state."""
        if self.rule is None:
            return trees.add_scaled(z, -self.size, d), state
        updates, state = self.rule.update(d, state, z)
        return optax.apply_updates(z, updates), state

    def move(self, d: PyTree, state: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
        """Call `apply` as a compiled program."""
        return _move(self, d, state, z)


_move = jax.jit(ServerStep.apply)


class State(NamedTuple):
    """The variables, the server's optimiser states, and the number of active projections of v."""

    x: PyTree
    y: PyTree
    v: PyTree = None
    server: PyTree = ()
    projected: Any = None


class ServerSteps(eqx.Module):
    """gamma: for each variable a step size or an Optax transformation.

    A single transformation in place of a point is applied to the three variables together.
    """

    sizes: Point[Any]
    rules: Any = eqx.field(static=True)

    @classmethod
    def of(cls, gamma: Server) -> "ServerSteps":
        """Separate step sizes from transformations."""
        if is_rule(gamma):
            return cls(Point(), gamma)
        point = require_point("server", gamma)
        if any(step is None for step in point):
            raise UserError("Give a step size for each variable: Point(x=..., y=..., v=...).")
        steps = [ServerStep.of(step) for step in point]
        return cls(Point(*(step.size for step in steps)), Point(*(step.rule for step in steps)))

    def init(self, x: PyTree, y: PyTree) -> State:
        at = start(x, y)
        if is_rule(self.rules):
            server = self.rules.init(at)
        else:
            server = Point(*map(ServerStep.init, self.each, at))
        return State(*at, server, trees.on_device(np.zeros((), np.int32)))

    def advance(self, state: State, d: Point[PyTree], radius: float | None = None) -> State:
        """Update the three variables along the aggregated directions, and project v."""
        return _advance(self, radius, state, d)

    @property
    def each(self) -> list[ServerStep]:
        """The separate steps of x, y and v."""
        return list(map(ServerStep, self.sizes, self.rules))


@jax.jit
def _advance(steps: ServerSteps, radius: float | None, state: State, d: Point[PyTree]) -> State:
    at, server = Point(*state[:3]), state.server
    if is_rule(steps.rules):
        (x, y, v), server = ServerStep(None, steps.rules).apply(d, server, at)
    else:
        (x, y, v), states = zip(*map(ServerStep.apply, steps.each, d, server, at), strict=True)
        server = Point(*states)
    v, active = project(v, radius)
    return State(x, y, v, server, state.projected + active)


class BilevelMethod(Method):
    """A method for a shared or, if `is_personal`, a personal lower level."""

    problem: BilevelProblem = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.problem.lower_level == "private" and not self.is_personal:
            raise UserError(
                "This method needs a lower problem that all clients share: for a personal lower "
                "level use simfbo, shrofbo or fedbioacc_local."
            )

    @property
    def draw(self) -> Draw:
        """The function that computes the three directions on sampled minibatches."""
        return drawn_directions(self.problem)


class SteppedMethod(BilevelMethod):
    """A method with one step size for each variable; its state is (x, y, v) by default."""

    steps: Point[float] = eqx.field(converter=partial(require_point, "steps"))

    def init(self, x: PyTree, y: PyTree) -> Any:
        return start(x, y)


class ProjectedMethod(SteppedMethod):
    """A method that projects v onto a ball; `radius` is None for no projection."""

    radius: float | None = eqx.field(converter=require_radius)


class SingleLoop(BilevelMethod):
    """A single-loop method for x, y and v, with local and server steps.

    Attributes:
        local: eta, the clients' step sizes.
        server: gamma.
        radius: r of the projection of v on the server; None for no projection.
        independent_batches: sample separate batches for the three directions.
    """

    local: Point[float] = eqx.field(converter=partial(require_point, "local"))
    server: ServerSteps = eqx.field(converter=ServerSteps.of)
    radius: float | None = eqx.field(converter=require_radius, default=None)
    independent_batches: bool = eqx.field(static=True, default=False)

    @property
    def draw(self) -> Draw:
        return drawn_directions(self.problem, self.independent_batches)

    def point(self, state: Any) -> Point[PyTree]:
        return Point(*_base(state)[:3])

    def counters(self, state: Any) -> dict[str, int]:
        return {"projected": int(_base(state).projected)}


def _base(state: Any) -> State:
    return getattr(state, "base", state)


class MeanLoop(SingleLoop):
    """A single-loop method with normalised messages and server step sizes rho gamma."""

    def advance(
        self,
        state: Any,
        d: Point[PyTree],
        norm: jax.Array,
        federation: Federation,
        cohort: Cohort,
        key: jax.Array,
    ) -> Any:
        """Update the state along d; `norm` is the cohort's estimate of rho."""
        rho = mean_work(federation, cohort, key, norm, state)
        base = self.server.advance(state.base, scale(rho, d), self.radius)
        counts = {"norm_sum": state.norm_sum + norm, "norm_count": state.norm_count + 1}
        return state._replace(base=base, **counts)


def mean_work(
    federation: Federation, cohort: Cohort, key: jax.Array, norm: jax.Array, state: Any
) -> Scalar:
    """Return rho = sum_j p_j ||a_j||_1, exact if it is known, else the mean of earlier rounds.

    `norm`, this round's estimate, is exact if all clients take part. Otherwise it is correlated
    with the messages, which would bias the step.
    """
    rho = federation.mean_norm(key)
    if rho is not None:
        return rho
    mean = state.norm_sum / jnp.maximum(state.norm_count, 1)
    earlier = jnp.where(state.norm_count > 0, mean, 1.0)
    if len(cohort.ids) != federation.n:
        return earlier
    everyone = jnp.all(cohort.ids == np.arange(federation.n, dtype=np.int32))
    return jnp.where(everyone, norm, earlier)
