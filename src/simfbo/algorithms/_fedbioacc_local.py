"""FedBiOAcc with local lower problems: Li, Huang, Huang, "Communication-Efficient Federated Bilevel
Optimization with Global and Local Lower Level Problems", NeurIPS 2023 (arXiv 2302.06701): our
reading of the abstract.

Every client has a lower problem of its own (`BilevelProblem(..., lower_level="private")`). It keeps
y_i, v_i and the estimators of their directions; x and the estimator of its direction are averaged.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._common import drawn_directions, require_plain
from simfbo.algorithms._fedbioacc import Schedule, checked_schedule, moved
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation, WithMemory
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar
from simfbo.errors import UserError


class LocalState(NamedTuple):
    """x, what clients start y_i from, the estimator d of x's direction, and the local steps."""

    x: PyTree
    y: PyTree
    d: PyTree
    t: jax.Array


class Own(NamedTuple):
    """What a client keeps: y_i and v_i, the estimators of their directions, whether it began."""

    at: Point[PyTree]
    d: Point[PyTree]
    begun: jax.Array


@with_settings(private=True)
def fedbioacc_local(
    problem: BilevelProblem,
    steps: Point[float],
    radius: float | None = None,
    delta: float = 10.0,
    u: float = 1000.0,
    c: float = 0.1,
) -> Algorithm:
    """FedBiOAcc for a personal lower level; arguments as for `fedbioacc`.

    Our reading of the abstract: the algorithm in the paper may differ.

    The local steps are those of `fedbioacc`. y_i, v_i, d_y and d_v are the client's own; the server
    adds the mean changes of x and d_x to its own. A client's first local step sets its estimators.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> problem = quadratic().problem._replace(lower_level="private")
        >>> algorithm = fedbioacc_local(problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    if problem.lower_level != "private":
        raise UserError(
            "fedbioacc_local gives every client a lower variable of its own: declare the problem "
            'with lower_level="private" (task.private in configurations), or use fedbioacc.'
        )
    local_step = _client_step(problem, radius, checked_schedule(Schedule(delta, u, c)))

    def init(x: PyTree, y: PyTree) -> LocalState:
        x, y = trees.on_device((x, y))
        return LocalState(x, y, trees.host_zeros(x), trees.on_device(np.zeros(())))

    def round(state: LocalState, federation: Federation, key: jax.Array) -> LocalState:
        payload, cohort = (Point(x=(state.x, state.d)), state.t), federation.cohort(key)
        change, tau, count = federation.sum(local_step, payload, cohort, key, steps)
        (x, d), now = trees.add((state.x, state.d), change.x), state.t + tau / count
        return LocalState(x, state.y, d, now)

    other = "Its lower problems are personal, so its solution is another."
    kept = "What clients remember is from when they last took part, also where all are the same."
    violations = {"finds the solution": other, "unequal local work": other,
                  "identical clients": kept}  # fmt: skip
    return Algorithm("FedBiOAcc-Local", init, round, (local_step,), violations, memory=_first,
                     own_y=_own_y)  # fmt: skip


def _first(x0: PyTree, y0: PyTree) -> Own:
    """Return what a client keeps before it first takes part."""
    y = trees.on_device(y0)
    zero = trees.host_zeros(y)
    return Own(Point(y=y, v=zero), Point(y=zero, v=zero), trees.on_device(np.zeros(())))


def _own_y(memory: Own) -> PyTree:
    return memory.at.y


@once_per_problem
def _client_step(problem: BilevelProblem, radius: float | None, schedule: Schedule) -> ClientStep:
    draw = drawn_directions(problem)

    def local_step(payload: PyTree, client: Client) -> WithMemory:
        require_plain(client)
        (shared, t), own = payload, client.memory
        x, d_x = shared.x
        at, d = own.at._replace(x=x), own.d._replace(x=d_x)

        def step(k: Scalar, carry: PyTree) -> PyTree:
            (z, d, begun), key = carry, jax.random.fold_in(client.key, k)
            now = t + jnp.asarray(k, t.dtype)
            alpha = schedule.alpha(now)
            keep = 1 - schedule.c * alpha**2
            after = moved(z, alpha, client.eta, d, radius)
            new, old = draw(after, client, key), trees.subtract(d, draw(z, client, key))
            weights = Point(jnp.where(now > 0, keep, 0.0), *[jnp.where(begun > 0, keep, 0.0)] * 2)
            d = Point(*map(trees.add_scaled, new, weights, old))
            return after, d, jnp.ones_like(begun)

        z, new, begun = jax.lax.fori_loop(0, client.plan.tau, step, (at, d, own.begun))
        tau = jnp.asarray(client.plan.tau, t.dtype)
        change = Point(x=trees.subtract((z.x, new.x), (x, d_x)))
        kept = Own(z._replace(x=None), new._replace(x=None), begun)
        return WithMemory((change, tau, jnp.ones_like(tau)), kept)

    return local_step
