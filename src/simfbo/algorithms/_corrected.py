"""MimeFBO and its variants: local steps that the cohort's direction corrects."""

from abc import abstractmethod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import Draw, SingleLoop, State, accumulate, kept, scale
from simfbo.algorithms._work import mean_work
from simfbo.core import trees
from simfbo.core.federation import Client, Federation
from simfbo.core.method import client_step
from simfbo.core.problem import Point, PyTree, Scalar
from simfbo.errors import UserError


class MimeState(NamedTuple):
    """SimFBO's state, the direction h, the previous iterate, and ShroFBO's estimates of rho.

    `previous` is empty except in StormFBO.
    """

    base: State
    h: Point[PyTree]
    previous: Any
    norm_sum: jax.Array
    norm_count: jax.Array


class CorrectedLoop(SingleLoop):
    """A method whose clients correct every local step by h, an estimate of the cohort's direction.

    Attributes:
        theta: weight of what is new in h, between 0 and 1.
    """

    name = "MimeFBO"

    theta: float = 1.0

    def __check_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise UserError(f"theta must lie above 0 and be at most 1, got {self.theta}.")

    def init(self, x: PyTree, y: PyTree) -> MimeState:
        base = self.server.init(x, y)
        h = trees.host_zeros(Point(*base[:3]))
        return MimeState(base, h, self.remembered(base), jnp.zeros(()), jnp.zeros(()))

    def round(self, state: MimeState, federation: Federation, key: jax.Array) -> MimeState:
        """Sum what clients send, and move along the direction with rho gamma."""
        cohort = federation.cohort(key)
        sent, norm = federation.sum(self.mimefbo_step, self.payload(state), cohort, key)
        m, h = self.directions(state, sent, federation, len(cohort.ids))
        rho = mean_work(federation, cohort, key, norm, state)
        base = self.server.advance(state.base, scale(rho, m), self.radius)
        counts = state.norm_sum + norm, state.norm_count + 1
        return MimeState(base, h, self.remembered(state.base), *counts)

    def payload(self, state: MimeState) -> tuple[PyTree, ...]:
        """Return what the server sends."""
        return self.point(state), state.h

    @abstractmethod
    def directions(
        self, state: MimeState, sent: Point[PyTree], federation: Federation, size: int
    ) -> tuple[Point[PyTree], Point[PyTree]]:
        """Return m, along which the server moves, and the new h, from a sum over a cohort."""

    def remembered(self, base: State) -> Any:
        """Return what the server keeps of an iterate for the next round."""
        return ()

    @client_step
    @abstractmethod
    def mimefbo_step(self, payload: PyTree, client: Client) -> Any:
        """Return what the client sends of its direction, and ||a_i||_1."""


def mean_direction(
    draw: Draw,
    z: Point[PyTree],
    h: Point[PyTree],
    client: Client,
    eta: Point[PyTree],
    own: Point[PyTree] | None = None,
) -> Point[PyTree]:
    """Return the mean of D_i, weighted with a_k / ||a||_1, over tau_i corrected steps from z.

    Args:
        draw: D_i on a batch.
        z: the start.
        h: the cohort's direction.
        client: its batches and local work.
        eta: its step sizes.
        own: the client's own direction, to be replaced by h; None for D_i(z) on the step's batch.
    """
    plan = client.plan

    def at(k: Scalar, z: Point[PyTree]) -> Point[PyTree]:
        return draw(z, client, jax.random.fold_in(client.key, k))

    def moved(change: Point[PyTree], d: Point[PyTree]) -> Point[PyTree]:
        parts = zip(kept(plan, change), eta, d, strict=True)
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
