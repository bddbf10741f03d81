"""FedMSA: Tarzanagh, Li, Sharma, Oymak, "Federated Multi-Sequence Stochastic Approximation with
Local Hypergradient Estimation", 2023 (arXiv 2306.01648), for bilevel problems: our reading of the
abstract.

Two communication rounds per iteration. The first updates the server's estimate h of the global
directions by momentum-based variance reduction (STORM); in the second, clients take local steps
from it, each corrected by the change of their own directions.
"""

from typing import Any, ClassVar, NamedTuple

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
from simfbo.ranges import Fraction, Positive


class MsaState(NamedTuple):
    """The variables, those of the iteration before, the estimate h, and the iterations so far."""

    x: PyTree
    y: PyTree
    v: PyTree
    before: Point[PyTree]
    h: Point[PyTree]
    iteration: jax.Array
    projected: jax.Array


class FedMSA(Method):
    """FedMSA; `fedmsa` has the equations. A payload pairs z with z_{t-1}, or with h, by channel."""

    residuals: ClassVar = {"fedmsa_local": "xyv"}

    problem: BilevelProblem = eqx.field(static=True, converter=require_shared)
    steps: Point[float] = eqx.field(converter=as_steps)
    momentum: float = 0.1
    radius: float | None = eqx.field(converter=require_radius, default=None)

    def __check_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise UserError(f"The momentum must lie in (0, 1], got {self.momentum}.")

    def init(self, x: PyTree, y: PyTree) -> MsaState:
        at, zero = start(x, y), trees.on_device(np.zeros((), np.int32))
        return MsaState(*at, at, trees.host_zeros(at), zero, zero)

    def round(self, state: MsaState, federation: Federation, key: jax.Array) -> MsaState:
        """Update h, and add the clients' changes."""
        first, second = jax.random.split(key)
        at, cohort = Point(*state[:3]), federation.cohort(first)
        news = federation.sum(self.fedmsa_estimate, _pairs(at, state.before), cohort, first)
        h, cohort = _estimate(self.momentum, state, news), federation.cohort(second)
        change = federation.sum(self.fedmsa_local, _pairs(at, h), cohort, second)
        return _advance(self.radius, state, h, change)

    @client_step
    def fedmsa_estimate(self, payload: Point[PyTree], client: Client) -> Point[PyTree]:
        """Return D_i(z_t) - (1 - a) D_i(z_{t-1}) on one batch."""
        (at, before), draw = _apart(payload), drawn_directions(self.problem)
        old = draw(before, client, client.key)
        return trees.add_scaled(draw(at, client, client.key), self.momentum - 1, old)

    @client_step
    def fedmsa_local(self, payload: Point[PyTree], client: Client) -> Point[PyTree]:
        """Return the change of z over tau_i local steps from h."""
        require_plain(client)
        (at, h), draw = _apart(payload), drawn_directions(self.problem)

        def moved(z: Point[PyTree], d: Point[PyTree]) -> Point[PyTree]:
            parts = zip(z, self.steps, d, strict=True)
            return Point(*(trees.add_scaled(own, -eta, step) for own, eta, step in parts))

        def step(k: Scalar, carry: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
            before, z, d = carry
            key = jax.random.fold_in(client.key, k)
            change = trees.subtract(draw(z, client, key), draw(before, client, key))
            d = trees.add(d, change)
            return z, moved(z, d), d

        # The first step goes along h itself; d is corrected from the second on.
        carry = at, moved(at, h), h
        if client.plan.steps.shape[-1] > 1:
            carry = jax.lax.fori_loop(1, client.plan.tau, step, carry)
        return trees.subtract(carry[1], at)


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

    where both directions of a difference see the same batch, and h_0 = sum_C w_i D_i(z_0; xi).
    The server weighs h_{t-1} itself: weights of a sampled cohort sum to one only in expectation.
    The cohort C' of the second exchange is drawn anew, so that sum_C' w_i tau_i is independent of
    h_t. At the solution h vanishes, and so does every local step: unequal tau_i do not move it.

    Args:
        problem: the two losses.
        steps: alpha for x, y and v, of one local step.
        momentum: a, in (0, 1]; at 1, h is the cohort's own mean.
        radius: r of the projection of v on the server; None for no projection.

    Returns:
        The method.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedmsa(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    return FedMSA(problem, steps, momentum, radius)


@jax.jit
def _estimate(momentum: float, state: MsaState, news: Point[PyTree]) -> Point[PyTree]:
    """Return h_t; at first z_{t-1} is z_t, and the news are a times the cohort's directions."""
    first = state.iteration == 0
    scale = jnp.where(first, 1 / jnp.asarray(momentum, float), 1.0)
    return trees.add_scaled(trees.scale(scale, news), 1 - jnp.asarray(momentum, float), state.h)


@jax.jit
def _advance(
    radius: float | None, state: MsaState, h: Point[PyTree], change: Point[PyTree]
) -> MsaState:
    """Add the clients' changes, and project v."""
    at = Point(*state[:3])
    x, y, v = trees.add(at, change)
    v, acted = project(v, radius)
    return MsaState(x, y, v, at, h, state.iteration + 1, state.projected + acted)


def _pairs(first: Point[PyTree], second: Point[PyTree]) -> Point[PyTree]:
    """Return two points as one whose parts are pairs, so that each part has its channel."""
    return Point(*zip(first, second, strict=True))


def _apart(pairs: Any) -> tuple[Point[PyTree], Point[PyTree]]:
    """Return the two points in pairs of parts."""
    first, second = zip(*pairs, strict=True)
    return Point(*first), Point(*second)
