"""ShroFBO: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient
Federated Bilevel Learning", NeurIPS 2023, Section 4.

SimFBO for clients that do unequal amounts of local work. Client i sends h_i = q_i / ||a_i||_1 and
||a_i||_1; the server steps with rho * gamma, rho = sum_j p_j ||a_j||_1. So no client counts for
more than p_i, and if all ||a_i||_1 are equal the iterates are SimFBO's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import (
    Server,
    State,
    drawn_directions,
    local_steps,
    scale,
    server_side,
)
from simfbo.algorithms._private import private_lower
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.algorithms._work import mean_work
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar


class ShroState(NamedTuple):
    """SimFBO's state and the estimates of rho seen so far: their sum and number."""

    base: State
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


@with_settings(private=True)
def shrofbo(
    problem: BilevelProblem,
    local: Point[float],
    server: Server | None = None,
    radius: float | None = None,
    independent_batches: bool = False,
) -> Algorithm:
    """ShroFBO, for clients that do unequal amounts of local work; arguments as for `simfbo`.

    rho is exact where the server assigns the local work or everyone takes part. Otherwise it is the
    mean of the cohorts' estimates over *earlier* rounds (1 in the first): this round's own estimate
    is correlated with its h and would bring the bias back.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = shrofbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    gamma = local if server is None else server
    if problem.lower_level == "private":
        return private_lower(problem, local, gamma, radius, independent_batches, normalised=True)
    shrofbo_step = _client_step(problem, independent_batches)
    init_base, advance_base = server_side(gamma, radius)

    def init(x: PyTree, y: PyTree) -> ShroState:
        return ShroState(init_base(x, y), jnp.zeros(()), jnp.zeros(()))

    def round(state: ShroState, federation: Federation, key: jax.Array) -> ShroState:
        cohort = federation.cohort(key)
        h, norm = federation.sum(shrofbo_step, Point(*state.base[:3]), cohort, key, local)
        return advance(state, h, norm, mean_work(federation, cohort, key, norm, state))

    def advance(state: ShroState, h: Point[PyTree], norm: jax.Array, rho: Scalar) -> ShroState:
        base = advance_base(state.base, scale(rho, h))
        return ShroState(base, state.norm_sum + norm, state.norm_count + 1)

    drift = {"exact at any local step": "ShroFBO's clients drift apart the more the larger eta is."}
    residuals = {"shrofbo_step": "xyv"}
    return Algorithm("ShroFBO", init, round, (shrofbo_step,), drift, residuals)


@once_per_problem
def _client_step(problem: BilevelProblem, independent_batches: bool) -> ClientStep:
    draw = drawn_directions(problem, independent_batches)

    def shrofbo_step(at: Point[PyTree], client: Client) -> tuple[Point[PyTree], jax.Array]:
        norm = client.plan.norm
        return trees.scale(1 / norm, local_steps(draw, at, client)), jnp.asarray(norm)

    return shrofbo_step
