"""ShroFBO: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient
Federated Bilevel Learning", NeurIPS 2023, Section 4.

SimFBO for clients that do unequal amounts of local work. Client i sends h_i = q_i / ||a_i||_1 and
||a_i||_1; the server steps with rho * gamma, rho = sum_j p_j ||a_j||_1. So nobody counts for more
than p_i, and where all ||a_i||_1 are equal the iterates are SimFBO's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._simfbo import (
    Server,
    State,
    Steps,
    drawn_directions,
    local_steps,
    server_side,
)
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.core.sampling import Cohort


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


def shrofbo(
    problem: BilevelProblem,
    local: Steps,
    server: Server | Steps | None = None,
    radius: float | None = None,
    independent_batches: bool = False,
) -> Algorithm:
    """Return ShroFBO; the arguments are those of `simfbo`.

    rho is exact where the server assigns the local work or everyone takes part. Otherwise it is the
    mean of the cohorts' estimates over *earlier* rounds (1 in the first): this round's own estimate
    is correlated with its h and would bring the bias back.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = shrofbo(quadratic().problem, Steps(y=0.2, v=0.1, x=0.05), radius=10.0)
    """
    steps = local_steps(drawn_directions(problem, independent_batches), local)
    init_base, advance_base = server_side(local if server is None else server, radius)

    def shrofbo_step(payload: Point, client: Client) -> tuple[Point, jax.Array]:
        norm = client.coefs.norm
        return trees.scale(1 / norm, steps(payload, client)), jnp.asarray(norm)

    def init(x: PyTree, y: PyTree) -> ShroState:
        return ShroState(init_base(x, y), jnp.zeros(()), jnp.zeros(()))

    def round(state: ShroState, federation: Federation, key: jax.Array) -> ShroState:
        cohort = federation.cohort(key)
        h, norm = federation.aggregate(shrofbo_step, Point(*state.base[:3]), cohort, key)
        rho = federation.mean_norm(key)
        if rho is None:
            rho = norm if _complete(cohort, federation.n) else earlier_mean(state)
        return advance(state, h, norm, rho)

    @jax.jit
    def advance(state: ShroState, h: Point, norm: jax.Array, rho: jax.Array) -> ShroState:
        base = advance_base(state.base, trees.scale(rho, h))
        return ShroState(base, state.norm_sum + norm, state.norm_count + 1)

    return Algorithm("ShroFBO", init, round, (shrofbo_step,))


def earlier_mean(state: ShroState) -> jax.Array:
    """Return the mean estimate of rho over earlier rounds; 1 before there is any."""
    return jnp.where(state.norm_count > 0, state.norm_sum / jnp.maximum(state.norm_count, 1), 1.0)


def _complete(cohort: Cohort, n: int) -> bool:
    """Return whether every client takes part, once."""
    return len(cohort.ids) == len(np.unique(cohort.ids)) == n
