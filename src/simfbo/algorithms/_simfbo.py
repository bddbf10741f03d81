"""SimFBO: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient
Federated Bilevel Learning", NeurIPS 2023, Algorithm 1.
"""

from typing import ClassVar

import jax

from simfbo.algorithms._common import (
    Server,
    SingleLoop,
    State,
    local_steps,
)
from simfbo.algorithms._personal import BIASED, PersonalSimFBO
from simfbo.core import BilevelProblem, Client, Federation, Method, Point, client_step
from simfbo.core.problem import PyTree
from simfbo.ranges import Positive


class SimFBO(SingleLoop):
    """SimFBO for a shared lower level; `simfbo` has the equations."""

    known_violations: ClassVar = BIASED
    residuals: ClassVar = {"simfbo_step": "xyv"}

    def init(self, x: PyTree, y: PyTree) -> State:
        return self.server.init(x, y)

    def round(self, state: State, federation: Federation, key: jax.Array) -> State:
        q = federation.sum(self.simfbo_step, self.point(state), federation.cohort(key), key)
        return self.server.advance(state, q, self.radius)

    @client_step
    def simfbo_step(self, at: Point[PyTree], client: Client) -> Point[PyTree]:
        """Send q_i, the weighted sum of the directions of tau_i local steps."""
        return local_steps(self.draw, at, client, self.local)


def simfbo(
    problem: BilevelProblem,
    local: Point[float],
    server: Server | None = None,
    radius: Positive | None = None,
    independent_batches: bool = False,
) -> Method:
    """SimFBO, for equal local work on all clients; one exchange per iteration.

    Client i, for k = 0 .. tau_i - 1, from the iterates at k:

        (x_i, y_i, v_i) -= a_k (eta_x d_x, eta_y d_y, eta_v d_v),     q += a_k d

    and the server, with p~_i the cohort's weights:

        x -= gamma_x sum_C p~_i q_x,i;   y -= gamma_y sum_C p~_i q_y,i;
        v = Proj_r(v - gamma_v sum_C p~_i q_v,i)

    With unequal local work, the solution is biased towards clients with more local steps: use
    `shrofbo` instead.

    Args:
        problem: the two losses.
        local: eta, the clients' step sizes; with one local step they have no effect.
        server: gamma, as step sizes or Optax transformations, or as one transformation of the three
            variables together; the same as `local` by default.
        radius: r of the projection of v on the server; None for no projection.
        independent_batches: sample separate batches for the three directions, as in the paper, at
            about 1.5 times the cost; by default they share one lower and one upper batch.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = simfbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    kind = PersonalSimFBO if problem.lower_level == "private" else SimFBO
    return kind(problem, local, local if server is None else server, radius, independent_batches)
