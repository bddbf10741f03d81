"""FedBiO: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, Algorithm 1 (global lower problem).
"""

from typing import ClassVar

import jax

from simfbo.algorithms._common import (
    ProjectedMethod,
    add,
    adds_changes,
    moved,
    require_plain,
)
from simfbo.core import BilevelProblem, Client, Federation, Method, Point, client_step, trees
from simfbo.core.problem import PyTree, Scalar
from simfbo.ranges import Positive


class FedBiO(ProjectedMethod):
    """FedBiO; `fedbio` has the equations."""

    known_violations: ClassVar = adds_changes("FedBiO")
    residuals: ClassVar = {"fedbio_step": "yv"}

    def round(self, state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        return add(state, federation.sum(self.fedbio_step, state, federation.cohort(key), key))

    @client_step
    def fedbio_step(self, start: Point[PyTree], client: Client) -> Point[PyTree]:
        """Send the change of x, y and v over tau_i local steps."""
        require_plain(client)

        def step(k: Scalar, at: Point[PyTree]) -> Point[PyTree]:
            d = self.draw(at, client, jax.random.fold_in(client.key, k))
            return moved(at, self.steps, d, self.radius)

        return trees.subtract(jax.lax.fori_loop(0, client.plan.tau, step, start), start)


def fedbio(problem: BilevelProblem, steps: Point[float], radius: Positive | None = None) -> Method:
    """FedBiO; in the paper with full participation.

    Client i takes tau_i steps on all three variables at once, from the iterates at k,

        y_i -= eta_y d_y,    v_i = Proj_r(v_i - eta_v d_v),    x_i -= eta_x d_x

    with SimFBO's three directions, and the server adds the mean of the changes to (x, y, v).

    Args:
        problem: the two losses.
        steps: eta for y, v and x.
        radius: r of the clients' projection of v_i; None for no projection.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedbio(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    return FedBiO(problem, steps, radius)
