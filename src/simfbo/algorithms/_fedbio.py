"""FedBiO: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, Algorithm 1 (global lower problem).

One communication round for the local steps of all three variables at once; the server averages the
changes. SimFBO's ancestor: server steps equal to the local ones, and v projected on the client.
"""

from typing import Any

import jax

from simfbo.algorithms._common import add, require_plain, start
from simfbo.algorithms._simfbo import Steps, drawn_directions, project
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, Federation
from simfbo.core.problem import BilevelProblem, Point


def fedbio(problem: BilevelProblem, steps: Steps, radius: float | None = None) -> Algorithm:
    """Return FedBiO; its authors let every client take part in every round.

    Client i takes tau_i steps on all three variables at once, from the iterates at k,

        y_i -= eta_y d_y,    v_i = Proj_r(v_i - eta_v d_v),    x_i -= eta_x d_x

    with SimFBO's three directions, and the server adds the mean of the changes to (x, y, v).

    Args:
        problem: the two losses.
        steps: eta for y, v and x.
        radius: r of the clients' projection of v_i; None for no projection.

    Returns:
        The algorithm.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedbio(quadratic().problem, Steps(y=0.2, v=0.1, x=0.05), radius=10.0)
    """
    draw = drawn_directions(problem)

    def fedbio_step(payload: Point, client: Client) -> Point:
        require_plain(client)

        def step(k: Any, at: Point) -> Point:
            d = draw(at, client, jax.random.fold_in(client.key, k))
            v, _ = project(trees.add_scaled(at.v, -steps.v, d.v), radius)
            x, y = trees.add_scaled(at.x, -steps.x, d.x), trees.add_scaled(at.y, -steps.y, d.y)
            return Point(x, y, v)

        return trees.subtract(jax.lax.fori_loop(0, client.coefs.tau, step, payload), payload)

    def round(state: Point, federation: Federation, key: jax.Array) -> Point:
        return add(state, federation.aggregate(fedbio_step, state, federation.cohort(key), key))

    bias = "FedBiO adds what clients did, so those who take more local steps count for more."
    return Algorithm("FedBiO", start, round, (fedbio_step,), {"unequal local work": bias})
