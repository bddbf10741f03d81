"""FedBiOAcc: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global
and Local Lower Level Problems", NeurIPS 2023 (arXiv 2302.06701), for a global lower problem: our
reading of the abstract.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._common import (
    ProjectedMethod,
    adds_changes,
    apart,
    moved,
    pairs,
    require_plain,
    start,
)
from simfbo.core import BilevelProblem, Client, Federation, Method, Point, client_step, trees
from simfbo.core.problem import PyTree, Scalar
from simfbo.errors import UserError
from simfbo.ranges import Positive


class AccState(NamedTuple):
    """The variables, the estimators d of their directions, and the local steps so far."""

    x: PyTree
    y: PyTree
    v: PyTree
    d: Point[PyTree]
    t: jax.Array


class StormMethod(ProjectedMethod):
    """A method with FedBiOAcc's local steps, for a global lower problem or local ones."""

    delta: float
    u: float
    c: float

    def __check_init__(self) -> None:
        for name, number in {"delta": self.delta, "u": self.u, "c": self.c}.items():
            if not 0 < number < float("inf"):
                raise UserError(f"{name} must be a positive number, got {number}.")
        if (initial := self.c * self.delta**2 / self.u ** (2 / 3)) > 1 + 1e-9:
            raise UserError(
                f"The momentum c alpha^2 begins at {initial:.3g}, above 1: lower c or delta."
            )

    def walk(
        self, z: Point[PyTree], d: Point[PyTree], t: jax.Array, begun: jax.Array, client: Client
    ) -> tuple[Point[PyTree], Point[PyTree], jax.Array]:
        """Take tau_i local steps from z and the estimators d; return both, and tau_i.

        t is the number of earlier local steps. If t is zero, there is no estimator of x's direction
        yet; if `begun` is zero, there are none of y's and v's.
        """
        require_plain(client)

        def step(k: Scalar, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            (z, d), key = carry, jax.random.fold_in(client.key, k)
            t_x, t_y = (count + jnp.asarray(k, t.dtype) for count in (t, begun))
            alpha = self.delta * (self.u + t_x) ** (-1 / 3)
            keep = 1 - self.c * alpha**2
            after = moved(z, Point(*(alpha * eta for eta in self.steps)), d, self.radius)
            keep_x, keep_y = (jnp.where(count > 0, keep, 0.0) for count in (t_x, t_y))
            new, old = self.draw(after, client, key), trees.subtract(d, self.draw(z, client, key))
            return after, Point(*map(trees.add_scaled, new, (keep_x, keep_y, keep_y), old))

        z, d = jax.lax.fori_loop(0, client.plan.tau, step, (z, d))
        return z, d, jnp.asarray(client.plan.tau, t.dtype)


class FedBiOAcc(StormMethod):
    """FedBiOAcc; `fedbioacc` has the equations."""

    known_violations: ClassVar = adds_changes("FedBiOAcc")
    residuals: ClassVar = {"fedbioacc_step": "yv"}

    def init(self, x: PyTree, y: PyTree) -> AccState:
        at = start(x, y)
        return AccState(at.x, at.y, at.v, trees.host_zeros(at), trees.on_device(np.zeros(())))

    def round(self, state: AccState, federation: Federation, key: jax.Array) -> AccState:
        payload = (*pairs(Point(*state[:3]), state.d), state.t)
        sent = federation.sum(self.fedbioacc_step, payload, federation.cohort(key), key)
        return _advance(state, *sent)

    @client_step
    def fedbioacc_step(self, payload: PyTree, client: Client) -> PyTree:
        """Send the changes of z and d over tau_i local steps, tau_i and 1."""
        *points, t = payload
        at, d = apart(points)
        z, new, tau = self.walk(at, d, t, t, client)
        return trees.subtract(z, at), trees.subtract(new, d), tau, jnp.ones_like(tau)


@jax.jit
def _advance(
    state: AccState, z: Point[PyTree], d: Point[PyTree], steps: jax.Array, count: jax.Array
) -> AccState:
    """Add the clients' changes; t advances by their mean number of local steps.

    Weights of a sampled cohort sum to one only in expectation, so the mean is taken over their sum.
    """
    x, y, v = trees.add(Point(*state[:3]), z)
    return AccState(x, y, v, trees.add(state.d, d), state.t + steps / count)


def fedbioacc(
    problem: BilevelProblem,
    steps: Point[float],
    radius: Positive | None = None,
    delta: Positive = 10.0,
    u: Positive = 1000.0,
    c: Positive = 0.1,
) -> Method:
    """FedBiOAcc; in the paper with full participation.

    Our reading of the abstract: the algorithm in the paper may differ.

    With z = (x, y, v), SimFBO's directions D_i(z; B) and alpha_t = delta / (u + t)^(1/3), client i
    takes tau_i steps from the z and d that it receives, t being the local steps before:

        z_{k+1} = z_k - alpha_{t+k} eta d_k,    v projected;
        d_{k+1} = D_i(z_{k+1}; B) + (1 - c alpha_{t+k}^2) (d_k - D_i(z_k; B)),    the same batch B

    and the server adds the mean of the changes of z and of d. The first local step of a run sets
    d = D_i(z_0; B) only; with one local step, z is unchanged in the first round.

    Args:
        problem: the two losses.
        steps: eta for x, y and v; alpha_t multiplies them.
        radius: r of the clients' projection of v_i; None for no projection.
        delta: of alpha_t; by default alpha_t is 1 initially, and 0.79 after 1,000 local steps.
        u: of alpha_t.
        c: of the momentum c alpha_t^2, which must not exceed 1.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedbioacc(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    return FedBiOAcc(problem, steps, radius, delta, u, c)
