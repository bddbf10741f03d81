"""ShroFBO: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient
Federated Bilevel Learning", NeurIPS 2023, Section 4.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import (
    MeanLoop,
    Server,
    State,
    local_steps,
)
from simfbo.algorithms._personal import PersonalShroFBO
from simfbo.core import BilevelProblem, Client, Federation, Method, Point, client_step, trees
from simfbo.core.problem import PyTree
from simfbo.ranges import Positive


class ShroState(NamedTuple):
    """SimFBO's state, and sum and number of the estimates of rho."""

    base: State
    norm_sum: jax.Array
    norm_count: jax.Array


class ShroFBO(MeanLoop):
    """ShroFBO for a shared lower level; `shrofbo` has the equations."""

    known_violations: ClassVar = {
        "exact at any local step": "The client drift of ShroFBO grows with eta."
    }
    residuals: ClassVar = {"shrofbo_step": "xyv"}

    def init(self, x: PyTree, y: PyTree) -> ShroState:
        return ShroState(self.server.init(x, y), jnp.zeros(()), jnp.zeros(()))

    def round(self, state: ShroState, federation: Federation, key: jax.Array) -> ShroState:
        cohort = federation.cohort(key)
        h, norm = federation.sum(self.shrofbo_step, self.point(state), cohort, key)
        return self.advance(state, h, norm, federation, cohort, key)

    @client_step
    def shrofbo_step(self, at: Point[PyTree], client: Client) -> tuple[Point[PyTree], jax.Array]:
        """Send h_i = q_i / ||a_i||_1, and ||a_i||_1."""
        q, norm = local_steps(self.draw, at, client, self.local), client.plan.norm
        return trees.scale(1 / norm, q), jnp.asarray(norm)


def shrofbo(
    problem: BilevelProblem,
    local: Point[float],
    server: Server | None = None,
    radius: Positive | None = None,
    independent_batches: bool = False,
) -> Method:
    """ShroFBO, for unequal local work; arguments as for `simfbo`.

    Client i sends h_i = q_i / ||a_i||_1 and ||a_i||_1; the server steps with rho gamma, where
    rho = sum_j p_j ||a_j||_1. So the weight of client i is p_i, and if all ||a_i||_1 are equal the
    iterates are those of SimFBO.

    rho is exact if the server assigns the local work or all clients take part. Otherwise it is the
    mean of the cohorts' estimates over *earlier* rounds (1 in the first): the estimate of this
    round is correlated with its h and would reintroduce the bias.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = shrofbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    kind = PersonalShroFBO if problem.lower_level == "private" else ShroFBO
    return kind(problem, local, local if server is None else server, radius, independent_batches)
