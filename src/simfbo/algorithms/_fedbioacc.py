"""FedBiOAcc: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global
and Local Lower Level Problems", NeurIPS 2023 (arXiv 2302.06701), for a global lower problem: our
reading of the abstract.

FedBiO with momentum-based variance reduction (STORM) on the clients, and step sizes that fall with
the number of local steps. One communication round for the local steps of all three variables; the
server averages the changes of the variables and of the estimators of their directions.
"""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._common import (
    as_steps,
    drawn_directions,
    project,
    require_plain,
    require_radius,
    require_shared,
    start,
)
from simfbo.core import trees
from simfbo.core.federation import Client, Federation
from simfbo.core.method import Method, client_step
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar
from simfbo.errors import UserError
from simfbo.ranges import Positive


class AccState(NamedTuple):
    """The variables, the estimators d of their directions, and the local steps so far."""

    x: PyTree
    y: PyTree
    v: PyTree
    d: Point[PyTree]
    t: jax.Array


class Schedule(eqx.Module):
    """The numbers of alpha_t = delta / (u + t)^(1/3) and of the momentum c alpha_t^2."""

    delta: float
    u: float
    c: float

    def alpha(self, t: jax.Array) -> jax.Array:
        """Return alpha_t."""
        return self.delta * (self.u + t) ** (-1 / 3)

    def __check_init__(self) -> None:
        for name, number in vars(self).items():
            if not 0 < number < float("inf"):
                raise UserError(f"{name} must be a positive number, got {number}.")
        if (most := self.c * self.delta**2 / self.u ** (2 / 3)) > 1 + 1e-9:
            raise UserError(
                f"The momentum c alpha^2 begins at {most:.3g}, above 1: lower c or delta."
            )


class FedBiOAcc(Method):
    """FedBiOAcc; `fedbioacc` has the equations."""

    known_violations: ClassVar = {
        "unequal local work": "FedBiOAcc adds what clients did, so those who take more local steps "
        "count for more."
    }
    residuals: ClassVar = {"fedbioacc_step": "yv"}

    problem: BilevelProblem = eqx.field(static=True, converter=require_shared)
    steps: Point[float] = eqx.field(converter=as_steps)
    radius: float | None = eqx.field(converter=require_radius, default=None)
    schedule: Schedule = Schedule(10.0, 1000.0, 0.1)

    def init(self, x: PyTree, y: PyTree) -> AccState:
        at = start(x, y)
        return AccState(*at, trees.host_zeros(at), trees.on_device(np.zeros(())))

    def round(self, state: AccState, federation: Federation, key: jax.Array) -> AccState:
        """Add the mean changes of the variables and of the estimators."""
        payload = (*_pairs(state), state.t)
        return _advance(
            state, *federation.sum(self.fedbioacc_step, payload, federation.cohort(key), key)
        )

    @client_step
    def fedbioacc_step(self, payload: PyTree, client: Client) -> PyTree:
        """Return the changes of z and d over tau_i local steps, tau_i and 1."""
        require_plain(client)
        (*pairs, t), draw, schedule = payload, drawn_directions(self.problem), self.schedule
        at, d = (Point(*part) for part in zip(*pairs, strict=True))

        def step(k: Scalar, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            (z, d), key = carry, jax.random.fold_in(client.key, k)
            now = t + jnp.asarray(k, t.dtype)
            alpha = schedule.alpha(now)
            keep = jnp.where(now > 0, 1 - schedule.c * alpha**2, 0.0)
            after = moved(z, alpha, self.steps, d, self.radius)
            old = trees.subtract(d, draw(z, client, key))
            return after, trees.add_scaled(draw(after, client, key), keep, old)

        z, new = jax.lax.fori_loop(0, client.plan.tau, step, (at, d))
        tau = jnp.asarray(client.plan.tau, t.dtype)
        return trees.subtract(z, at), trees.subtract(new, d), tau, jnp.ones_like(tau)


def fedbioacc(
    problem: BilevelProblem,
    steps: Point[float],
    radius: Positive | None = None,
    delta: Positive = 10.0,
    u: Positive = 1000.0,
    c: Positive = 0.1,
) -> Method:
    """FedBiOAcc; its authors let every client take part in every round.

    Our reading of the abstract: the algorithm in the paper may differ.

    With z = (x, y, v), SimFBO's directions D_i(z; B) and alpha_t = delta / (u + t)^(1/3), client i
    takes tau_i steps from the z and d that it receives, t being the local steps before:

        z_{k+1} = z_k - alpha_{t+k} eta d_k,    v projected;
        d_{k+1} = D_i(z_{k+1}; B) + (1 - c alpha_{t+k}^2) (d_k - D_i(z_k; B)),    the same batch B

    and the server adds the mean of the changes of z and of d. The first local step of a run moves
    nothing and sets d = D_i(z_0; B); with one local step that is a first round without a move.

    Args:
        problem: the two losses.
        steps: eta for x, y and v; alpha_t multiplies them.
        radius: r of the clients' projection of v_i; None for no projection.
        delta: of alpha_t; the default makes it 1 at first, and 0.79 after 1,000 local steps.
        u: of alpha_t.
        c: of the momentum c alpha_t^2, which must not exceed 1.

    Returns:
        The method.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedbioacc(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    return FedBiOAcc(problem, steps, radius, Schedule(delta, u, c))


def moved(
    z: Point[PyTree], alpha: jax.Array, eta: Point[PyTree], d: Point[PyTree], radius: float | None
) -> Point[PyTree]:
    """Return z - alpha eta d, with v projected."""
    parts = zip(z, eta, d, strict=True)
    x, y, v = (trees.add_scaled(own, -alpha * size, step) for own, size, step in parts)
    return Point(x, y, project(v, radius)[0])


@jax.jit
def _advance(
    state: AccState, z: Point[PyTree], d: Point[PyTree], steps: jax.Array, count: jax.Array
) -> AccState:
    """Add the clients' changes; t advances by their mean number of local steps.

    Weights of a sampled cohort sum to one only in expectation, so the mean is taken over their sum.
    """
    x, y, v = trees.add(Point(*state[:3]), z)
    return AccState(x, y, v, trees.add(state.d, d), state.t + steps / count)


def _pairs(state: AccState) -> Point[PyTree]:
    """Return z and d as a point whose parts are pairs, so that each part has its channel."""
    return Point(*zip(state[:3], state.d, strict=True))
