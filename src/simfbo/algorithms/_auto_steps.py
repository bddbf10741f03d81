"""Automatic step sizes: any method, with steps measured through the federation.

The first iteration measures mu and L of the lower problem (`_curvature`), which determine the steps
(docs/explanation-steps.md). With T iterations, tau the mean of ||a_i||_1, kappa = L / mu:

    gamma_y = gamma_v = 1 / (L tau)     on the server, heavy-ball momentum (1 - 1/sqrt(kappa))^2;
    eta_y = eta_v = gamma / sqrt(T)     on the clients, which do not move x;
    gamma_x by Adam, at a pace          at which x never outruns y and v (`_pacing`).

x waits until y and v have come near their solutions. The size of its first steps is measured then:
a step of size one would move y*(x) by its own length. No number has a unit, so scaling x, y, f or g
changes nothing but the scale of the result. A run that begins to diverge restores the last good
state and halves all step sizes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from simfbo.algorithms import _pacing
from simfbo.algorithms._common import drawn_directions, local_steps
from simfbo.algorithms._curvature import Curvature, measure, probes, shift
from simfbo.algorithms._pacing import Window
from simfbo.algorithms._plan import Plan, Sizes, plan_for, sizes_for
from simfbo.algorithms._settings import once_per_problem
from simfbo.core import trees
from simfbo.core._start import variable
from simfbo.core.federation import (
    Algorithm,
    Client,
    ClientStep,
    Federation,
    Hosted,
    Tracing,
    View,
    require_exact_sums,
)
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar, point_of
from simfbo.core.sampling import Cohort
from simfbo.errors import TooFewReplies, UserError

_START, _PLAIN_START = 0.1, 0.3  # x's first pace, as a share of its largest; with plain steps
_FEWEST = 15  # exchanges that may measure mu and L; more in longer runs
_TRIES = 30  # exchanges that find the size of the hypergradient
_LIMIT = 100.0  # how many times t^2 of its first change the t-th change may be
_MOST = 30  # halvings
_STILL = Point(0.0, 0.0, 0.0)


Build = Callable[[Plan], Algorithm]


class AutoState(NamedTuple):
    """A method's state, what was measured, and the state to return to.

    Attributes:
        base: the method's own state.
        anchor: the last good state, restored if the run begins to diverge.
        found: mu, L and tau; zeros before the first iteration.
        pull: ||grad Phi|| over sqrt(dim x), where steps are plain; else zero.
        pace: of x, zero while it waits; and the largest that it may have.
        window: what is known of how y, v and the hypergradient change.
        first: the sizes of the first change of y and v.
        age: iterations since the anchor, the beginning of the window.
        length: iterations of a window; zero before the first iteration.
        halvings: how often the steps were halved.
    """

    base: PyTree
    anchor: PyTree
    found: Any
    pull: Any
    pace: Any
    window: Window
    first: Any
    age: Any
    length: Any
    halvings: Any

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
        x0: the initial upper variable; the sizes of its leaves are those of x's steps.
        rounds: T, the iterations of the run.
        plain: whether the method takes `plan.plain`.

    Returns:
        The algorithm. Its first iteration takes up to 15 exchanges more, or T/10 where that is
        more, until mu is known; where `plain`, 30 on top. When x begins to move, up to sqrt(kappa)
        exchanges find by how much y*(x) moves with it.

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
        ...     method, SimulatedFederation(task.data), task.x0, task.y0, rounds=300
        ... )
        >>> task.evaluate(history.state)["x_error"] < 0.1
        True
    """
    if problem.lower_level == "private":
        raise UserError(
            "Automatic step sizes are measured on a lower problem that all clients share: give the "
            "step sizes of a private lower level yourself."
        )
    scale = _pacing.size_of(variable(x0, "x0"))
    typical = float(np.mean(jax.tree.leaves(scale)))
    tools, hypergradient = probes(problem), _hypergradient_step(problem)
    rules = _pacing.rules(scale, rounds)
    like = build(plan_for(Sizes(*np.zeros(4)), rules, rounds))
    require_exact_sums(like, "going back to earlier states, as automatic step sizes do,")
    built: dict[tuple[float, ...], Algorithm] = {}

    def sizes(state: AutoState) -> Sizes:
        return sizes_for(state.found, state.pull, state.pace, state.halvings, typical)

    def method(found: Sizes) -> Algorithm:
        if isinstance(found.gamma, Tracer):
            return build(plan_for(found, rules, rounds))
        key = tuple(map(float, found if plain else found._replace(x=np.zeros(()))))
        if key not in built:
            built[key] = build(plan_for(Sizes(*key), rules, rounds))
        return built[key]

    def init(x: PyTree, y: PyTree) -> AutoState:
        base = like.init(x, y)
        window = _pacing.opened(x, *_lower(base)[1:])
        zero, found, pace = np.zeros((), np.int32), _host([0.0] * 3), _host([0.0] * 2)
        return AutoState(
            base, base, found, _host(0.0), pace, window, _host([0.0] * 2), zero, zero, zero
        )

    def ahead(state: AutoState) -> int:
        return int(state.length) - int(state.age)

    def iterate(state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Run an iteration of the method, and judge it: all that needs no host."""
        view, sums = _watched(federation)
        found = sizes(state)
        after = method(found).round(state.base, view, key)
        pull = _pull_of(state, after, sums, found.x if plain else None)
        return _judged(state, after, pull)

    def round(state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        state = prepare(state, federation, key)
        try:
            state = iterate(state, federation, key)
        except TooFewReplies as error:
            if not error.exchange.mostly_oversized or state.halvings >= _MOST:
                raise
            return _back(state)
        return state if ahead(state) > 0 else paced(state, federation, key)

    def prepare(state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        return state if state.length else look(state, federation, key)

    def paced(state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """End a window, and set x's pace for the next."""
        length, rate = int(state.length), _curvature_of(state).rate
        pace, most = np.asarray(state.pace).tolist()
        window, found = _pacing.closed(
            state.window, _lower(state.anchor), _lower(state.base), length * rate
        )
        window = window._replace(index=np.asarray(window.index))
        lag, turn = np.asarray(found).tolist()
        if pace:
            early = int(window.index) * length < rounds / 2
            pace = _pacing.next_pace(pace, most, lag, turn, early)
        elif _pacing.may_start(window, lag) and float(window.power_before):
            most = largest_pace(state, window.pull_before, federation, key)
            pace = _START * most
        base = _pacing.with_pace(state.base, pace)
        return state._replace(
            base=base,
            anchor=base,
            window=window,
            pace=_host([pace, most]),
            age=np.zeros((), np.int32),
        )

    def largest_pace(
        state: AutoState, pull: PyTree, federation: Federation, key: jax.Array
    ) -> float:
        """Return the pace that moves y*(x) by its own length while y and v settle."""
        rate = _curvature_of(state).rate
        most = max(3, int(min(1 / rate, rounds / 20)))
        u = jax.tree.map(lambda s, h: np.asarray(s * np.sign(h), h.dtype), scale, pull)
        moved = shift(tools, federation, state.x, state.y, u, key, most)
        size = trees.host_norm(state.y)
        reach = size / moved if moved and size else 1.0  # x that does not act on y: nothing known
        return min(rate, 3 / math.sqrt(rounds)) * reach

    def look(state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        most = most_probes(rounds)
        found = measure(tools.curvature, federation, state.x, state.y, key, most)
        length = _pacing.length_of(found.rate, rounds)
        state = state._replace(found=_host(found), length=np.asarray(length, np.int32))
        own = sizes(state)
        state = state._replace(base=_pacing.with_rates(state.base, own.gamma, own.momentum))
        state = state._replace(anchor=state.base)
        if not plain:
            return state
        pull, y = _pull(hypergradient, federation, state, own, rules.y, key)
        count = sum(leaf.size for leaf in jax.tree.leaves(pull))
        size = trees.host_norm(pull) / math.sqrt(count)
        settled = state._replace(base=state.base._replace(y=y))
        most = largest_pace(settled, pull, federation, key) if size else 0.0
        return state._replace(pull=_host(size), pace=_host([_PLAIN_START * most, most]))

    client_steps = (*tools, hypergradient, *like.client_steps)
    settings = {**like.settings, "rounds": rounds}
    hosted, form = Hosted(ahead, prepare, iterate, paced), like.traced.form
    if form is not None:
        # What `build` makes of step sizes shows in those of other ones.
        other = build(plan_for(Sizes(1.1, 0.37, 1.7, 0.53), rules, rounds)).traced.numbers
        made = tuple(map(float, jax.tree.leaves(other))), jax.tree.structure(other)
        form = ("auto", form, made, rounds, plain, typical)
    return like._replace(
        init=init, round=round, client_steps=client_steps, settings=settings,
        tracing=Tracing(round, form, hosted=hosted),
    )  # fmt: skip


def most_probes(rounds: int) -> int:
    """Return the most exchanges that measure mu and L in a run."""
    return max(_FEWEST, rounds // 10)


@once_per_problem
def _hypergradient_step(problem: BilevelProblem) -> ClientStep:
    """Return the client step that computes SimFBO's directions."""
    draw = drawn_directions(problem)

    def hypergradient_size(at: Point[PyTree], client: Client) -> Point[PyTree]:
        return local_steps(draw, at, client)

    hypergradient_size.uncoded = True  # pyright: ignore[reportFunctionMemberAccess]
    return hypergradient_size


def _pull(
    client_step: ClientStep,
    federation: Federation,
    state: AutoState,
    sizes: Sizes,
    rule: Any,
    key: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Return the hypergradient and y, once y and v have come nearer to their solutions."""
    x, y = state.x, jax.tree.map(jnp.asarray, state.y)
    v, cohort, d = trees.zeros_like(y), federation.cohort(key), Point(x=trees.zeros_like(x))
    rest = _pacing.with_rates((rule.init(y), rule.init(v)), sizes.gamma, sizes.momentum)
    for _ in range(_TRIES):
        d = federation.sum(client_step, Point(x, y, v), cohort, key, _STILL)
        y, v, rest = _followed(rule, d.y, d.v, rest, y, v)
    return trees.scale(1 / float(state.found[2]), d.x), y


@partial(jax.jit, static_argnums=0)
def _followed(rule: Any, d_y: PyTree, d_v: PyTree, rest: Any, y: PyTree, v: PyTree) -> Any:
    """Move y and v by a rule; return them and its states."""
    step_y, of_y = rule.update(d_y, rest[0])
    step_v, of_v = rule.update(d_v, rest[1])
    return optax.apply_updates(y, step_y), optax.apply_updates(v, step_v), (of_y, of_v)


def _watched(federation: Federation) -> tuple[View, list[PyTree]]:
    """Return the federation, and a list to which every sum over its clients is added."""
    sums: list[PyTree] = []

    def spy(
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
        eta: Point[PyTree],
    ) -> PyTree:
        sums.append(federation.sum(client_step, payload, cohort, key, eta))
        return sums[-1]

    return View(federation, spy, federation.gather), sums


def _pull_of(state: AutoState, after: PyTree, sums: list[PyTree], step: Any) -> PyTree | None:
    """Return an iteration's hypergradient: as it was sent, or, for plain steps, as x moved."""
    if step is not None:
        return _per_step(state.x, after.x, step)
    sent = (point_of(one).x for one in reversed(sums))
    return next((h for h in sent if h is not None), None)


@jax.jit
def _per_step(before: PyTree, after: PyTree, step: Any) -> PyTree:
    """Return by how much x moved, per size of a step; zero where that is zero."""
    times = jnp.where(step > 0, 1 / jnp.where(step > 0, step, 1.0), 0.0)
    return trees.scale(times, trees.subtract(before, after))


@jax.jit
def _judged(state: AutoState, after: PyTree, pull: PyTree | None) -> AutoState:
    """Return the state after an iteration, or the last good one where it moved too far.

    y gathers momentum, and v follows it: their changes may grow like t^2, but not exponentially.
    """
    t = jnp.asarray(state.window.index * state.length + state.age + 1, float)
    first, window, sound = _looked_at(state, _lower(after), after.x, pull, _LIMIT * t**2)
    age = state.age + jnp.ones((), state.age.dtype)
    good = state._replace(base=after, window=window, first=first, age=age)
    use = sound | (state.halvings >= _MOST)
    return jax.tree.map(lambda a, b: jnp.where(use, a, b), good, _back(state))


def _back(state: AutoState) -> AutoState:
    """Restore the last good state and halve all step sizes."""
    halved = state._replace(
        pace=state.pace / 2,
        window=_pacing.emptied(state.window),
        age=state.age * 0,
        halvings=state.halvings + jnp.ones((), state.halvings.dtype),
    )
    own = sizes_for(halved.found, halved.pull, halved.pace, halved.halvings, 1.0)
    base = _pacing.with_pace(state.anchor, halved.pace[0])
    return halved._replace(base=_pacing.with_rates(base, own.gamma, own.momentum))


def _looked_at(
    state: AutoState, after: Point[PyTree], x: PyTree, pull: PyTree | None, most: Scalar
) -> tuple[jax.Array, Window, jax.Array]:
    """Return the first change, the window with one more hypergradient, and whether all is well."""

    def lengths(at: Point[PyTree]) -> jax.Array:
        return jnp.sqrt(jnp.stack([trees.squared_norm(z).astype(float) for z in (at.y, at.v)]))

    change = lengths(trees.subtract(after, _lower(state.base)))
    size = lengths(_lower(state.anchor))
    first = jnp.where(state.first > 0, state.first, change)
    limit = jnp.maximum(most * first, size)
    sound = jnp.all(jnp.isfinite(change) & (change <= limit))
    sound &= jnp.isfinite(trees.squared_norm(x))
    window = state.window if pull is None else _pacing.add_pull(state.window, pull)
    return first, window, sound


def _lower(state: PyTree) -> Point[PyTree]:
    """Return y and v of a method's state; None for one that it does not have."""
    return Point(y=state.y, v=getattr(state, "v", None))


def _curvature_of(state: AutoState) -> Curvature:
    return Curvature(*np.asarray(state.found).tolist())


def _host(value: Any) -> np.ndarray:
    """Return numbers as an array that is read without waiting for a device."""
    return np.asarray(value, jnp.result_type(float))
