"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017.

Trains y alone, at a fixed x: what somebody does who has no upper problem, or tries values of x one
after the other. It is what the other methods are measured against, not a bilevel method.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from simfbo.algorithms._simfbo import Steps, local_steps
from simfbo.core.federation import Algorithm, Client, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree, grad_lower_y


class AvgState(NamedTuple):
    """The fixed x, y and the server's optimiser state."""

    x: PyTree
    y: PyTree
    server: Any


def fedavg(
    problem: BilevelProblem,
    local: float,
    server: float | optax.GradientTransformation | None = None,
) -> Algorithm:
    """Return FedAvg on the lower problem.

    Client i takes tau_i steps  y_i -= eta grad_y g_i(x, y_i)  and sends q_i, the sum of its
    gradients; the server does  y -= gamma sum_C p~_i q_i.

    Args:
        problem: the two losses; the upper one is not used.
        local: eta, the clients' step size.
        server: gamma, or an Optax transformation; the same as `local` by default.

    Returns:
        The algorithm; x stays what it was.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedavg(quadratic().problem, 0.2)
    """
    gamma = local if server is None else server
    rule = gamma if isinstance(gamma, optax.GradientTransformation) else optax.sgd(gamma)

    def fedavg_step(payload: Point, client: Client) -> Point:
        def draw(at: Point, client: Client, key: jax.Array) -> Point:
            batch = client.data.lower_batch(key)
            return Point(y=grad_lower_y(problem, payload.x, at.y, batch))

        return local_steps(draw, Steps(local, local, local))(Point(y=payload.y), client)

    def init(x: PyTree, y: PyTree) -> AvgState:
        x, y = jax.tree.map(jnp.asarray, (x, y))
        return AvgState(x, y, rule.init(y))

    def round(state: AvgState, federation: Federation, key: jax.Array) -> AvgState:
        cohort = federation.cohort(key)
        payload = Point(x=state.x, y=state.y)
        return advance(state, federation.aggregate(fedavg_step, payload, cohort, key).y)

    @jax.jit
    def advance(state: AvgState, q: PyTree) -> AvgState:
        updates, opt = rule.update(q, state.server, state.y)
        return AvgState(state.x, optax.apply_updates(state.y, updates), opt)

    bias = "FedAvg weighs clients by p_i ||a_i||_1, so unequal local work moves its solution."
    return Algorithm("FedAvg", init, round, (fedavg_step,), {"unequal local work": bias})
