"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017.
"""

from typing import Any, ClassVar

import jax

from simfbo.algorithms._common import (
    BilevelMethod,
    Rule,
    ServerStep,
    State,
    local_steps,
    start,
    weighs_work,
)
from simfbo.core import BilevelProblem, Client, Federation, Method, Point, client_step, grad_lower_y


class FedAvg(BilevelMethod):
    """FedAvg; `fedavg` has the equations."""

    known_violations: ClassVar = {
        "finds the solution": "FedAvg trains the lower problem only: x stays where it starts.",
        **weighs_work("FedAvg"),
    }
    residuals: ClassVar = {"fedavg_step": "y"}

    local: float
    server: ServerStep

    def init(self, x: Any, y: Any) -> State:
        x, y, _ = start(x, y)
        return State(x, y, server=self.server.init(y))

    def round(self, state: State, federation: Federation, key: jax.Array) -> State:
        q = federation.sum(self.fedavg_step, self.point(state), federation.cohort(key), key)
        y, server = self.server.move(q.y, state.server, state.y)
        return State(state.x, y, server=server)

    @client_step
    def fedavg_step(self, at: Point[Any], client: Client) -> Point[Any]:
        """Send q_i, the weighted sum of the gradients of tau_i local steps."""

        def draw(z: Point[Any], client: Client, key: jax.Array) -> Point[Any]:
            return Point(y=grad_lower_y(self.problem, at.x, z.y, client.data.lower_batch(key)))

        return local_steps(draw, Point(y=at.y), client, Point(y=self.local))


def fedavg(
    problem: BilevelProblem,
    local: float | Point[float],
    server: Rule | Point[Rule] | None = None,
) -> Method:
    """FedAvg on the lower problem, at a fixed x: a baseline, not a bilevel method.

    Client i takes tau_i steps  y_i -= eta grad_y g_i(x, y_i)  and sends q_i, the sum of its
    gradients; the server does  y -= gamma sum_C p~_i q_i.

    Args:
        problem: the two losses; the upper one is not used.
        local: eta, the clients' step size; of a `Point`, that for y.
        server: gamma, or an Optax transformation; the same as `local` by default.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedavg(quadratic().problem, 0.2)
    """
    rule = local if server is None else server
    eta = local.y if isinstance(local, Point) else local
    return FedAvg(problem, eta, ServerStep.of(rule.y if isinstance(rule, Point) else rule))
