"""FedBiOAcc with local lower problems: Li, Huang, Huang, "Communication-Efficient Federated Bilevel
Optimization with Global and Local Lower Level Problems", NeurIPS 2023 (arXiv 2302.06701): our
reading of the abstract.

Every client has a lower problem of its own (`BilevelProblem(..., lower_level="private")`). It keeps
y_i, v_i and the estimators of their directions; x and the estimator of its direction are averaged.
"""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._common import (
    STALE,
    as_steps,
    drawn_directions,
    require_plain,
    require_radius,
)
from simfbo.algorithms._fedbioacc import Schedule, moved
from simfbo.core import trees
from simfbo.core.federation import Client, Federation, WithMemory
from simfbo.core.method import Method, client_step
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar
from simfbo.errors import UserError
from simfbo.ranges import Positive


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


class FedBiOAccLocal(Method):
    """FedBiOAcc for a personal lower level; `fedbioacc_local` has the equations."""

    known_violations: ClassVar = {
        **dict.fromkeys(
            ("finds the solution", "unequal local work"),
            "Its lower problems are personal, so its solution is another.",
        ),
        "identical clients": STALE,
    }
    name = "FedBiOAcc-Local"
    is_personal = True

    problem: BilevelProblem = eqx.field(static=True)
    steps: Point[float] = eqx.field(converter=as_steps)
    radius: float | None = eqx.field(converter=require_radius, default=None)
    schedule: Schedule = Schedule(10.0, 1000.0, 0.1)

    def init(self, x: PyTree, y: PyTree) -> LocalState:
        x, y = trees.on_device((x, y))
        return LocalState(x, y, trees.host_zeros(x), trees.on_device(np.zeros(())))

    def round(self, state: LocalState, federation: Federation, key: jax.Array) -> LocalState:
        """Add the mean changes of x and d_x."""
        payload, cohort = (Point(x=(state.x, state.d)), state.t), federation.cohort(key)
        change, tau, count = federation.sum(self.local_step, payload, cohort, key)
        (x, d), now = trees.add((state.x, state.d), change.x), state.t + tau / count
        return LocalState(x, state.y, d, now)

    @client_step
    def local_step(self, payload: PyTree, client: Client) -> WithMemory:
        """Return the changes of x and d_x over tau_i local steps; remember all that is own."""
        require_plain(client)
        (shared, t), own, draw = payload, client.memory, drawn_directions(self.problem)
        x, d_x = shared.x
        at, d = own.at._replace(x=x), own.d._replace(x=d_x)

        def step(k: Scalar, carry: PyTree) -> PyTree:
            (z, d, begun), key = carry, jax.random.fold_in(client.key, k)
            now = t + jnp.asarray(k, t.dtype)
            alpha = self.schedule.alpha(now)
            keep = 1 - self.schedule.c * alpha**2
            after = moved(z, alpha, self.steps, d, self.radius)
            new, old = draw(after, client, key), trees.subtract(d, draw(z, client, key))
            weights = Point(jnp.where(now > 0, keep, 0.0), *[jnp.where(begun > 0, keep, 0.0)] * 2)
            d = Point(*map(trees.add_scaled, new, weights, old))
            return after, d, jnp.ones_like(begun)

        z, new, begun = jax.lax.fori_loop(0, client.plan.tau, step, (at, d, own.begun))
        tau = jnp.asarray(client.plan.tau, t.dtype)
        change = Point(x=trees.subtract((z.x, new.x), (x, d_x)))
        kept = Own(z._replace(x=None), new._replace(x=None), begun)
        return WithMemory((change, tau, jnp.ones_like(tau)), kept)

    def client_memory(self, x: PyTree, y: PyTree) -> Own:
        y = trees.on_device(y)
        zero = trees.host_zeros(y)
        return Own(Point(y=y, v=zero), Point(y=zero, v=zero), trees.on_device(np.zeros(())))

    def client_y(self, memory: Own) -> PyTree:
        return memory.at.y


def fedbioacc_local(
    problem: BilevelProblem,
    steps: Point[float],
    radius: Positive | None = None,
    delta: Positive = 10.0,
    u: Positive = 1000.0,
    c: Positive = 0.1,
) -> Method:
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
    return FedBiOAccLocal(problem, steps, radius, Schedule(delta, u, c))
