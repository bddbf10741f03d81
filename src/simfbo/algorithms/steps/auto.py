"""Automatic step sizes: any method, with steps measured through the federation.

Before the first round mu and L of the lower problem are measured (`curvature`), which determine the
steps (docs/explanation-steps.md). With T rounds, tau the mean of ||a_i||_1, kappa = L / mu:

    gamma_y = gamma_v = 1 / (L tau)     on the server, heavy-ball momentum (1 - 1/sqrt(kappa))^2;
    eta_y = eta_v = gamma / sqrt(T)     on the clients, which do not move x;
    gamma_x by Adam, at a pace          at which x never outruns y and v (`pacing`).

x waits until y and v are near their solutions. The size of its first steps is measured then: a step
of size one would move y*(x) by its own length. No number has a unit, so scaling x, y, f or g
changes nothing but the scale of the result.

One exchange (`check`) at the end of every window of rounds measures mu and L again and compares the
upper loss with that of the best point so far, on the same clients. Where it has risen by more than
its uncertainty, the run returns to its best point and x moves on more slowly. A run that begins to
diverge within a window returns there too, and halves all step sizes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.algorithms._common import Rule
from simfbo.algorithms.steps import pacing
from simfbo.algorithms.steps.curvature import (
    VECTORS,
    Curvature,
    Probes,
    Shift,
    begin_shift,
    continue_shift,
    flat_rows,
    measure,
    no_shift,
    orthonormal,
    refresh,
    shaped,
)
from simfbo.core import trees
from simfbo.core.federation import ClientStep, Federation, View
from simfbo.core.method import Method, Wrapper, marked, require_unmodified_sums
from simfbo.core.problem import BilevelProblem, Point, PyTree, point_of
from simfbo.core.sampling import Cohort
from simfbo.core.validation import variable
from simfbo.errors import TooFewReplies, UserError

_START = 0.25  # x's first pace, as a share of its largest
_FEWEST = 15  # exchanges that may measure mu and L; more in longer runs
_TRIES = 30  # exchanges that find the size of the hypergradient
_LIMIT = 100.0  # how many times t^2 of its first change the t-th change may be
_MOST = 30  # halvings
_STEADY, _LEAP = 1.4, 2.0  # growth of L over a window: x may speed up; it must slow down
_SMALL = 0.01  # share of the gain that a change of the upper loss may have either way
_CLEAR = 1e-2  # relative uncertainty of the upper loss at which x begins to move
_LOUD = 0.5  # noise of y or v, relative to their size, at which steps are halved
_DEVIATIONS = 6.0  # standard errors that a change of the upper loss must exceed, at every check
_COMPARED = 8  # clients that a check asks at least, sampled as up to four cohorts
_EARLY = 0.75  # share of a run in which x may speed up; `Evidence.late` is the gain at its end
_LOST = 10.0  # relative error of y at which a state is given up
_KNOWN = 0.3  # relative errors of y and v at which d_x is taken for the hypergradient
_ROUNDING = 10  # rounding errors of the upper loss


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


Build = Callable[[Plan], Method]


class FromPlan(NamedTuple):
    """Builds a method with the step sizes of a plan; equal ones share compiled programs.

    Attributes:
        factory: (problem, local, server) -> the method.
        problem: the two losses.
    """

    factory: Callable[..., Method]
    problem: BilevelProblem

    def __call__(self, plan: Plan) -> Method:
        """Return the method with the steps of a plan."""
        return self.factory(self.problem, plan.local, plan.server)


class Sizes(NamedTuple):
    """Step sizes: of y and v on the server, with their momentum; of plain methods for y and x."""

    gamma: Any
    momentum: Any
    plain: Any
    x: Any


class Evidence(NamedTuple):
    """The measurements at the best point that the verdict on a run is based on.

    Attributes:
        y: bound on the error of y relative to y, ||grad_y G|| / (mu ||y||).
        v: bound on the error of v relative to v.
        hypergradient: its norm.
        first: its norm at the first best point, after x began to move, where it is known.
        gain: by how much the upper loss of the best point has fallen since then.
        late: the gain at three quarters of the run.
        doubt: the uncertainty of the upper loss of the best point.
        mu: the smallest eigenvalue with which y and v were bounded.
    """

    y: Any
    v: Any
    hypergradient: Any
    first: Any
    gain: Any
    late: Any
    doubt: Any
    mu: Any


class AutoState(NamedTuple):
    """A method's state, what was measured, and the state to return to.

    Attributes:
        base: the method's own state.
        best: the state with the lowest upper loss so far, restored if the run deteriorates.
        found: mu, L, tau, and 1 where sums are noisy; zeros before they are measured.
        vectors: approximate eigenvectors of the lower Hessian, where the next check starts.
        evidence: of the last check, an `Evidence`.
        pull: ||grad Phi|| over sqrt(dim x), where steps are plain; else zero.
        pace: of x, zero while it waits; the largest that it may have; and the one to resume.
        window: how y, v and the hypergradient change.
        shift: the measurement of how far y*(x) moves, which gives x its largest pace.
        first: the sizes of the first change of y and v.
        t: rounds done.
        age: rounds since the beginning of the window.
        length: rounds of a window.
        halvings: how often the steps were halved.
    """

    base: PyTree
    best: PyTree
    found: Any
    vectors: Any
    evidence: Any
    pull: Any
    pace: Any
    window: pacing.Window
    shift: Shift
    first: Any
    t: Any
    age: Any
    length: Any
    halvings: Any

    @property
    def curvature(self) -> Curvature:
        """Return mu, L and the rest as last measured."""
        mu, L, work, noisy = self.found
        return Curvature(mu, L, work, noisy, self.vectors)


class AutoSteps(Wrapper):
    """A method that chooses its step sizes automatically; see `auto_steps`.

    Attributes:
        problem: the two losses.
        build: (plan) -> the method with these steps.
        scale: the sizes of the leaves of x's steps.
        starts_at_zero: whether the initial x is zero.
        rounds: T, the rounds of the run.
        plain: whether the method takes `plan.plain`.
    """

    asks_again = True

    problem: BilevelProblem = eqx.field(static=True)
    build: Build = eqx.field(static=True)
    scale: PyTree = eqx.field(static=True)
    starts_at_zero: bool = eqx.field(static=True)
    rounds: int = eqx.field(static=True)
    plain: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        require_unmodified_sums(
            self.inner, "going back to earlier states, as automatic step sizes do,"
        )

    def inner_state(self, state: AutoState) -> PyTree:
        return state.base

    def init(self, x: PyTree, y: PyTree) -> AutoState:
        base = self.inner.init(x, y)
        size = sum(np.size(leaf) for leaf in jax.tree.leaves(y))
        zeros = {shape: np.zeros(shape, jnp.result_type(float)) for shape in ((), 2, 3, 4, 8)}
        return AutoState(
            base, base, zeros[4], np.zeros((VECTORS, size), jnp.result_type(float)), zeros[8],
            zeros[()], zeros[3], pacing.opened(x, *self.lower(base)[1:]), no_shift(y), zeros[2],
            *(np.zeros((), np.int32) for _ in range(4)),
        )  # fmt: skip

    @property
    def probes(self) -> Probes:
        """Return the client steps that measure the problem."""
        return Probes(self.problem)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        return {**marked(self.probes), **self.inner.client_steps}

    def evidence(self, state: AutoState) -> dict[str, float] | None:
        values = np.asarray(state.evidence).tolist()
        return Evidence(*values)._asdict() if any(values) else None

    def sizes(self, state: AutoState) -> Sizes:
        """Return the step sizes that a state stands for."""
        found, factor = state.curvature, 0.5 ** state.halvings.astype(state.found.dtype)
        L = jnp.where(found.L > 0, found.L, 1.0)  # zeros: nothing was computed
        work = jnp.where(found.work > 0, found.work, 1.0)
        move = state.pace[0] * float(np.mean(jax.tree.leaves(self.scale)))
        x = jnp.where(state.pull > 0, move / jnp.where(state.pull > 0, state.pull, 1.0), 0.0)
        return Sizes(factor / (L * work), (1 - found.rate) ** 2, factor / L, x)

    def lower(self, base: PyTree) -> Point[PyTree]:
        """Return y and v of the method's state; None for one that it does not have."""
        return self.inner.point(base)._replace(x=None)

    # Before the run

    def prepare(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Measure mu and L and, for plain steps, the hypergradient and the largest pace of x."""
        x, y, _ = self.point(state)
        most = most_probes(self.rounds)
        state = _measured(state, measure(self.probes, federation, x, y, key, most))
        state, sizes = _first_window(self, state)
        if not self.plain:
            return state
        rule, y = pacing.following(self.rounds), jax.tree.map(jnp.asarray, y)
        v, cohort = trees.host_zeros(y), federation.cohort(key)
        rest = rule.init(y), rule.init(v)
        rest = pacing.with_rates(rest, 0.0, sizes.gamma, sizes.momentum, 0)
        d = Point(x=trees.host_zeros(trees.on_device(x)))
        for _ in range(_TRIES):
            at = Point(x, y, v)
            d = federation.sum(self.probes.hypergradient_size, at, cohort, key)
            y, v, rest = _followed(rule, d.y, d.v, rest, y, v)
        count = sum(leaf.size for leaf in jax.tree.leaves(d.x))
        pull = trees.host_norm(d.x) / math.sqrt(count)
        if not pull:
            return state
        at = Point(x, y)
        shift = begin_shift(
            self.probes, federation, at, self.unit_step(d.x), key, self.products(state)
        )
        while int(shift.left):
            shift = continue_shift(self.probes, federation, at, shift)
        most = _largest_pace(self, state, shift, y)
        return state._replace(
            pull=_array(pull / float(state.found[2])),
            pace=_array([_START * float(most), float(most), 0.0]),
        )

    def unit_step(self, pull: PyTree) -> PyTree:
        """Return the step of size one against a hypergradient, up to its sign."""
        return jax.tree.map(lambda s, h: jnp.asarray(s, h.dtype) * jnp.sign(h), self.scale, pull)

    def products(self, state: AutoState) -> jax.Array:
        """Return the most products that measure how far y*(x) moves: half a window's rounds."""
        most = jnp.minimum(1 / state.curvature.rate, self.rounds / 20)
        return jnp.maximum(3, most).astype(jnp.int32)

    # The rounds

    def round(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Run a round of the method, and end the window where it is over."""
        sums: list[PyTree] = []
        t = state.t + 1

        def spy(step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array) -> PyTree:
            sums.append(federation.sum(step, payload, cohort, key))
            return sums[-1]

        try:
            sizes = _sizes(self, state)
            method = self.build(plan_for(sizes, self.scale, self.rounds))
            view = View(federation, spy, federation.gather)
            after = method.round(state.base, view, key)
            sent = (point_of(one).x for one in reversed(sums))
            pull = None if self.plain else next((h for h in sent if h is not None), None)
            state = _judged(self, state, after, pull, sizes.x)
            if pull is None and not self.plain:  # x stays as it is, as with FedAvg
                return _kept(state)
            state = federation.when(
                state.shift.left > 0, partial(self.measure_pace, state, federation), state
            )
            over = (state.age >= state.length) | (state.t >= self.rounds)
            return federation.when(over, partial(self.end_window, state, federation, key), state)
        except TooFewReplies as error:
            if not error.exchange.mostly_oversized or state.halvings >= _MOST:
                raise
            return _back(self, state._replace(t=t))

    def measure_pace(self, state: AutoState, federation: Federation) -> AutoState:
        """Take one step of conjugate gradients; x begins to move after the last."""
        at = self.inner.point(state.best)
        shift = continue_shift(self.probes, federation, at, state.shift)
        return _started(self, state._replace(shift=shift), at.y)

    def end_window(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Check the upper loss, measure mu and L again, and set the pace of x."""
        points = [self.inner.point(base) for base in (state.base, state.best)]
        at, best = (z if z.v is not None else z._replace(v=trees.zeros_like(z.y)) for z in points)
        basis, rows = _basis(state.vectors, at.y)
        cohort, sampled = federation.cohort(key), 0
        if len(cohort.ids) < federation.n:
            draws = min(4, -(-_COMPARED // len(cohort.ids)))
            more = [federation.cohort(own) for own in jax.random.split(key, draws)[1:]]
            cohort, sampled = _joined([cohort, *more]), draws * len(cohort.ids)
        reply = federation.sum(self.probes.check, (at, best, rows), cohort, key)
        u = self.unit_step(state.window.pull)
        state, ready = _ended(self, state, basis, reply, cohort.weights, sampled)

        def begin() -> AutoState:
            most = self.products(state)
            shift = begin_shift(self.probes, federation, self.inner.point(state.best), u, key, most)
            return state._replace(shift=shift)

        return federation.when(ready, begin, state)

    # After the run

    def conclude(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Measure mu at the best point: the bounds on the errors need more than an estimate."""
        evidence = Evidence(*np.asarray(state.evidence).tolist())
        over, moved = int(state.t) >= self.rounds, float(state.pace[1]) > 0
        if not (over and moved and max(evidence.y, evidence.v) < 1):
            return state
        (x, y, _), most = self.point(state), most_probes(self.rounds)
        state = _measured(state, measure(self.probes, federation, x, y, key, most))
        mu = max(float(state.found[0]), 1e-30)
        y, v = (bound * evidence.mu / mu for bound in (evidence.y, evidence.v))
        return state._replace(evidence=_array(evidence._replace(y=y, v=v, mu=mu)))


def auto_steps(
    build: Build, problem: BilevelProblem, x0: PyTree, rounds: int, plain: bool = False
) -> Method:
    """Let a method choose its step sizes automatically.

    Args:
        build: (plan) -> the method with these steps, as
            `lambda plan: simfbo(problem, plan.local, plan.server)`, or, for a method with one set
            of steps, `lambda plan: fednest(problem, plan.plain)`.
        problem: the two losses.
        x0: the initial upper variable; the sizes of its leaves are those of x's steps.
        rounds: T, the rounds of the run.
        plain: whether the method takes `plan.plain`.

    Returns:
        The method. `run` measures mu before the first round, in up to 15 exchanges, or T/10 where
        that is more; where `plain`, in 30 on top. When x begins to move, up to sqrt(kappa)
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
            "step sizes of a personal lower level yourself."
        )
    start, scale = variable(x0, "x0"), pacing.size_of(variable(x0, "x0"))
    still = plan_for(Sizes(0.0, 0.0, 0.0, 0.0), scale, rounds)
    zero = not any(np.any(leaf) for leaf in jax.tree.leaves(start))
    return AutoSteps(build(still), problem, build, scale, zero, rounds, plain)


def plan_for(sizes: Sizes, scale: PyTree, rounds: int) -> Plan:
    """Return step sizes in the forms that methods take them."""
    eta, rules = sizes.gamma / math.sqrt(rounds), pacing.rules(scale, rounds)
    return Plan(Point(0.0, eta, eta), rules, Point(sizes.x, sizes.plain, sizes.plain))


def most_probes(rounds: int) -> int:
    """Return the most exchanges that measure mu and L in a run."""
    return max(_FEWEST, rounds // 10)


def _array(values: Any) -> jax.Array:
    return trees.on_device(np.asarray(values, float))


def _measured(state: AutoState, found: Curvature) -> AutoState:
    return state._replace(found=_array(found[:4]), vectors=_array(found.vectors))


# The server's arithmetic, compiled


_sizes = jax.jit(AutoSteps.sizes)


@jax.jit
def _first_window(method: AutoSteps, state: AutoState) -> tuple[AutoState, Sizes]:
    """Set the length of windows and the steps of y and v; x waits."""
    length, sizes = pacing.length_of(state.curvature.rate, method.rounds), method.sizes(state)
    base = pacing.with_rates(
        state.base, jnp.zeros(()), sizes.gamma, sizes.momentum, jnp.zeros((), jnp.int32)
    )
    return state._replace(length=length, base=base, best=base), sizes


@partial(jax.jit, static_argnums=0)
def _followed(rule: Any, d_y: PyTree, d_v: PyTree, rest: Any, y: PyTree, v: PyTree) -> Any:
    """Move y and v by a rule; return them and its states."""
    step_y, of_y = rule.update(d_y, rest[0])
    step_v, of_v = rule.update(d_v, rest[1])
    return optax.apply_updates(y, step_y), optax.apply_updates(v, step_v), (of_y, of_v)


@jax.jit
def _largest_pace(method: AutoSteps, state: AutoState, shift: Shift, y: PyTree) -> jax.Array:
    """Return the pace that moves y*(x) by its own length while y and v settle."""
    size, moved = (jnp.sqrt(trees.squared_norm(z)).astype(float) for z in (y, shift.z))
    known = (size > 0) & (moved > 0)
    reach = jnp.where(known, size / jnp.where(moved > 0, moved, 1.0), 1.0)
    if not method.starts_at_zero:
        reach = jnp.minimum(reach, 1.0)  # no step is larger than the initial x; zero has no size
    return jnp.minimum(state.curvature.rate, 3 / math.sqrt(method.rounds)) * reach


@jax.jit
def _started(method: AutoSteps, state: AutoState, y: PyTree) -> AutoState:
    """Let x move once it is known how far y*(x) moves with it, at the beginning of a window."""
    most = _largest_pace(method, state, state.shift, y)
    pace, sizes = most * jnp.asarray([_START, 1.0, _START]), method.sizes(state)
    base = pacing.with_rates(state.base, pace[0], sizes.gamma, sizes.momentum, state.t)
    window = pacing.emptied(state.window, method.lower(base))
    moving = state._replace(base=base, pace=pace, window=window, age=jnp.zeros_like(state.age))
    return _select(state.shift.left > 0, state, moving)


@jax.jit
def _judged(
    method: AutoSteps, state: AutoState, after: PyTree, pull: PyTree | None, step: Any
) -> AutoState:
    """Return the state after a round of the method, or the best one where it moved too far.

    y gathers momentum, and v follows it: their changes may grow like t^2, but not exponentially.
    """
    state = state._replace(t=state.t + 1)
    before, now, best = (method.inner.point(base) for base in (state.base, after, state.best))

    def lengths(at: Point[PyTree]) -> jax.Array:
        return jnp.sqrt(jnp.stack([trees.squared_norm(z).astype(float) for z in (at.y, at.v)]))

    change = lengths(trees.subtract(now, before))
    first = jnp.where(state.first > 0, state.first, change)
    limit = jnp.maximum(_LIMIT * jnp.asarray(state.t, float) ** 2 * first, lengths(best))
    sound = jnp.all(jnp.isfinite(change) & (change <= limit))
    sound &= jnp.isfinite(trees.squared_norm(now.x))
    if method.plain:  # by how much x moved, per size of a step
        times = jnp.where(step > 0, 1 / jnp.where(step > 0, step, 1.0), 0.0)
        pull = trees.scale(times, trees.subtract(before.x, now.x))
    window = state.window if pull is None else pacing.add_pull(state.window, pull)
    good = state._replace(base=after, window=window, first=first, age=state.age + 1)
    return _select(sound | (state.halvings >= _MOST), good, _back(method, state))


@jax.jit
def _back(method: AutoSteps, state: AutoState) -> AutoState:
    """Restore the best state and halve all step sizes."""
    state = state._replace(
        pace=state.pace / 2,
        window=pacing.emptied(state.window, method.lower(state.best)),
        age=jnp.zeros_like(state.age),
        halvings=state.halvings + 1,
    )
    sizes = method.sizes(state)
    base = pacing.with_rates(state.best, state.pace[0], sizes.gamma, sizes.momentum, state.t)
    return state._replace(base=base)


@jax.jit
def _kept(state: AutoState) -> AutoState:
    """End a window of a method that does not move x: every state is the best."""
    over = state.age >= state.length
    return _select(over, state._replace(best=state.base, age=jnp.zeros_like(state.age)), state)


@jax.jit
def _basis(vectors: jax.Array, y: PyTree) -> tuple[jax.Array, PyTree]:
    """Return an orthonormal basis, and the same as rows like y."""
    basis = orthonormal(vectors)
    return basis, jax.vmap(partial(shaped, like=y))(basis)


@jax.jit
def _joined(cohorts: list[Cohort]) -> Cohort:
    """Join cohorts; a client in several of them counts once, with the sum of its weights."""
    ids = jnp.concatenate([jnp.asarray(cohort.ids) for cohort in cohorts])
    order = jnp.argsort(ids)
    weights = jnp.concatenate([jnp.asarray(cohort.weights) for cohort in cohorts])[order]
    ids, same = ids[order], ids[order][:, None] == ids[order]
    first = jnp.append(True, ids[1:] != ids[:-1])
    return Cohort(ids, jnp.where(first, same.astype(weights.dtype) @ weights, 0) / len(cohorts))


@partial(jax.jit, static_argnums=5)
def _ended(
    method: AutoSteps,
    state: AutoState,
    basis: jax.Array,
    reply: Any,
    weights: Any,
    sampled: int,
) -> tuple[AutoState, jax.Array]:
    """End a window.

    Args:
        method: the method.
        state: at the end of the window.
        basis: the vectors that clients multiplied with their Hessians.
        reply: the sum of `check` over a cohort.
        weights: of the cohort, which sum to one only in expectation.
        sampled: how many clients were sampled; 0 for all.

    Returns:
        The state, and whether x may begin to move.
    """
    mean = trees.scale(1 / jnp.sum(jnp.asarray(weights)), reply)
    (h, numbers), d_y, (d_v, images) = mean
    value, change, square, correction = numbers.astype(float)
    old, at = state.curvature, method.inner.point(state.base)
    found = refresh(old, basis, flat_rows(images))
    mu, noisy = jnp.maximum(found.mu, 1e-30), found.noisy > 0

    def norm(tree: PyTree) -> jax.Array:
        return jnp.sqrt(trees.squared_norm(tree)).astype(float)

    # The upper loss, how uncertain it is, and bounds on the errors of y and v.
    r_y, r_v = norm(d_y), norm(d_v)
    unsolved = jnp.where(noisy, 0.1, 1.0) * r_y * r_v / mu  # most of noisy residuals is noise
    doubt = jnp.abs(correction) + unsolved
    doubt += _ROUNDING * jnp.finfo(doubt.dtype).eps * jnp.abs(value)
    if sampled:
        spread = jnp.maximum(square - change**2, 0.0)
        doubt += _DEVIATIONS * jnp.sqrt(spread / max(1, sampled - 1))
    error_y = r_y / (mu * norm(at.y))
    error_v = jnp.zeros(()) if at.v is None else r_v / (mu * norm(at.v))
    error_y, error_v = (jnp.where(jnp.isnan(e), jnp.inf, e) for e in (error_y, error_v))

    # Which point is the best, and how fast x moves on.
    evidence, (pace, most, resumed) = Evidence(*state.evidence), state.pace
    over, late = state.t >= method.rounds, state.t > int(_EARLY * method.rounds)
    settles = state.age.astype(float) * found.rate
    window, (lag, turn, noise) = pacing.closed(state.window, method.lower(state.base), settles)
    halve = noisy & (noise > _LOUD) & (state.halvings < _MOST)
    moving, small = jnp.where(pace > 0, pace, resumed), _SMALL * jnp.maximum(evidence.gain, 0.0)
    total = doubt + jnp.where(noisy, 0.0, evidence.doubt)
    best_x, growth = method.inner.point(state.best).x, found.L / old.L
    same = [jnp.all(a == b) for a, b in zip(*map(jax.tree.leaves, (at.x, best_x)), strict=True)]
    certain = change < -total  # the loss has fallen; without noise compare the bounds from above
    lower = certain | ((change + doubt < evidence.doubt) & ~noisy)
    faster = ~late & (certain | ~noisy) & (growth < _STEADY)
    onward = jnp.where(pace > 0, pacing.next_pace(pace, most, lag, turn, faster), resumed)
    onward = jnp.where(growth > _LEAP, onward / 2, onward)
    precise = noisy | (jnp.abs(change) > total) | (total <= small) | (doubt <= evidence.doubt)
    waiting = (most == 0) | (evidence.mu == 0)  # x has not moved yet, or nothing was checked yet
    still = jnp.all(jnp.stack(same))  # y and v have come nearer to their solutions
    back = ~waiting & ~still & ((change > total + small) | (error_y > _LOST))
    onward = jnp.where(~back & precise, onward, 0.0)  # else x waits until y and v are solved better
    is_best = jnp.where(still, doubt <= evidence.doubt, ~back & precise & lower) | waiting
    pace = jnp.where(waiting, pace, jnp.where(still, resumed, onward))
    moving = jnp.where(back, moving / 3, moving)
    clear = jnp.where(noisy, ~halve, doubt <= _CLEAR * jnp.abs(value))
    ready = (most == 0) & clear & ~over & (window.power_before > 0)
    ready &= pacing.may_start(window, lag) & (state.shift.left == 0)

    gain = jnp.where((state.pace[1] > 0) & (evidence.mu > 0), evidence.gain - change, 0.0)
    known = ((most > 0) | ready) & (jnp.maximum(error_y, error_v) <= _KNOWN)
    first = jnp.where((evidence.first == 0) & known, norm(h), evidence.first)
    new = Evidence(error_y, error_v, norm(h), first, gain, evidence.late, doubt, found.mu)
    evidence = Evidence(*jnp.where(is_best, jnp.stack([*new]), state.evidence))
    evidence = evidence._replace(late=jnp.where(late, evidence.late, evidence.gain))

    best = _select(is_best, state.base, state.best)
    base = _select(back | over, best, state.base)
    window = _select(back | over, pacing.emptied(window, method.lower(best)), window)
    state = state._replace(
        found=jnp.stack([*found[:4]]),
        vectors=found.vectors,
        halvings=state.halvings + halve.astype(jnp.int32),
    )
    sizes = method.sizes(state)
    state = state._replace(
        base=pacing.with_rates(base, pace, sizes.gamma, sizes.momentum, state.t),
        best=best,
        window=window,
        pace=jnp.stack([pace, most, jnp.where(pace > 0, pace, moving)]),
        evidence=jnp.stack([*evidence]),
        age=jnp.zeros_like(state.age),
        length=pacing.length_of(found.rate, method.rounds),
    )
    return state, ready


def _select(condition: jax.Array, chosen: PyTree, other: PyTree) -> PyTree:
    return jax.lax.cond(condition, lambda: chosen, lambda: other)
