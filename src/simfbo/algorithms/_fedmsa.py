"""FedMSA: Tarzanagh, Li, Sharma, Oymak, "Federated Multi-Sequence Stochastic Approximation with
Local Hypergradient Estimation", 2023 (arXiv 2306.01648), for bilevel problems: our reading of the
abstract.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._common import (
    ProjectedMethod,
    apart,
    moved,
    pairs,
    project,
    require_plain,
    start,
)
from simfbo.core import BilevelProblem, Client, Federation, Method, Point, client_step, trees
from simfbo.core.problem import PyTree, Scalar
from simfbo.errors import UserError
from simfbo.ranges import Fraction, Positive


class MsaState(NamedTuple):
    """The variables, those of the previous iteration, the estimate h, and the iteration count."""

    x: PyTree
    y: PyTree
    v: PyTree
    before: Point[PyTree]
    h: Point[PyTree]
    iteration: jax.Array
    projected: jax.Array


class FedMSA(ProjectedMethod):
    """FedMSA; `fedmsa` has the equations. A payload pairs z with z_{t-1}, or with h, by channel."""

    residuals: ClassVar = {"fedmsa_local": "xyv"}

    momentum: float

    def __check_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise UserError(f"The momentum must lie in (0, 1], got {self.momentum}.")

    def init(self, x: PyTree, y: PyTree) -> MsaState:
        at, zero = start(x, y), trees.on_device(np.zeros((), np.int32))
        return MsaState(*at, at, trees.host_zeros(at), zero, zero)

    def round(self, state: MsaState, federation: Federation, key: jax.Array) -> MsaState:
        first, second = jax.random.split(key)
        at, cohort = Point(*state[:3]), federation.cohort(first)
        update = federation.sum(self.fedmsa_estimate, pairs(at, state.before), cohort, first)
        h, cohort = _estimate(self.momentum, state, update), federation.cohort(second)
        change = federation.sum(self.fedmsa_local, pairs(at, h), cohort, second)
        return _advance(self.radius, state, h, change)

    @client_step
    def fedmsa_estimate(self, payload: Point[PyTree], client: Client) -> Point[PyTree]:
        """Send D_i(z_t) - (1 - a) D_i(z_{t-1}) on one batch."""
        new, old = (self.draw(z, client, client.key) for z in apart(payload))
        return trees.add_scaled(new, self.momentum - 1, old)

    @client_step
    def fedmsa_local(self, payload: Point[PyTree], client: Client) -> Point[PyTree]:
        """Send the change of z over tau_i local steps from h."""
        require_plain(client)
        (at, h), draw = apart(payload), self.draw

        def step(k: Scalar, carry: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
            before, z, d = carry
            key = jax.random.fold_in(client.key, k)
            d = trees.add(d, trees.subtract(draw(z, client, key), draw(before, client, key)))
            return z, moved(z, self.steps, d), d

        # The direction of the first step is h; d is corrected from the second step on.
        carry = at, moved(at, self.steps, h), h
        if client.plan.steps.shape[-1] > 1:
            carry = jax.lax.fori_loop(1, client.plan.tau, step, carry)
        return trees.subtract(carry[1], at)


@jax.jit
def _estimate(momentum: float, state: MsaState, update: Point[PyTree]) -> Point[PyTree]:
    """Compute h_t; initially z_{t-1} = z_t, and the update is a times the cohort's directions."""
    a = jnp.asarray(momentum, float)
    factor = jnp.where(state.iteration == 0, 1 / a, 1.0)
    return trees.add_scaled(trees.scale(factor, update), 1 - a, state.h)


@jax.jit
def _advance(
    radius: float | None, state: MsaState, h: Point[PyTree], change: Point[PyTree]
) -> MsaState:
    at = Point(*state[:3])
    x, y, v = trees.add(at, change)
    v, active = project(v, radius)
    return MsaState(x, y, v, at, h, state.iteration + 1, state.projected + active)


def fedmsa(
    problem: BilevelProblem,
    steps: Point[float],
    momentum: Fraction = 0.1,
    radius: Positive | None = None,
) -> Method:
    """FedMSA, with variance-reduced directions on the server and on the clients.

    Our reading of the abstract: the algorithm in the paper may differ.

    With z = (x, y, v), SimFBO's directions D_i(z; xi) and a the momentum, one iteration is

        h_t = (1-a) h_{t-1} + sum_C w_i [D_i(z_t; xi) - (1-a) D_i(z_{t-1}; xi)];
        tau_i local steps from z_0 = z_t, d_0 = h_t:
            z_{k+1} = z_k - alpha d_k,    d_{k+1} = d_k + D_i(z_{k+1}; xi) - D_i(z_k; xi);
        z_{t+1} = z_t + sum_C' w_i (z_tau,i - z_t),    v projected

    where both directions of a difference use the same batch, and h_0 = sum_C w_i D_i(z_0; xi).
    The term with h_{t-1} is added on the server, since the weights of a sampled cohort sum to one
    only in expectation. The cohort C' of the second exchange is sampled separately, so that
    sum_C' w_i tau_i is independent of h_t. At the solution h and all local steps are zero, so that
    unequal tau_i do not change it.

    Args:
        problem: the two losses.
        steps: alpha for x, y and v, of one local step.
        momentum: a, in (0, 1]; for 1, h is the mean over the cohort.
        radius: r of the projection of v on the server; None for no projection.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedmsa(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    return FedMSA(problem, steps, radius, momentum)
