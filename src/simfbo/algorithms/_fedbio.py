"""FedBiO: Li, Huang, Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023, Algorithm 1 (global lower problem).

One communication round for the local steps of all three variables at once; the server averages the
changes. SimFBO's ancestor: server steps equal to the local ones, and v projected on the client.
"""

import jax

from simfbo.algorithms._common import add, drawn_directions, project, require_plain, start
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar


@with_settings
def fedbio(problem: BilevelProblem, steps: Point[float], radius: float | None = None) -> Algorithm:
    """FedBiO; its authors let every client take part in every round.

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
        >>> algorithm = fedbio(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    fedbio_step = _client_step(problem, radius)

    def round(state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        return add(state, federation.sum(fedbio_step, state, federation.cohort(key), key, steps))

    bias = "FedBiO adds what clients did, so those who take more local steps count for more."
    return Algorithm(
        "FedBiO", start, round, (fedbio_step,), {"unequal local work": bias}, {"fedbio_step": "yv"}
    )


@once_per_problem
def _client_step(problem: BilevelProblem, radius: float | None) -> ClientStep:
    draw = drawn_directions(problem)

    def fedbio_step(payload: Point[PyTree], client: Client) -> Point[PyTree]:
        require_plain(client)
        eta = client.eta

        def step(k: Scalar, at: Point[PyTree]) -> Point[PyTree]:
            d = draw(at, client, jax.random.fold_in(client.key, k))
            v, _ = project(trees.add_scaled(at.v, -eta.v, d.v), radius)
            x, y = trees.add_scaled(at.x, -eta.x, d.x), trees.add_scaled(at.y, -eta.y, d.y)
            return Point(x, y, v)

        return trees.subtract(jax.lax.fori_loop(0, client.plan.tau, step, payload), payload)

    return fedbio_step
