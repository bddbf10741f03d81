"""MimeFBO: one communication round per iteration, as SimFBO, and no client drift.

The server keeps h, an estimate of the cohort's direction, and sends it along. Clients correct every
local step by the difference between h and their own direction at the start (Mime, Karimireddy et
al. 2021, for the three variables of SimFBO at once), and send the mean direction of their path, as
in ShroFBO. Not published elsewhere, as far as we know; docs/reference-mimefbo.md has the proof that
its fixed point is exact.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import (
    Draw,
    Server,
    State,
    accumulate,
    add_scaled,
    drawn_directions,
    kept,
    scale,
    server_side,
)
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.algorithms._work import mean_work
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation, WithMemory
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar
from simfbo.errors import UserError

Control = Literal["mean", "storm", "memory"]


class MimeState(NamedTuple):
    """SimFBO's state, the direction h, the previous iterate, and ShroFBO's estimates of rho.

    `previous` is empty except for `control="storm"`.
    """

    base: State
    h: Point[PyTree]
    previous: Any
    norm_sum: jax.Array
    norm_count: jax.Array

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
        """Return v."""
        return self.base.v

    @property
    def projected(self) -> jax.Array:
        """Return how often the projection of v acted."""
        return self.base.projected


@with_settings
def mimefbo(
    problem: BilevelProblem,
    local: Point[float],
    server: Server | None = None,
    radius: float | None = None,
    control: Control = "mean",
    theta: float = 1.0,
) -> Algorithm:
    """MimeFBO: exact at any local step size and for unequal local work; arguments as for `simfbo`.

    With z = (x, y, v) and D_i(z; xi) SimFBO's three directions, client i takes tau_i steps from z,

        z_i -= eta [D_i(z_i; xi) - D_i(z; xi) + h],     m_i = mean of D_i(z_i; xi) over the steps

    by its local rule, with the weights a_k of that rule in the mean,
    and the server moves along m = sum_C p~_i m_i, with rho gamma as step sizes (see `shrofbo`).
    At the solution h is zero and the two D_i cancel, so that clients stand still and m is zero.

    Args:
        problem: the two losses.
        local: eta, the clients' step sizes.
        server: gamma, as step sizes or Optax transformations; the same as `local` by default.
        radius: r of the projection of v on the server; None for no projection.
        control: what h is. "mean": a moving average of m. "storm": h and m are the same STORM
            estimate, which also uses the directions at the previous iterate; it removes most of the
            noise of client sampling. "memory": SCAFFOLD, in which each client remembers the m_i it
            last sent, which takes the place of D_i(z; xi), h is the mean of all clients', and the
            server moves along h + sum_C p~_i (m_i - its last).
        theta: weight of what is new in h, between 0 and 1; not used by "memory".

    Returns:
        The algorithm.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = mimefbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    if control not in get_args(Control):
        raise UserError(f"control must be one of {', '.join(get_args(Control))}, got '{control}'.")
    if not 0 < theta <= 1:
        raise UserError(f"theta must lie above 0 and be at most 1, got {theta}.")
    init_base, advance = server_side(local if server is None else server, radius)
    mimefbo_step, own = _STEPS[control](problem), control == "memory"
    exchange = _EXCHANGES[control]

    def init(x: PyTree, y: PyTree) -> MimeState:
        base = init_base(x, y)
        at = Point(*base[:3])
        previous = at if control == "storm" else ()
        return MimeState(base, trees.host_zeros(at), previous, jnp.zeros(()), jnp.zeros(()))

    def round(state: MimeState, federation: Federation, key: jax.Array) -> MimeState:
        cohort = federation.cohort(key)

        def ask(*payload: PyTree) -> tuple[Point[PyTree], jax.Array]:
            return federation.sum(mimefbo_step, payload, cohort, key, local)

        m, h, norm = exchange(ask, state, federation, len(cohort.ids), theta)
        rho = mean_work(federation, cohort, key, norm, state)
        base = advance(state.base, scale(rho, m))
        previous = Point(*state.base[:3]) if control == "storm" else ()
        return MimeState(base, h, previous, state.norm_sum + norm, state.norm_count + 1)

    stale = "What clients remember is from when they last took part, also where all are the same."
    return Algorithm(
        "MimeFBO", init, round, (mimefbo_step,), {"identical clients": stale} if own else {},
        residuals={"mimefbo_step": "xyv"} if control == "mean" else {},  # the others send changes
        memory=_memory if own else None, exact_sums=own,
    )  # fmt: skip


Found = tuple[Point[PyTree], Point[PyTree], jax.Array]  # m, the new h, and the mean of ||a_i||_1


def _average(ask: Any, state: MimeState, _: Federation, size: int, theta: float) -> Found:
    """Return the cohort's direction, and its moving average."""
    m, norm = ask(Point(*state.base[:3]), state.h)
    return m, add_scaled(scale(1 - theta, state.h), theta, m), norm


def _storm(ask: Any, state: MimeState, _: Federation, size: int, theta: float) -> Found:
    """Return STORM's estimate twice: m = (1 - theta) h + sum_C p~_i [m_i - (1 - theta) D_i(z')]."""
    old = jnp.where(state.norm_count > 0, 1 - theta, 0.0)  # there is no previous one at first
    u, norm = ask(Point(*state.base[:3]), state.h, state.previous, old)
    m = add_scaled(u, old, state.h)
    return m, m, norm


def _scaffold(ask: Any, state: MimeState, federation: Any, size: int, theta: float) -> Found:
    """Return SCAFFOLD's direction h + sum_C p~_i (m_i - c_i), and h = sum p_i c_i with new c_i."""
    u, norm = ask(Point(*state.base[:3]), state.h)
    asked, latest = size / federation.n, federation.latest
    share = asked if latest is None else asked / latest.factor  # those who count, of all clients
    return add_scaled(u, 1.0, state.h), add_scaled(state.h, share, u), norm


def _memory(x0: PyTree, y0: PyTree) -> Point[PyTree]:
    """Return c_i before the client first takes part: zeros."""
    x, y = trees.host_zeros((x0, y0))
    return Point(x, y, y)


def _path(
    draw: Draw, z: Point[PyTree], h: Point[PyTree], client: Client, own: Point[PyTree] | None
) -> Point[PyTree]:
    """Return the mean of D_i, weighted with a_k / ||a||_1, over tau_i corrected steps from z.

    Args:
        draw: D_i on a batch.
        z: the start.
        h: the cohort's direction.
        client: its batches, step sizes and local work.
        own: the client's own direction, to be replaced by h; None for D_i(z) on the step's batch.
    """
    plan = client.plan

    def at(k: Scalar, z: Point[PyTree]) -> Point[PyTree]:
        return draw(z, client, jax.random.fold_in(client.key, k))

    def moved(change: Point[PyTree], d: Point[PyTree]) -> Point[PyTree]:
        parts = zip(kept(plan, change), client.eta, d, strict=True)
        return Point(*(trees.add_scaled(part, -size, d) for part, size, d in parts))

    def step(k: Scalar, carry: Any, d: Point[PyTree], base: Point[PyTree]) -> Any:
        """Follow the local rule twice: with d for what is sent, with its correction for z_i."""
        total, change, speed = carry
        both = d, trees.add(trees.subtract(d, base), h)
        sent, walked = speed = accumulate(plan, k, both, speed)
        memory = () if plan.momentum is None else speed
        return trees.add(kept(plan, total), sent), moved(change, walked), memory

    def next_step(k: Scalar, carry: Any) -> Any:
        d = at(k, trees.add(z, carry[1]))
        return step(k, carry, d, at(k, z) if own is None else own)

    first, zero = at(0, z), trees.zeros_like(z)
    if plan.steps.shape[-1] == 1:
        return first
    nothing = zero, zero, () if plan.momentum is None else (zero, zero)
    begun = step(0, nothing, first, first if own is None else own)
    total, *_ = jax.lax.fori_loop(1, plan.tau, next_step, begun)
    return trees.scale(1 / jnp.asarray(plan.norm, float), total)


@once_per_problem
def _average_step(problem: BilevelProblem) -> ClientStep:
    draw = drawn_directions(problem)

    def mimefbo_step(payload: PyTree, client: Client) -> tuple[Point[PyTree], jax.Array]:
        z, h = payload
        return _path(draw, z, h, client, None), jnp.asarray(client.plan.norm)

    return mimefbo_step


@once_per_problem
def _storm_step(problem: BilevelProblem) -> ClientStep:
    draw = drawn_directions(problem)

    def mimefbo_step(payload: PyTree, client: Client) -> tuple[Point[PyTree], jax.Array]:
        z, h, previous, old = payload
        before = draw(previous, client, jax.random.fold_in(client.key, 0))
        m = _path(draw, z, h, client, None)
        return trees.add_scaled(m, -old, before), jnp.asarray(client.plan.norm)

    return mimefbo_step


@once_per_problem
def _scaffold_step(problem: BilevelProblem) -> ClientStep:
    draw = drawn_directions(problem)

    def mimefbo_step(payload: PyTree, client: Client) -> WithMemory:
        (z, h), c = payload, client.memory
        m = _path(draw, z, h, client, c)
        return WithMemory((trees.subtract(m, c), jnp.asarray(client.plan.norm)), m)

    return mimefbo_step


_STEPS = {"mean": _average_step, "storm": _storm_step, "memory": _scaffold_step}
_EXCHANGES = {"mean": _average, "storm": _storm, "memory": _scaffold}
