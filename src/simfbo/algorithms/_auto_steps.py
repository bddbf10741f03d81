"""Automatic step sizes: any method, with steps measured through the federation.

The first iteration measures mu and L of the lower problem (`_curvature`), which determine the steps
(docs/explanation-steps.md). With T iterations, tau the mean of ||a_i||_1, kappa = L / mu:

    gamma_y = gamma_v = 1 / (L tau)     on the server, heavy-ball momentum (1 - 1/sqrt(kappa))^2;
    gamma_x = min(0.3 / sqrt(kappa), 1 / sqrt(T))     by Adam, in units of x's own size: x may not
              outrun y and v, which need sqrt(kappa) iterations to follow it;
    eta     = gamma / sqrt(T)           on the clients (eta_x by the size of the hypergradient).

x waits until y and v have come near their solutions. A run that begins to diverge restores the last
good state and halves all step sizes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.algorithms._common import Rule, drawn_directions, local_steps, once_per_problem
from simfbo.algorithms._curvature import Curvature, curvature_step, measure
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar
from simfbo.errors import TooFewReplies

_SLOWEST = 0.05  # 1/sqrt(kappa) below which nothing in a run's time would settle
_LEAD = 6.0  # how many times sqrt(kappa) iterations x takes to reach full speed
_SHORT = 8  # exchanges with each of several cohorts
_TRIES = 30  # exchanges that find the size of the hypergradient
_LIMIT = 100.0  # how many times its first change a change may be
_KEPT = 20  # iterations after which the last good state is replaced
_MOST = 30  # halvings
_STILL = Point(0.0, 0.0, 0.0)


class Plan(NamedTuple):
    """Step sizes in the forms that methods take them.

    Attributes:
        local: eta, for methods with step sizes of clients and server.
        server: gamma, for the same methods.
        plain: one set of step sizes, for methods that take only that.
    """

    local: Point[float]
    server: Point[Rule]
    plain: Point[float]


Build = Callable[[Plan], Algorithm]
AutoKey = tuple[Curvature, float, int]


class AutoState(NamedTuple):
    """A method's state, what was measured, and the state to return to.

    Attributes:
        base: the method's own state.
        anchor: the last good state, restored if the run begins to diverge.
        found: mu, L and tau; zeros before the first iteration.
        pull: ||grad Phi|| over sqrt(dim x), where clients move x or steps are plain; else zero.
        first: the sizes of the first change of x, y and v.
        age: iterations since the anchor.
        halvings: how often the steps were halved.
    """

    base: PyTree
    anchor: PyTree
    found: jax.Array
    pull: jax.Array
    first: jax.Array
    age: jax.Array
    halvings: jax.Array

    @property
    def x(self) -> PyTree:
        """Return x."""
        return self.base.x

    @property
    def y(self) -> PyTree:
        """Return y."""
        return self.base.y

    @property
    def v(self) -> PyTree:
        """Return v, where the method has one."""
        return self.base.v

    @property
    def projected(self) -> jax.Array:
        """Return how often the projection of v acted, where the method has one."""
        return self.base.projected


def auto_steps(
    build: Build, problem: BilevelProblem, x0: PyTree, rounds: int, plain: bool = False
) -> Algorithm:
    """Let a method choose its step sizes automatically.

    Args:
        build: (plan) -> the method with these steps, as
            `lambda plan: simfbo(problem, plan.local, plan.server)`, or, for a method with one set
            of steps, `lambda plan: fednest(problem, plan.plain)`.
        problem: the two losses.
        x0: the initial upper variable; its size sets the scale of x's steps.
        rounds: T, the iterations of the run.
        plain: whether the method takes `plan.plain`.

    Returns:
        The algorithm; its first iteration takes 15 exchanges more (24 where only some clients take
        part), and 30 on top where `plain` or where clients take several steps.

    Example:
        >>> from simfbo import SimulatedFederation, run
        >>> from simfbo.algorithms import simfbo
        >>> from simfbo.tasks import quadratic
        >>> task = quadratic()
        >>> method = auto_steps(
        ...     lambda plan: simfbo(task.problem, plan.local, plan.server),
        ...     task.problem,
        ...     task.x0,
        ...     rounds=300,
        ... )
        >>> history = run(
        ...     method,
        ...     SimulatedFederation(task.data),
        ...     task.x0,
        ...     task.y0,
        ...     rounds=300,
        ...     evaluate=task.evaluate,
        ...     every=300,
        ... )
        >>> history.records[-1]["x_error"] < 0.1
        True
    """
    scale = size_of(x0)
    probe, hypergradient = curvature_step(problem), _hypergradient_step(problem)
    like = build(_plan(Curvature(1.0, 1.0, 1.0), 1.0, scale, rounds, 0))
    built: dict[AutoKey, Algorithm] = {}

    def method(state: AutoState) -> Algorithm:
        found, pull = Curvature(*map(float, state.found)), float(state.pull)
        key = found, pull, int(state.halvings)
        if key not in built:
            built[key] = build(_plan(found, pull, scale, rounds, key[-1]))
        return built[key]

    def init(x: PyTree, y: PyTree) -> AutoState:
        base, zero = like.init(x, y), jnp.zeros((), jnp.int32)
        return AutoState(base, base, jnp.zeros(3), jnp.zeros(()), jnp.zeros(3), zero, zero)

    def round(state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        if not state.found[1]:
            state = look(state, federation, key)
        try:
            after = method(state).round(state.base, federation, key)
        except TooFewReplies as error:
            if not error.exchange.mostly_oversized or state.halvings >= _MOST:
                raise
            return _back(state)
        return _judged(state, after)

    def look(state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        found = _curvature(probe, federation, state, key)
        state = state._replace(found=jnp.asarray(found, float))
        if not plain and found.work < 1.01:  # one step each, up to rounding
            return state
        pull = _pull(
            hypergradient, federation, state, _plan(found, 1.0, scale, rounds, 0).server, key
        )
        return state._replace(pull=jnp.asarray(pull, float))

    client_steps = (probe, hypergradient, *like.client_steps)
    return Algorithm(like.name, init, round, client_steps, like.known_violations)


def size_of(x: PyTree) -> PyTree:
    """Return the size of each leaf: its root mean square, or that of the others where it is zero.

    Where all of x is zero, as logarithms and logits are at the beginning, the size is one.

    Example:
        >>> import numpy as np
        >>> size_of({"weight": np.array([0.3, -0.3]), "bias": np.zeros(2)})
        {'bias': 0.3, 'weight': 0.3}
    """
    leaves, structure = jax.tree.flatten(x)
    sizes = [float(np.sqrt(np.mean(np.square(leaf)))) for leaf in leaves]
    usual = np.mean([size for size in sizes if size] or [1.0])
    return jax.tree.unflatten(structure, [size or float(usual) for size in sizes])


def _plan(found: Curvature, pull: float, scale: PyTree, rounds: int, halvings: int) -> Plan:
    """Return the step sizes."""
    factor, root = 0.5**halvings, math.sqrt(rounds)
    L, work = found.L if found.L > 0 else 1.0, found.work or 1.0  # zeros: an engine that counts
    rate = min(1.0, max(_SLOWEST, math.sqrt(max(found.mu, 0.0) / L)))
    gamma, speed = factor / (L * work), factor * min(0.3 * rate, 1 / root)
    typical = float(np.mean(jax.tree.leaves(scale)))
    lead = min(_LEAD / rate, rounds / 2)
    follow = optax.sgd(_settling(gamma, rounds), momentum=(1 - rate) ** 2)
    step_x = speed * typical / max(pull, 1e-12)
    return Plan(
        local=Point(step_x / (work * root) if pull else 0.0, gamma / root, gamma / root),
        server=Point(_adam(speed, scale, lead, rounds), follow, follow),
        plain=Point(step_x, factor / L, factor / L),
    )


def _adam(speed: float, scale: PyTree, lead: float, rounds: int) -> optax.GradientTransformation:
    """Return Adam for x, warmed up over `lead` iterations and then decaying to zero.

    Before y and v are near their solutions, the direction of x is far larger than the
    hypergradient: Adam must not remember it.
    """

    def begun(count: Scalar) -> jax.Array:
        return jnp.asarray(jnp.asarray(count, float) >= lead / 2, float)

    def schedule(count: Scalar) -> jax.Array:
        t = jnp.asarray(count, float)
        return speed * jnp.minimum(1.0, t / lead) * _cosine(t / rounds)

    def sized(updates: PyTree, state: PyTree, params: Any = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda s, u: jnp.asarray(s, u.dtype) * u, scale, updates), state

    units = optax.GradientTransformation(lambda params: optax.EmptyState(), sized)
    rule = optax.chain(optax.scale_by_schedule(begun), optax.adam(schedule, b2=0.99), units)

    def update(updates: PyTree, state: PyTree, params: Any = None) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):  # Optax's Adam promotes freely
            return rule.update(updates, state, params)

    return optax.GradientTransformation(rule.init, update)


def _settling(gamma: float, rounds: int) -> optax.Schedule:
    """Return a step size that decays over the second half of the run, to average out noise."""
    return lambda count: (
        gamma * _cosine(jnp.maximum(0.0, 2 * jnp.asarray(count, float) / rounds - 1) * 0.9)
    )


def _cosine(share: Scalar) -> jax.Array:
    return (1 + jnp.cos(jnp.pi * jnp.minimum(share, 1.0))) / 2


def _curvature(
    probe: ClientStep, federation: Federation, state: AutoState, key: jax.Array
) -> Curvature:
    """Return the curvature; the worst of three cohorts' where not everyone takes part."""
    if len(federation.cohort(key).ids) >= federation.n:
        return measure(probe, federation, state.x, state.y, key)
    keys = jax.random.split(key, 3)
    seen = [measure(probe, federation, state.x, state.y, k, _SHORT) for k in keys]
    work = sum(one.work for one in seen) / len(seen)
    return Curvature(min(one.mu for one in seen), max(one.L for one in seen), work)


@once_per_problem
def _hypergradient_step(problem: BilevelProblem) -> ClientStep:
    """Return the client step that computes SimFBO's directions."""
    draw = drawn_directions(problem)

    def hypergradient_size(at: Point[PyTree], client: Client) -> Point[PyTree]:
        return local_steps(draw, at, client)

    return hypergradient_size


def _pull(
    client_step: ClientStep,
    federation: Federation,
    state: AutoState,
    server: Point[PyTree],
    key: jax.Array,
) -> float:
    """Return the size of the hypergradient, once y and v have come nearer to their solutions."""
    x, y = state.x, jax.tree.map(jnp.asarray, state.y)
    v, cohort = trees.zeros_like(y), federation.cohort(key)
    opt_y, opt_v, d = server.y.init(y), server.v.init(v), None
    for _ in range(_TRIES):
        d = federation.sum(client_step, Point(x, y, v), cohort, key, _STILL)
        step_y, opt_y = server.y.update(d.y, opt_y)
        step_v, opt_v = server.v.update(d.v, opt_v)
        y, v = optax.apply_updates(y, step_y), optax.apply_updates(v, step_v)
    count = sum(leaf.size for leaf in jax.tree.leaves(x))
    size = math.sqrt(float(trees.squared_norm(d.x)) / count) if d is not None else 0.0
    return size / float(state.found[2])


def _judged(state: AutoState, after: PyTree) -> AutoState:
    """Return the state after an iteration, or the last good one where it moved too far."""
    change, limit = (np.asarray(a, float) for a in _sizes(state, after))
    sound = np.isfinite(change).all() and (change <= limit).all()
    if not sound and state.halvings < _MOST:
        return _back(state)
    first = jnp.asarray(change, float) if not state.first.any() else state.first
    kept = state.age + 1 >= _KEPT
    return state._replace(
        base=after,
        anchor=after if kept else state.anchor,
        first=first,
        age=jnp.where(kept, 0, state.age + 1),
    )


def _back(state: AutoState) -> AutoState:
    """Restore the last good state and halve all step sizes."""
    zero = jnp.zeros((), jnp.int32)
    return state._replace(base=state.anchor, age=zero, halvings=state.halvings + 1)


@jax.jit
def _sizes(state: AutoState, after: PyTree) -> tuple[jax.Array, jax.Array]:
    """Return how far x, y and v moved, and how far each may move; zeros for a missing one."""

    def length(tree: PyTree) -> jax.Array:
        return jnp.sqrt(trees.squared_norm(tree)).astype(float)

    def pair(name: str) -> tuple[jax.Array, jax.Array]:
        if not hasattr(after, name):
            return jnp.zeros(()), jnp.zeros(())
        moved = trees.subtract(getattr(after, name), getattr(state, name))
        return length(moved), length(getattr(state.anchor, name))

    moved, size = (jnp.stack(part) for part in zip(*map(pair, "xyv"), strict=True))
    known = jnp.where(state.first.any(), state.first, moved)
    return moved, _LIMIT * jnp.maximum(known, 0.01 * jnp.maximum(1.0, size))
