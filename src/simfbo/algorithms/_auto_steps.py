"""Automatic step sizes: any method, with steps measured through the federation.

The first iteration measures mu and L of the lower problem (`_curvature`), which determine the steps
(docs/explanation-steps.md). With T iterations, tau the mean of ||a_i||_1, kappa = L / mu:

    gamma_y = gamma_v = 1 / (L tau)     on the server, heavy-ball momentum (1 - 1/sqrt(kappa))^2;
    eta_y = eta_v = gamma / sqrt(T)     on the clients, which do not move x;
    gamma_x by Adam, at a pace          at which x never outruns y and v (`_pacing`).

x waits until y and v are near their solutions. The size of its first steps is measured then: a step
of size one would move y*(x) by its own length. No number has a unit, so scaling x, y, f or g
changes nothing but the scale of the result.

After every window of iterations one exchange (`check`) measures mu and L again and compares the
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

from simfbo.algorithms import _pacing
from simfbo.algorithms._curvature import (
    Curvature,
    Probes,
    measure,
    orthonormal,
    refresh,
    rows_like,
    rows_of,
    shift,
)
from simfbo.algorithms._pacing import Window
from simfbo.algorithms._plan import Plan, Sizes, plan_for, sizes_for
from simfbo.core import trees
from simfbo.core.federation import ClientStep, Federation, View
from simfbo.core.method import Hosted, Method, Wrapper, marked, require_unmodified_sums
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar, point_of
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
_EARLY = 0.75  # share of a run in which x may speed up; `Evidence.late` is the gain at its end
_LOST = 10.0  # relative error of y at which a state is given up
_KNOWN = 0.3  # relative errors of y and v at which d_x is taken for the hypergradient
_ROUNDING = 10  # rounding errors of the upper loss


Build = Callable[[Plan], Method]


class Evidence(NamedTuple):
    """What the last check found; a run's verdict is based on it.

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


class Check(NamedTuple):
    """The upper loss at the end of a window.

    Attributes:
        value: the upper loss, with y solved to first order.
        change: the upper loss less that of the best point, on the same clients.
        doubt: how uncertain the change is.
        growth: how many times as large L is as before.
        errors: the norm of the hypergradient, and bounds on the relative errors of y and v.
    """

    value: float
    change: float
    doubt: float
    growth: float
    errors: Point[float]


class AutoState(NamedTuple):
    """A method's state, what was measured, and the state to return to.

    Attributes:
        base: the method's own state.
        best: the state with the lowest upper loss so far, restored if the run deteriorates.
        found: mu, L, tau, and 1 where sums are noisy; zeros before the first iteration.
        vectors: approximate eigenvectors of the lower Hessian, where the next check starts.
        evidence: what the last check found, an `Evidence`.
        pull: ||grad Phi|| over sqrt(dim x), where steps are plain; else zero.
        pace: of x, zero while it waits; and the largest that it may have.
        window: what is known of how y, v and the hypergradient change.
        first: the sizes of the first change of y and v.
        t: iterations done.
        age: iterations since the beginning of the window.
        length: iterations of a window; zero before the first iteration.
        halvings: how often the steps were halved.
    """

    base: PyTree
    best: PyTree
    found: Any
    vectors: Any
    evidence: Any
    pull: Any
    pace: Any
    window: Window
    first: Any
    t: Any
    age: Any
    length: Any
    halvings: Any


class AutoSteps(Wrapper):
    """A method that chooses its step sizes automatically; see `auto_steps`.

    Attributes:
        problem: the two losses.
        build: (plan) -> the method with these steps.
        scale: the sizes of the leaves of x's steps.
        starts_at_zero: whether the initial x is zero.
        rounds: T, the iterations of the run.
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
        return AutoState(
            base, base, _host([0.0] * 4), _host(np.zeros((6, size))), _host([0.0] * 8), _host(0.0),
            _host([0.0] * 3), _pacing.opened(x, *_lower(self.inner, base)[1:]), _host([0.0] * 2),
            *(np.zeros((), np.int32) for _ in range(4)),
        )  # fmt: skip

    @property
    def probes(self) -> Probes:
        """Return the client steps that measure the problem."""
        return Probes(self.problem)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        return {**marked(self.probes), **self.inner.client_steps}

    @property
    def hosted(self) -> Hosted:
        """Return what runs on the host, before and after the iterations of a window."""
        return Hosted(self.ahead, self.prepare, self.iterate, self.paced)

    @property
    def rules(self) -> Point[Any]:
        """Return the server's rules."""
        return _pacing.rules(self.scale, self.rounds)

    def sizes(self, state: AutoState) -> Sizes:
        """Return the step sizes that a state stands for."""
        typical = float(np.mean(jax.tree.leaves(self.scale)))
        return sizes_for(state.found, state.pull, state.pace, state.halvings, typical)

    def method(self, found: Sizes) -> Method:
        """Return the method with these step sizes."""
        return self.build(plan_for(found, self.rules, self.rounds))

    def evidence(self, state: AutoState) -> dict[str, float] | None:
        """Return what the last check found, by name; None before the first."""
        values = np.asarray(state.evidence).tolist()
        return Evidence(*values)._asdict() if any(values) else None

    def ahead(self, state: AutoState) -> int:
        """Return how many iterations may follow before the end of the window."""
        return min(int(state.length) - int(state.age), self.rounds - int(state.t))

    def iterate(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Run an iteration of the method, and judge it: all that needs no host."""
        view, sums = _watched(federation)
        found = self.sizes(state)
        after = self.method(found).round(state.base, view, key)
        if self.plain:
            pull = _per_step(self.point(state).x, self.inner.point(after).x, found.x)
        else:
            sent = (point_of(one).x for one in reversed(sums))
            pull = next((h for h in sent if h is not None), None)
        return _judged(self.inner, state, after, pull)

    def round(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Run an iteration, with what it needs of the host before and after it."""
        state = self.prepare(state, federation, key)
        try:
            state = self.iterate(state, federation, key)
        except TooFewReplies as error:
            if not error.exchange.mostly_oversized or state.halvings >= _MOST:
                raise
            return _back(self.inner, state._replace(t=state.t + 1))
        return state if self.ahead(state) > 0 else self.paced(state, federation, key)

    def prepare(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Measure mu and L before the first iteration."""
        return state if state.length else self.look(state, federation, key)

    def paced(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """End a window, or go back to the best point where its exchanges overflow."""
        if not self.plain and not float(state.window.power):  # x stays as it is, as with FedAvg
            return state._replace(best=state.base, age=np.zeros((), np.int32))
        try:
            return self.ended(state, federation, key)
        except TooFewReplies as error:
            if not error.exchange.mostly_oversized or state.halvings >= _MOST:
                raise
            return _back(self.inner, state)

    def ended(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """End a window: check the upper loss, measure mu and L again, set the pace of x."""
        state, seen = self.checked(state, federation, key)
        length = int(state.age)
        pace, most, resumed = np.asarray(state.pace).tolist()
        evidence = Evidence(*np.asarray(state.evidence).tolist())
        base, best, over = state.base, state.best, int(state.t) >= self.rounds
        window, found = _pacing.closed(
            state.window, _lower(self.inner, base), length * _curvature_of(state).rate
        )
        window = window._replace(index=np.asarray(window.index))
        lag, turn, noise = np.asarray(found).tolist()
        noisy = float(state.found[3]) > 0
        halve = noisy and noise > _LOUD and int(state.halvings) < _MOST
        moving, small = pace or resumed, _SMALL * max(evidence.gain, 0.0)
        total = seen.doubt + (0.0 if noisy else evidence.doubt)
        if not most or not evidence.mu:  # x has not moved yet, or nothing was checked yet
            best = base
            ready = not halve if noisy else seen.doubt <= _CLEAR * abs(seen.value)
            ready &= not most and not over and float(window.power_before) > 0
            if ready and _pacing.may_start(window, lag):
                state = self.measured(state, federation, key)
                most = self.largest_pace(state, window.pull_before, federation, key)
                pace = _START * most
        elif _equal(self.inner.point(base).x, self.inner.point(best).x):
            # y and v have come nearer to their solutions.
            best, pace = base if seen.doubt <= evidence.doubt else best, resumed
        elif seen.change > total + small or seen.errors.y > _LOST:
            # Worse, or y has exploded: return, and let y and v settle there.
            pace, base, moving = 0.0, best, moving / 3
        elif (
            noisy
            or abs(seen.change) > total
            or total <= small  # precise enough: no such change matters
            or seen.doubt <= evidence.doubt  # no less precise than at the best point
        ):
            certain = seen.change < -total
            lower = seen.change + seen.doubt < evidence.doubt  # the bounds from above
            best = base if certain or (lower and not noisy) else best
            early = int(state.t) < _EARLY * self.rounds and (certain or not noisy)
            early &= seen.growth < _STEADY
            pace = _pacing.next_pace(pace, most, lag, turn, early) if pace else resumed
            pace = pace / 2 if seen.growth > _LEAP else pace
        else:  # uncertain: wait for y and v
            pace = 0.0
        base = best if over else base
        if base is not state.base:
            window = _pacing.emptied(window, _lower(self.inner, best))
        if best is state.base:
            h, y, v = seen.errors
            gain = evidence.gain - seen.change if float(state.pace[1]) and evidence.mu else 0.0
            evidence = Evidence(
                y, v, h, evidence.first, gain, evidence.late, seen.doubt, float(state.found[0])
            )
        if over and most and max(evidence.y, evidence.v) < 1:
            # mu was followed along the way; the bounds on the errors need it exactly.
            state = self.measured(state._replace(base=best), federation, key)
            mu = max(float(state.found[0]), 1e-30)
            y, v = (bound * evidence.mu / mu for bound in (evidence.y, evidence.v))
            evidence = evidence._replace(y=y, v=v, mu=mu)
        known = most > 0 and max(seen.errors.y, seen.errors.v) <= _KNOWN
        if not evidence.first and known and best is state.base:
            evidence = evidence._replace(first=seen.errors.x)
        if int(state.t) <= _EARLY * self.rounds:
            evidence = evidence._replace(late=evidence.gain)
        if halve:
            state = state._replace(halvings=np.asarray(int(state.halvings) + 1, np.int32))
        own = self.sizes(state)
        return state._replace(
            base=_pacing.with_rates(base, pace, own.gamma, own.momentum, int(state.t)),
            best=best,
            window=window,
            pace=_host([pace, most, pace or moving]),
            evidence=_host(evidence),
            age=np.zeros((), np.int32),
            length=np.asarray(_pacing.length_of(_curvature_of(state).rate, self.rounds), np.int32),
        )

    def checked(
        self, state: AutoState, federation: Federation, key: jax.Array
    ) -> tuple[AutoState, Check]:
        """Measure mu and L again, the errors of y and v, and the change of the upper loss."""
        points = [self.inner.point(base) for base in (state.base, state.best)]
        at, best = (z if z.v is not None else z._replace(v=trees.zeros_like(z.y)) for z in points)
        old = _curvature_of(state)
        basis = orthonormal(old.vectors)
        rows, keys = rows_like(basis, at.y), jax.random.split(key, 4)
        replies: list[PyTree] = []
        count, sampled = 0, True
        for one in keys:
            cohort = federation.cohort(one)
            reply = federation.sum(self.probes.check, (at, best, rows), cohort, one)
            replies.append(trees.scale(1 / cohort.weights.sum(), reply))
            count, sampled = count + len(cohort.ids), len(cohort.ids) < federation.n
            if count >= 8 or not sampled:
                break
        mean = jax.tree.map(lambda *parts: np.mean(np.stack(parts), 0, float), *replies)
        (h, numbers), d_y, (d_v, images) = mean
        value, change, square, correction = numbers.tolist()
        new = refresh(old, basis, rows_of(images))
        residuals = [trees.host_norm(part) for part in (d_y, d_v)]
        mu = max(new.mu, 1e-30)
        doubt = abs(correction) + _ROUNDING * float(jnp.finfo(jnp.result_type(float)).eps) * abs(
            value
        )
        unsolved = residuals[0] * residuals[1] / mu
        if new.noisy:
            spread = max(square - change**2, 0.0) if sampled else 0.0
            doubt += 0.1 * unsolved  # most of the residuals is noise
            doubt += _DEVIATIONS * math.sqrt(spread / max(1, count - 1))
        else:
            doubt += unsolved
        bounds = [
            r / (mu * trees.host_norm(z)) if trees.host_norm(z) else math.inf
            for r, z in zip(residuals, (at.y, at.v), strict=True)
        ]
        if points[0].v is None:
            bounds[1] = 0.0  # nothing to solve for
        state = state._replace(found=_host(new[:4]), vectors=_host(new.vectors))
        errors = Point(trees.host_norm(h), *bounds)
        return state, Check(value, change, doubt, new.L / old.L, errors)

    def largest_pace(
        self, state: AutoState, pull: PyTree, federation: Federation, key: jax.Array
    ) -> float:
        """Return the pace that moves y*(x) by its own length while y and v settle."""
        rate = _curvature_of(state).rate
        most = max(3, int(min(1 / rate, self.rounds / 20)))
        u = jax.tree.map(lambda s, h: np.asarray(s * np.sign(h), h.dtype), self.scale, pull)
        x, y, _ = self.point(state)
        moved = shift(self.probes, federation, x, y, u, key, most)
        size = trees.host_norm(y)
        reach = size / moved if moved and size else 1.0
        if not self.starts_at_zero:
            reach = min(reach, 1.0)  # no step is larger than the initial x; zero has no size
        return min(rate, 3 / math.sqrt(self.rounds)) * reach

    def measured(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Measure mu and L."""
        (x, y, _), most = self.point(state), most_probes(self.rounds)
        found = measure(self.probes.curvature, federation, x, y, key, most)
        return state._replace(found=_host(found[:4]), vectors=_host(found.vectors))

    def look(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Measure mu and L and, with plain steps, the hypergradient; begin the first window."""
        state = self.measured(state, federation, key)
        length = _pacing.length_of(_curvature_of(state).rate, self.rounds)
        state = state._replace(length=np.asarray(length, np.int32))
        own = self.sizes(state)
        base = _pacing.with_rates(state.base, 0.0, own.gamma, own.momentum, 0)
        state = state._replace(base=base, best=base)
        if not self.plain:
            return state
        pull, y = self._pull(federation, state, own, key)
        count = sum(leaf.size for leaf in jax.tree.leaves(pull))
        size = trees.host_norm(pull) / math.sqrt(count)
        settled = state._replace(base=state.base._replace(y=y))
        most = self.largest_pace(settled, pull, federation, key) if size else 0.0
        return state._replace(pull=_host(size), pace=_host([_START * most, most, 0.0]))

    def _pull(
        self, federation: Federation, state: AutoState, sizes: Sizes, key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Return the hypergradient and y, once y and v have come nearer to their solutions."""
        (x, y, _), rule = self.point(state), self.rules.y
        y = jax.tree.map(jnp.asarray, y)
        v, cohort, d = trees.zeros_like(y), federation.cohort(key), Point(x=trees.zeros_like(x))
        rest = (rule.init(y), rule.init(v))
        rest = _pacing.with_rates(rest, 0.0, sizes.gamma, sizes.momentum, 0)
        for _ in range(_TRIES):
            d = federation.sum(self.probes.hypergradient_size, Point(x, y, v), cohort, key)
            y, v, rest = _followed(rule, d.y, d.v, rest, y, v)
        return trees.scale(1 / float(state.found[2]), d.x), y


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
        rounds: T, the iterations of the run.
        plain: whether the method takes `plan.plain`.

    Returns:
        The method. Its first iteration takes up to 15 exchanges more, or T/10 where that is
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
            "step sizes of a personal lower level yourself."
        )
    start, scale = variable(x0, "x0"), _pacing.size_of(variable(x0, "x0"))
    still = plan_for(Sizes(0.0, 0.0, 0.0, 0.0), _pacing.rules(scale, rounds), rounds)
    zero = not any(np.any(leaf) for leaf in jax.tree.leaves(start))
    return AutoSteps(build(still), problem, build, scale, zero, rounds, plain)


def most_probes(rounds: int) -> int:
    """Return the most exchanges that measure mu and L in a run."""
    return max(_FEWEST, rounds // 10)


@partial(jax.jit, static_argnums=0)
def _followed(rule: Any, d_y: PyTree, d_v: PyTree, rest: Any, y: PyTree, v: PyTree) -> Any:
    """Move y and v by a rule; return them and its states."""
    step_y, of_y = rule.update(d_y, rest[0])
    step_v, of_v = rule.update(d_v, rest[1])
    return optax.apply_updates(y, step_y), optax.apply_updates(v, step_v), (of_y, of_v)


def _watched(federation: Federation) -> tuple[View, list[PyTree]]:
    """Return the federation, and a list to which every sum over its clients is added."""
    sums: list[PyTree] = []

    def spy(client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array) -> PyTree:
        sums.append(federation.sum(client_step, payload, cohort, key))
        return sums[-1]

    return View(federation, spy, federation.gather), sums


@jax.jit
def _per_step(before: PyTree, after: PyTree, step: Any) -> PyTree:
    """Return by how much x moved, per size of a step; zero where that is zero."""
    times = jnp.where(step > 0, 1 / jnp.where(step > 0, step, 1.0), 0.0)
    return trees.scale(times, trees.subtract(before, after))


@jax.jit
def _judged(method: Method, state: AutoState, after: PyTree, pull: PyTree | None) -> AutoState:
    """Return the state after an iteration, or the last good one where it moved too far.

    y gathers momentum, and v follows it: their changes may grow like t^2, but not exponentially.
    """
    one = jnp.ones((), state.t.dtype)
    state = state._replace(t=state.t + one)
    most = _LIMIT * jnp.asarray(state.t, float) ** 2
    x, *lower = method.point(after)
    first, window, sound = _looked_at(method, state, Point(None, *lower), x, pull, most)
    good = state._replace(base=after, window=window, first=first, age=state.age + one)
    use = sound | (state.halvings >= _MOST)
    return jax.tree.map(lambda a, b: jnp.where(use, a, b), good, _back(method, state))


def _back(method: Method, state: AutoState) -> AutoState:
    """Restore the best state and halve all step sizes."""
    halved = state._replace(
        pace=state.pace / 2,
        window=_pacing.emptied(state.window, _lower(method, state.best)),
        age=state.age * 0,
        halvings=state.halvings + jnp.ones((), state.halvings.dtype),
    )
    own = sizes_for(halved.found, halved.pull, halved.pace, halved.halvings, 1.0)
    return halved._replace(
        base=_pacing.with_rates(state.best, halved.pace[0], own.gamma, own.momentum, state.t)
    )


def _looked_at(
    method: Method,
    state: AutoState,
    after: Point[PyTree],
    x: PyTree,
    pull: PyTree | None,
    most: Scalar,
) -> tuple[jax.Array, Window, jax.Array]:
    """Return the first change, the window with one more hypergradient, and whether all is well."""

    def lengths(at: Point[PyTree]) -> jax.Array:
        return jnp.sqrt(jnp.stack([trees.squared_norm(z).astype(float) for z in (at.y, at.v)]))

    change = lengths(trees.subtract(after, _lower(method, state.base)))
    size = lengths(_lower(method, state.best))
    first = jnp.where(state.first > 0, state.first, change)
    limit = jnp.maximum(most * first, size)
    sound = jnp.all(jnp.isfinite(change) & (change <= limit))
    sound &= jnp.isfinite(trees.squared_norm(x))
    window = state.window if pull is None else _pacing.add_pull(state.window, pull)
    return first, window, sound


def _lower(method: Method, state: PyTree) -> Point[PyTree]:
    """Return y and v of a method's state; None for one that it does not have."""
    return method.point(state)._replace(x=None)


def _equal(a: PyTree, b: PyTree) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def _curvature_of(state: AutoState) -> Curvature:
    mu, L, work, noisy = np.asarray(state.found).tolist()
    return Curvature(mu, L, work, noisy, np.asarray(state.vectors, float))


def _host(value: Any) -> np.ndarray:
    """Return numbers as an array that is read without waiting for a device."""
    return np.asarray(value, jnp.result_type(float))
