"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017.

Trains y alone, at a fixed x, as one does without an upper problem or to try values of x one after
the other. It is a baseline for the other methods, not a bilevel method itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import Rule, local_steps, server_step
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree, grad_lower_y

_VIOLATIONS = {
    "finds the solution": "FedAvg trains the lower problem only: x stays where it starts.",
    "unequal local work":
        "FedAvg weighs clients by p_i ||a_i||_1, so unequal local work moves its solution.",
}  # fmt: skip


class AvgState(NamedTuple):
    """The fixed x, y and the server's optimiser state."""

    x: PyTree
    y: PyTree
    server: PyTree


@with_settings
def fedavg(
    problem: BilevelProblem,
    local: float | Point[float],
    server: Rule | Point[Rule] | None = None,
) -> Algorithm:
    """FedAvg on the lower problem, at a fixed x: a baseline, not a bilevel method.

    Client i takes tau_i steps  y_i -= eta grad_y g_i(x, y_i)  and sends q_i, the sum of its
    gradients; the server does  y -= gamma sum_C p~_i q_i.

    Args:
        problem: the two losses; the upper one is not used.
        local: eta, the clients' step size; of a `Point`, that for y.
        server: gamma, or an Optax transformation; the same as `local` by default.

    Returns:
        The algorithm; x does not change.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedavg(quadratic().problem, 0.2)
    """
    fedavg_step, rule = _client_step(problem), local if server is None else server
    eta = local.y if isinstance(local, Point) else local
    start, move = server_step(rule.y if isinstance(rule, Point) else rule)

    def init(x: PyTree, y: PyTree) -> AvgState:
        x, y = jax.tree.map(jnp.asarray, (x, y))
        return AvgState(x, y, start(y))

    def round(state: AvgState, federation: Federation, key: jax.Array) -> AvgState:
        cohort, at = federation.cohort(key), Point(x=state.x, y=state.y)
        q = federation.sum(fedavg_step, at, cohort, key, Point(y=eta)).y
        return AvgState(state.x, *move(q, state.server, state.y))

    return Algorithm("FedAvg", init, round, (fedavg_step,), _VIOLATIONS, {"fedavg_step": "y"})


@once_per_problem
def _client_step(problem: BilevelProblem) -> ClientStep:
    def fedavg_step(payload: Point[PyTree], client: Client) -> Point[PyTree]:
        def draw(at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
            batch = client.data.lower_batch(key)
            return Point(y=grad_lower_y(problem, payload.x, at.y, batch))

        return local_steps(draw, Point(y=payload.y), client)

    return fedavg_step
