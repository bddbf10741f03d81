"""What several methods share: settings, directions, local steps, and the server's step."""

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

STALE = "What clients remember is from when they last took part, also where all are the same."
add = jax.jit(trees.add)
add_scaled = jax.jit(trees.add_scaled)
scale = jax.jit(trees.scale)


def weighs_work(name: str) -> dict[str, str]:
    """Return the law that a method breaks by adding up directions, with the reason."""
    reason = "weighs clients by p_i ||a_i||_1, so unequal local work moves its solution."
    return {"unequal local work": f"{name} {reason}"}


def adds_changes(name: str) -> dict[str, str]:
    """Return the law that a method breaks by adding up clients' changes, with the reason."""
    reason = "adds what clients did, so those who take more local steps count for more."
    return {"unequal local work": f"{name} {reason}"}


def require_point(name: str, steps: Any) -> Point[Any]:
    """Raise unless there is a step size for each variable."""
    if not isinstance(steps, tuple) or len(steps) != 3:
        raise UserError(f"Give {name} as Point(x=..., y=..., v=...), got {brief(steps)}.")
    return Point(*steps)


def require_radius(radius: float | None) -> float | None:
    """Raise unless a radius is positive and finite, or None."""
    if radius is not None and not 0 < radius < float("inf"):
        raise UserError(f"The radius of v must be positive, got {radius}; omit it for none.")
    return radius


def require_plain(client: Client) -> None:
    """Raise unless the client's local optimiser is plain gradient steps."""
    if not client.plan.plain:
        raise UserError(
            "This method takes plain local steps: local momentum, proximal terms and coefficients "
            "work with SimFBO, ShroFBO, MimeFBO and MemFBO."
        )


def drawn_directions(problem: BilevelProblem, independent_batches: bool = False) -> Draw:
    """Return (at, client, key) -> the three directions at a point, on minibatches of the client."""

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
    """Project v onto the ball of `radius`; return it, and 1 if that moved it, else 0."""
    if radius is None:
        return v, jnp.zeros((), jnp.int32)
    acted = (jnp.sqrt(trees.squared_norm(v)) > radius).astype(jnp.int32)
    return optax.projections.projection_l2_ball(v, radius), acted


def moved(
    z: Point[PyTree], eta: Point[Any], d: Point[PyTree], radius: float | None = None
) -> Point[PyTree]:
    """Return z - eta d, with v projected; a variable without a direction stays."""
    parts = zip(z, eta, d, strict=True)
    x, y, v = (old if d is None else trees.add_scaled(old, -size, d) for old, size, d in parts)
    return Point(x, y, project(v, radius)[0])


def zero_sum(plan: LocalPlan, like: PyTree) -> tuple[PyTree, PyTree]:
    """Return what `add_direction` starts from: q, and the client's momentum where it has one."""
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
    """Join two points to one whose parts are pairs, so that each part has its channel."""
    return Point(*zip(first, second, strict=True))


def apart(pairs: Any) -> tuple[Point[PyTree], Point[PyTree]]:
    """Divide a point of pairs into two points."""
    first, second = zip(*pairs, strict=True)
    return Point(*first), Point(*second)


def start(x: PyTree, y: PyTree) -> Point[PyTree]:
    """Return the initial x, y and v: v is zero."""
    x, y = trees.on_device((x, y))
    return Point(x, y, trees.host_zeros(y))


def is_rule(gamma: Any) -> bool:
    """Return whether a part of gamma is an Optax transformation rather than a step size."""
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
        """Move z along d; return it and the optimiser's state."""
        if self.rule is None:
            return trees.add_scaled(z, -self.size, d), state
        updates, state = self.rule.update(d, state, z)
        return optax.apply_updates(z, updates), state

    def move(self, d: PyTree, state: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
        """Do the same in one compiled program."""
        return _move(self, d, state, z)


_move = jax.jit(ServerStep.apply)


class State(NamedTuple):
    """The variables, the server's optimiser states, and how often the projection of v acted."""

    x: PyTree
    y: PyTree
    v: PyTree = None
    server: PyTree = ()
    projected: Any = None


class ServerSteps(eqx.Module):
    """gamma: for each variable a step size, which is a number, or an Optax transformation.

    One transformation in place of a point moves the three variables together: it sees all of them.
    """

    sizes: Point[Any]
    rules: Any = eqx.field(static=True)

    @classmethod
    def of(cls, gamma: Server) -> "ServerSteps":
        """Divide step sizes and transformations into numbers and rules."""
        if is_rule(gamma):
            return cls(Point(), gamma)
        given = require_point("server", gamma)
        if any(part is None for part in given):
            raise UserError("Give a step size for each variable: Point(x=..., y=..., v=...).")
        steps = [ServerStep.of(part) for part in given]
        return cls(Point(*(step.size for step in steps)), Point(*(step.rule for step in steps)))

    def init(self, x: PyTree, y: PyTree) -> State:
        at = start(x, y)
        if is_rule(self.rules):
            server = self.rules.init(at)
        else:
            server = Point(*map(ServerStep.init, self.each, at))
        return State(*at, server, trees.on_device(np.zeros((), np.int32)))

    def advance(self, state: State, d: Point[PyTree], radius: float | None = None) -> State:
        """Move the three variables along the aggregated directions, and project v."""
        return _advance(self, radius, state, d)

    @property
    def each(self) -> list[ServerStep]:
        """Return the steps of x, y and v, where no transformation moves them together."""
        return list(map(ServerStep, self.sizes, self.rules))


@jax.jit
def _advance(steps: ServerSteps, radius: float | None, state: State, d: Point[PyTree]) -> State:
    at, server = Point(*state[:3]), state.server
    if is_rule(steps.rules):
        (x, y, v), server = ServerStep(None, steps.rules).apply(d, server, at)
    else:
        (x, y, v), own = zip(*map(ServerStep.apply, steps.each, d, server, at), strict=True)
        server = Point(*own)
    v, acted = project(v, radius)
    return State(x, y, v, server, state.projected + acted)


class BilevelMethod(Method):
    """A method for one lower problem of all clients or, if `is_personal`, for one of each."""

    problem: BilevelProblem = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.problem.lower_level == "private" and not self.is_personal:
            raise UserError(
                "This method needs a lower problem that all clients share: for a personal lower "
                "level use simfbo, shrofbo or fedbioacc_local."
            )

    @property
    def draw(self) -> Draw:
        """Return what draws the three directions."""
        return drawn_directions(self.problem)


class SteppedMethod(BilevelMethod):
    """A method with one step size for each variable, whose state is (x, y, v) by default."""

    steps: Point[float] = eqx.field(converter=partial(require_point, "steps"))

    def init(self, x: PyTree, y: PyTree) -> Any:
        return start(x, y)


class ProjectedMethod(SteppedMethod):
    """A method that keeps v within a ball; None for no projection."""

    radius: float | None = eqx.field(converter=require_radius)


class SingleLoop(BilevelMethod):
    """A method that moves x, y and v together, by local steps and the server's.

    Attributes:
        local: eta, the clients' step sizes.
        server: gamma.
        radius: r of the projection of v on the server; None for no projection.
        independent_batches: draw separate batches for the three directions.
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
    """A single loop whose clients send means: the server moves along their sum with rho gamma."""

    def advance(
        self,
        state: Any,
        d: Point[PyTree],
        norm: jax.Array,
        federation: Federation,
        cohort: Cohort,
        key: jax.Array,
    ) -> Any:
        """Move along d; `norm` is the cohort's estimate of rho."""
        rho = mean_work(federation, cohort, key, norm, state)
        base = self.server.advance(state.base, scale(rho, d), self.radius)
        counts = {"norm_sum": state.norm_sum + norm, "norm_count": state.norm_count + 1}
        return state._replace(base=base, **counts)


def mean_work(
    federation: Federation, cohort: Cohort, key: jax.Array, norm: jax.Array, state: Any
) -> Scalar:
    """Return rho = sum_j p_j ||a_j||_1, exact where it is known, else the mean of earlier rounds.

    `norm`, this round's estimate, is exact if the cohort is everyone. Otherwise it is correlated
    with the messages and would make them biased.
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
