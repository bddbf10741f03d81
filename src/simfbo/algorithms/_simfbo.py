"""SimFBO: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient
Federated Bilevel Learning", NeurIPS 2023, Algorithm 1.

One communication round per iteration. The server sends (x, y, v); client i takes tau_i steps on all
three at once and returns q_i, the weighted sum of its directions; the server applies the cohort's
weighted sum of the q_i with steps of its own and projects v onto a ball.
"""

import jax

from simfbo.algorithms._common import Server, State, drawn_directions, local_steps, server_side
from simfbo.algorithms._private import private_lower
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree


@with_settings(private=True)
def simfbo(
    problem: BilevelProblem,
    local: Point[float],
    server: Server | None = None,
    radius: float | None = None,
    independent_batches: bool = False,
) -> Algorithm:
    """SimFBO, for clients that all do the same amount of local work.

    Client i, for k = 0 .. tau_i - 1, from the iterates at k:

        (x_i, y_i, v_i) -= a_k (eta_x d_x, eta_y d_y, eta_v d_v),     q += a_k d

    and the server, with p~_i the cohort's weights:

        x -= gamma_x sum_C p~_i q_x,i;   y -= gamma_y sum_C p~_i q_y,i;
        v = Proj_r(v - gamma_v sum_C p~_i q_v,i)

    If clients do unequal amounts of local work, those that do more pull the solution towards
    themselves: use `shrofbo` instead.

    Args:
        problem: the two losses.
        local: eta, the clients' step sizes; with one local step they have no effect.
        server: gamma, as step sizes or Optax transformations, or as one transformation that moves
            the three variables together; the same as `local` by default.
        radius: r of the projection of v on the server; None for no projection.
        independent_batches: draw separate batches for the three directions, as the paper writes
            it, at about 1.5 times the cost; by default they share one lower and one upper batch.

    Returns:
        The algorithm.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = simfbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    gamma = local if server is None else server
    if problem.lower_level == "private":
        found = private_lower(problem, local, gamma, radius, independent_batches, normalised=False)
        return found._replace(known_violations=_BIASED)
    simfbo_step = _client_step(problem, independent_batches)
    init, advance = server_side(gamma, radius)

    def round(state: State, federation: Federation, key: jax.Array) -> State:
        cohort = federation.cohort(key)
        at = Point(state.x, state.y, state.v)
        return advance(state, federation.sum(simfbo_step, at, cohort, key, local))

    return Algorithm("SimFBO", init, round, (simfbo_step,), _BIASED, {"simfbo_step": "xyv"})


_BIASED = {
    "unequal local work": "SimFBO weighs clients by p_i ||a_i||_1, so unequal local work moves its "
    "solution.",
    "exact at any local step": "SimFBO's clients drift apart the more the larger eta is.",
}


@once_per_problem
def _client_step(problem: BilevelProblem, independent_batches: bool) -> ClientStep:
    draw = drawn_directions(problem, independent_batches)

    def simfbo_step(at: Point[PyTree], client: Client) -> Point[PyTree]:
        return local_steps(draw, at, client)

    return simfbo_step
