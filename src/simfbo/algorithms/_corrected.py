"""MimeFBO and its variants: local steps corrected by the cohort's direction."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import Draw, MeanLoop, State, add_direction, moved, zero_sum
from simfbo.core import Client, Point, trees
from simfbo.core.problem import PyTree, Scalar
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


class CorrectedLoop(MeanLoop):
    """A method with local steps corrected by h, an estimate of the cohort's direction.

    Attributes:
        theta: the weight of new directions in h, between 0 and 1.
    """

    name = "MimeFBO"

    theta: float = 1.0

    def __check_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise UserError(f"theta must lie above 0 and be at most 1, got {self.theta}.")

    def init(self, x: PyTree, y: PyTree) -> MimeState:
        base = self.server.init(x, y)
        h = trees.host_zeros(Point(*base[:3]))
        return MimeState(base, h, (), jnp.zeros(()), jnp.zeros(()))


def mean_direction(
    draw: Draw,
    z: Point[PyTree],
    h: Point[PyTree],
    client: Client,
    eta: Point[PyTree],
    own: Point[PyTree] | None = None,
) -> Point[PyTree]:
    """Compute the mean of D_i, weighted by a_k / ||a||_1, over tau_i corrected steps from z.

    In the steps h replaces `own`, the client's direction; None for D_i(z) on the step's batch.
    """
    plan = client.plan

    def at(k: Scalar, z: Point[PyTree]) -> Point[PyTree]:
        return draw(z, client, jax.random.fold_in(client.key, k))

    def step(k: Scalar, carry: Any, d: Point[PyTree], base: Point[PyTree]) -> Any:
        """Apply the local rule twice: to d for the mean, and to its correction for the iterates."""
        return add_direction(plan, k, (d, trees.add(trees.subtract(d, base), h)), *carry)

    def next_step(k: Scalar, carry: Any) -> Any:
        d = at(k, moved(z, eta, carry[0][1]))
        return step(k, carry, d, at(k, z) if own is None else own)

    first = at(0, z)
    if plan.steps.shape[-1] == 1:
        return first
    begun = step(0, zero_sum(plan, (z, z)), first, first if own is None else own)
    (total, _), _ = jax.lax.fori_loop(1, plan.tau, next_step, begun)
    return trees.scale(1 / jnp.asarray(plan.norm, float), total)
