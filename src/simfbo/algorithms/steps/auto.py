"""Automatic step sizes for any method, measured through the federation.

Before the first round mu and L of the lower problem are measured (`curvature`), which determine the
steps (docs/explanation-steps.md). With T rounds, tau the mean of ||a_i||_1, kappa = L / mu:

    gamma_y = gamma_v = 1 / (L tau)     on the server, heavy-ball momentum (1 - 1/sqrt(kappa))^2;
    eta_y = eta_v = gamma / sqrt(T)     on the clients, eta_x = 0;
    gamma_x by Adam, at a pace          limited by the convergence of y and v (`pacing`).

x waits until y and v are near their solutions. Then the size of its first steps is measured: a step
of size one would change y*(x) by its own length. All constants are dimensionless, so that the
method is invariant to the scales of x, y, f and g.

At the end of every window of rounds, one exchange (`check`) measures mu and L again and compares
the upper loss with that of the best point so far, on the same clients. If it has increased by more
than its uncertainty, the best point is restored and x continues more slowly. If the run diverges
within a window, the best point is restored too, and all step sizes are halved.
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

_START = 0.25  # the first pace of x, relative to its maximum
_FEWEST = 15  # exchanges for measuring mu and L; more in longer runs
_TRIES = 30  # exchanges for the size of the hypergradient
_LIMIT = 100.0  # bound on the t-th change of y or v, relative to t^2 times the first one
_MOST = 30  # halvings
_STEADY, _LEAP = (
    1.4,
    2.0,
)  # growth of L over a window: below, x may accelerate; above, it slows down
_SMALL = 0.01  # tolerated change of the upper loss, relative to the gain
_CLEAR = 1e-2  # relative uncertainty of the upper loss at which x starts
_LOUD = 0.5  # relative noise of y or v at which steps are halved
_DEVIATIONS = 6.0  # standard errors at which a change of the upper loss is significant
_COMPARED = 8  # minimum number of clients in a check, sampled in up to four cohorts
_EARLY = 0.75  # share of a run in which x may accelerate; `Evidence.late` is the gain at its end
_LOST = 10.0  # relative error of y at which the best point is restored
_KNOWN = 0.3  # relative errors of y and v at which d_x approximates the hypergradient
_ROUNDING = 10  # rounding errors of the upper loss


class Plan(NamedTuple):
    """Step sizes for the different arguments of methods.

    Attributes:
        local: eta, for methods with step sizes of clients and server.
        server: gamma, for the same methods.
        plain: for methods with a single set of step sizes.
    """

    local: Point[float]
    server: Point[Rule]
    plain: Point[float]


Build = Callable[[Plan], Method]


class FromPlan(NamedTuple):
    """Builds a method from the step sizes of a plan; equal instances share compiled programs.

    Attributes:
        factory: (problem, local, server) -> the method.
        problem: the two losses.
    """

    factory: Callable[..., Method]
    problem: BilevelProblem

    def __call__(self, plan: Plan) -> Method:
        """Build the method with the steps of a plan."""
        return self.factory(self.problem, plan.local, plan.server)


class Sizes(NamedTuple):
    """Step sizes: of y and v on the server with their momentum, and those of plain methods."""

    gamma: Any
    momentum: Any
    plain: Any
    x: Any


class Evidence(NamedTuple):
    """The measurements at the best point, for the verdict on convergence.

    Attributes:
        y: bound on the relative error of y, ||grad_y G|| / (mu ||y||).
        v: bound on the relative error of v.
        hypergradient: its norm.
        first: its norm at the first best point after x has started, if known.
        gain: the decrease of the upper loss of the best point since then.
        late: the gain at three quarters of the run.
        doubt: the uncertainty of the upper loss of the best point.
        mu: the smallest eigenvalue in the bounds on y and v.
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
    """The state of the wrapped method, the measurements, and the best state so far.

    Attributes:
        base: the state of the wrapped method.
        best: the state with the lowest upper loss so far, restored if the run deteriorates.
        found: mu, L, tau, and 1 if sums are noisy; zeros before the measurement.
        vectors: approximate eigenvectors of the lower Hessian for the next check.
        evidence: of the last check, an `Evidence`.
        pull: ||grad Phi|| / sqrt(dim x) with plain steps, otherwise zero.
        pace: of x, zero while it waits; its maximum; and the pace to resume.
        window: the changes of y, v and the hypergradient.
        shift: the measurement of the change of y*(x), for the maximum pace of x.
        first: the norms of the first changes of y and v.
        t: completed rounds.
        age: rounds since the beginning of the window.
        length: rounds of a window.
        halvings: the number of times that steps were halved.
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
        """The last measurement of mu and L."""
        mu, L, work, noisy = self.found
        return Curvature(mu, L, work, noisy, self.vectors)


class AutoSteps(Wrapper):
    """A method with automatic step sizes; see `auto_steps`.

    Attributes:
        problem: the two losses.
        build: (plan) -> the method with these steps.
        scale: the sizes of x's steps by leaf.
        starts_at_zero: the initial x is zero.
        rounds: T, the rounds of the run.
        plain: the method has a single set of step sizes, `plan.plain`.
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
        counts = {name: np.zeros((), np.int32) for name in ("t", "age", "length", "halvings")}
        return AutoState(
            base=base,
            best=base,
            found=zeros[4],
            vectors=np.zeros((VECTORS, size), jnp.result_type(float)),
            evidence=zeros[8],
            pull=zeros[()],
            pace=zeros[3],
            window=pacing.opened(x, *self.lower(base)[1:]),
            shift=no_shift(y),
            first=zeros[2],
            **counts,
        )

    @property
    def probes(self) -> Probes:
        """The client steps of measurements."""
        return Probes(self.problem)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        return {**marked(self.probes), **self.inner.client_steps}

    def evidence(self, state: AutoState) -> dict[str, float] | None:
        values = np.asarray(state.evidence).tolist()
        return Evidence(*values)._asdict() if any(values) else None

    def sizes(self, state: AutoState) -> Sizes:
        """Compute the step sizes of a state."""
        curvature, factor = state.curvature, 0.5 ** state.halvings.astype(state.found.dtype)
        L = jnp.where(curvature.L > 0, curvature.L, 1.0)  # zero before the measurement
        work = jnp.where(curvature.work > 0, curvature.work, 1.0)
        length = state.pace[0] * float(np.mean(jax.tree.leaves(self.scale)))
        x = jnp.where(state.pull > 0, length / jnp.where(state.pull > 0, state.pull, 1.0), 0.0)
        return Sizes(factor / (L * work), (1 - curvature.rate) ** 2, factor / L, x)

    def lower(self, base: PyTree) -> Point[PyTree]:
        """Return y and v of the method's state, or None."""
        return self.inner.point(base)._replace(x=None)

    # Before the run

    def prepare(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Measure mu and L and, for plain steps, the hypergradient and the maximum pace of x."""
        x, y, _ = self.point(state)
        most = most_probes(self.rounds)
        state = _measured(state, measure(self.probes, federation, x, y, key, most))
        state, sizes = _first_window(self, state)
        if not self.plain:
            return state
        rule, y = pacing.following(self.rounds), jax.tree.map(jnp.asarray, y)
        v, cohort = trees.host_zeros(y), federation.cohort(key)
        rules = rule.init(y), rule.init(v)
        rules = pacing.with_rates(rules, 0.0, sizes.gamma, sizes.momentum, 0)
        d = Point(x=trees.host_zeros(trees.on_device(x)))
        for _ in range(_TRIES):
            at = Point(x, y, v)
            d = federation.sum(self.probes.hypergradient_size, at, cohort, key)
            y, v, rules = _followed(rule, d.y, d.v, rules, y, v)
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
        """Return the step of size one along a hypergradient."""
        return jax.tree.map(lambda s, h: jnp.asarray(s, h.dtype) * jnp.sign(h), self.scale, pull)

    def products(self, state: AutoState) -> jax.Array:
        """Return the maximum number of products for the change of y*(x): half a window."""
        most = jnp.minimum(1 / state.curvature.rate, self.rounds / 20)
        return jnp.maximum(3, most).astype(jnp.int32)

    # The rounds

    def round(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Run a round of the method, and end the window after its last round."""
        sums: list[PyTree] = []
        t = state.t + 1

        def recorded_sum(
            step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
        ) -> PyTree:
            sums.append(federation.sum(step, payload, cohort, key))
            return sums[-1]

        try:
            sizes = _sizes(self, state)
            method = self.build(plan_for(sizes, self.scale, self.rounds))
            view = View(federation, recorded_sum, federation.gather)
            after = method.round(state.base, view, key)
            directions_x = (point_of(message).x for message in reversed(sums))
            pull = None if self.plain else next((h for h in directions_x if h is not None), None)
            state = _after_round(self, state, after, pull, sizes.x)
            if pull is None and not self.plain:  # x is fixed, as in FedAvg
                return _with_fixed_x(state)
            state = federation.when(
                state.shift.left > 0, partial(self.measure_pace, state, federation), state
            )
            over = (state.age >= state.length) | (state.t >= self.rounds)
            return federation.when(over, partial(self.end_window, state, federation, key), state)
        except TooFewReplies as error:
            if not error.exchange.mostly_oversized or state.halvings >= _MOST:
                raise
            return _restored(self, state._replace(t=t))

    def measure_pace(self, state: AutoState, federation: Federation) -> AutoState:
        """Take one step of conjugate gradients; x starts after the last one."""
        at = self.inner.point(state.best)
        shift = continue_shift(self.probes, federation, at, state.shift)
        return _started(self, state._replace(shift=shift), at.y)

    def end_window(self, state: AutoState, federation: Federation, key: jax.Array) -> AutoState:
        """Check the upper loss, update mu and L, and set the pace of x."""
        points = [self.inner.point(base) for base in (state.base, state.best)]
        at, best = (z if z.v is not None else z._replace(v=trees.zeros_like(z.y)) for z in points)
        basis, rows = _basis(state.vectors, at.y)
        cohort, sampled = federation.cohort(key), 0
        if len(cohort.ids) < federation.n:
            draws = min(4, -(-_COMPARED // len(cohort.ids)))
            further = [federation.cohort(key) for key in jax.random.split(key, draws)[1:]]
            cohort, sampled = _joined([cohort, *further]), draws * len(cohort.ids)
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
        """Measure mu at the best point, since the bounds on the errors need an accurate mu."""
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
    """Use automatic step sizes in a method.

    Args:
        build: (plan) -> the method with these steps, as
            `lambda plan: simfbo(problem, plan.local, plan.server)`, or, for a method with one set
            of steps, `lambda plan: fednest(problem, plan.plain)`.
        problem: the two losses.
        x0: the initial upper variable; its scale determines that of x's steps.
        rounds: T, the rounds of the run.
        plain: the method has a single set of step sizes, `plan.plain`.

    Returns:
        The method. `run` measures mu and L before the first round, in up to 15 exchanges, or T/10
        if that is more; with `plain`, in 30 further ones. When x starts, up to sqrt(kappa)
        exchanges measure the change of y*(x).

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
    initial = plan_for(Sizes(0.0, 0.0, 0.0, 0.0), scale, rounds)
    zero = not any(np.any(leaf) for leaf in jax.tree.leaves(start))
    return AutoSteps(build(initial), problem, build, scale, zero, rounds, plain)


def plan_for(sizes: Sizes, scale: PyTree, rounds: int) -> Plan:
    """Convert step sizes to a plan."""
    eta, rules = sizes.gamma / math.sqrt(rounds), pacing.rules(scale, rounds)
    return Plan(Point(0.0, eta, eta), rules, Point(sizes.x, sizes.plain, sizes.plain))


def most_probes(rounds: int) -> int:
    """Return the maximum number of exchanges for mu and L."""
    return max(_FEWEST, rounds // 10)


def _array(values: Any) -> jax.Array:
    return trees.on_device(np.asarray(values, float))


def _measured(state: AutoState, curvature: Curvature) -> AutoState:
    return state._replace(found=_array(curvature[:4]), vectors=_array(curvature.vectors))


# The server's arithmetic, compiled


_sizes = jax.jit(AutoSteps.sizes)


@jax.jit
def _first_window(method: AutoSteps, state: AutoState) -> tuple[AutoState, Sizes]:
    """Set the length of windows and the steps of y and v, with x waiting."""
    length, sizes = pacing.length_of(state.curvature.rate, method.rounds), method.sizes(state)
    base = pacing.with_rates(
        state.base, jnp.zeros(()), sizes.gamma, sizes.momentum, jnp.zeros((), jnp.int32)
    )
    return state._replace(length=length, base=base, best=base), sizes


@partial(jax.jit, static_argnums=0)
def _followed(rule: Any, d_y: PyTree, d_v: PyTree, states: Any, y: PyTree, v: PyTree) -> Any:
    """Update y and v by a rule; return them and the rule's states."""
    step_y, state_y = rule.update(d_y, states[0])
    step_v, state_v = rule.update(d_v, states[1])
    return optax.apply_updates(y, step_y), optax.apply_updates(v, step_v), (state_y, state_v)


@jax.jit
def _largest_pace(method: AutoSteps, state: AutoState, shift: Shift, y: PyTree) -> jax.Array:
    """Return the pace that changes y*(x) by its own length within the time constant of y and v."""
    size, change = (jnp.sqrt(trees.squared_norm(z)).astype(float) for z in (y, shift.z))
    is_known = (size > 0) & (change > 0)
    reach = jnp.where(is_known, size / jnp.where(change > 0, change, 1.0), 1.0)
    if not method.starts_at_zero:
        reach = jnp.minimum(reach, 1.0)  # limits steps to the size of a nonzero initial x
    return jnp.minimum(state.curvature.rate, 3 / math.sqrt(method.rounds)) * reach


@jax.jit
def _started(method: AutoSteps, state: AutoState, y: PyTree) -> AutoState:
    """Start x with a new window once the change of y*(x) has been measured."""
    most = _largest_pace(method, state, state.shift, y)
    pace, sizes = most * jnp.asarray([_START, 1.0, _START]), method.sizes(state)
    base = pacing.with_rates(state.base, pace[0], sizes.gamma, sizes.momentum, state.t)
    window = pacing.emptied(state.window, method.lower(base))
    moving = state._replace(base=base, pace=pace, window=window, age=jnp.zeros_like(state.age))
    return _select(state.shift.left > 0, state, moving)


@jax.jit
def _after_round(
    method: AutoSteps, state: AutoState, after: PyTree, pull: PyTree | None, step: Any
) -> AutoState:
    """Return the state after a round of the method, or the best one if the changes are too large.

    With momentum, the changes of y and v may grow like t^2, but not exponentially.
    """
    state = state._replace(t=state.t + 1)
    before, now, best = (method.inner.point(base) for base in (state.base, after, state.best))

    def lengths(at: Point[PyTree]) -> jax.Array:
        return jnp.sqrt(jnp.stack([trees.squared_norm(z).astype(float) for z in (at.y, at.v)]))

    change = lengths(trees.subtract(now, before))
    first = jnp.where(state.first > 0, state.first, change)
    limit = jnp.maximum(_LIMIT * jnp.asarray(state.t, float) ** 2 * first, lengths(best))
    is_valid = jnp.all(jnp.isfinite(change) & (change <= limit))
    is_valid &= jnp.isfinite(trees.squared_norm(now.x))
    if method.plain:  # the change of x, relative to the step size
        times = jnp.where(step > 0, 1 / jnp.where(step > 0, step, 1.0), 0.0)
        pull = trees.scale(times, trees.subtract(before.x, now.x))
    window = state.window if pull is None else pacing.add_pull(state.window, pull)
    advanced = state._replace(base=after, window=window, first=first, age=state.age + 1)
    return _select(is_valid | (state.halvings >= _MOST), advanced, _restored(method, state))


@jax.jit
def _restored(method: AutoSteps, state: AutoState) -> AutoState:
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
def _with_fixed_x(state: AutoState) -> AutoState:
    """End a window of a method with fixed x, for which the last state is the best."""
    over = state.age >= state.length
    return _select(over, state._replace(best=state.base, age=jnp.zeros_like(state.age)), state)


@jax.jit
def _basis(vectors: jax.Array, y: PyTree) -> tuple[jax.Array, PyTree]:
    """Return an orthonormal basis, as a matrix and as stacked pytrees like y."""
    basis = orthonormal(vectors)
    return basis, jax.vmap(partial(shaped, like=y))(basis)


@jax.jit
def _joined(cohorts: list[Cohort]) -> Cohort:
    """Join cohorts; the weights of a client in several of them are added up."""
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
        basis: the vectors in the products with the clients' Hessians.
        reply: the sum of `check` over a cohort.
        weights: of the cohort, which sum to one only in expectation.
        sampled: the number of sampled clients; 0 for all.

    Returns:
        The state, and a flag for starting x.
    """
    mean = trees.scale(1 / jnp.sum(jnp.asarray(weights)), reply)
    (h, numbers), d_y, (d_v, images) = mean
    value, change, square, correction = numbers.astype(float)
    old, at = state.curvature, method.inner.point(state.base)
    curvature = refresh(old, basis, flat_rows(images))
    mu, noisy = jnp.maximum(curvature.mu, 1e-30), curvature.noisy > 0

    def norm(tree: PyTree) -> jax.Array:
        return jnp.sqrt(trees.squared_norm(tree)).astype(float)

    # The uncertainty of the upper loss, and bounds on the errors of y and v.
    r_y, r_v = norm(d_y), norm(d_v)
    unsolved = jnp.where(noisy, 0.1, 1.0) * r_y * r_v / mu  # noisy residuals are mostly noise
    doubt = jnp.abs(correction) + unsolved
    doubt += _ROUNDING * jnp.finfo(doubt.dtype).eps * jnp.abs(value)
    if sampled:
        spread = jnp.maximum(square - change**2, 0.0)
        doubt += _DEVIATIONS * jnp.sqrt(spread / max(1, sampled - 1))
    error_y = r_y / (mu * norm(at.y))
    error_v = jnp.zeros(()) if at.v is None else r_v / (mu * norm(at.v))
    error_y, error_v = (jnp.where(jnp.isnan(e), jnp.inf, e) for e in (error_y, error_v))

    # The best point, and the next pace of x.
    evidence, (pace, most, resumed) = Evidence(*state.evidence), state.pace
    over, late = state.t >= method.rounds, state.t > int(_EARLY * method.rounds)
    settles = state.age.astype(float) * curvature.rate
    window, (lag, turn, noise) = pacing.closed(state.window, method.lower(state.base), settles)
    halve = noisy & (noise > _LOUD) & (state.halvings < _MOST)
    moving, small = jnp.where(pace > 0, pace, resumed), _SMALL * jnp.maximum(evidence.gain, 0.0)
    total = doubt + jnp.where(noisy, 0.0, evidence.doubt)
    best_x, growth = method.inner.point(state.best).x, curvature.L / old.L
    same = [jnp.all(a == b) for a, b in zip(*map(jax.tree.leaves, (at.x, best_x)), strict=True)]
    certain = change < -total  # a decrease of the loss; without noise, of its upper bound
    lower = certain | ((change + doubt < evidence.doubt) & ~noisy)
    faster = ~late & (certain | ~noisy) & (growth < _STEADY)
    onward = jnp.where(pace > 0, pacing.next_pace(pace, most, lag, turn, faster), resumed)
    onward = jnp.where(growth > _LEAP, onward / 2, onward)
    precise = noisy | (jnp.abs(change) > total) | (total <= small) | (doubt <= evidence.doubt)
    waiting = (most == 0) | (evidence.mu == 0)  # before x has started, or before the first check
    still = jnp.all(jnp.stack(same))  # x is unchanged: only y and v have improved
    back = ~waiting & ~still & ((change > total + small) | (error_y > _LOST))
    onward = jnp.where(~back & precise, onward, 0.0)  # otherwise x waits for more accurate y and v
    is_best = jnp.where(still, doubt <= evidence.doubt, ~back & precise & lower) | waiting
    pace = jnp.where(waiting, pace, jnp.where(still, resumed, onward))
    moving = jnp.where(back, moving / 3, moving)
    clear = jnp.where(noisy, ~halve, doubt <= _CLEAR * jnp.abs(value))
    ready = (most == 0) & clear & ~over & (window.power_before > 0)
    ready &= pacing.may_start(window, lag) & (state.shift.left == 0)

    gain = jnp.where((state.pace[1] > 0) & (evidence.mu > 0), evidence.gain - change, 0.0)
    is_accurate = ((most > 0) | ready) & (jnp.maximum(error_y, error_v) <= _KNOWN)
    first = jnp.where((evidence.first == 0) & is_accurate, norm(h), evidence.first)
    new = Evidence(error_y, error_v, norm(h), first, gain, evidence.late, doubt, curvature.mu)
    evidence = Evidence(*jnp.where(is_best, jnp.stack([*new]), state.evidence))
    evidence = evidence._replace(late=jnp.where(late, evidence.late, evidence.gain))

    best = _select(is_best, state.base, state.best)
    base = _select(back | over, best, state.base)
    window = _select(back | over, pacing.emptied(window, method.lower(best)), window)
    state = state._replace(
        found=jnp.stack([*curvature[:4]]),
        vectors=curvature.vectors,
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
        length=pacing.length_of(curvature.rate, method.rounds),
    )
    return state, ready


def _select(condition: jax.Array, value: PyTree, otherwise: PyTree) -> PyTree:
    return jax.lax.cond(condition, lambda: value, lambda: otherwise)
