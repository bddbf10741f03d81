"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017.

Trains y alone, at a fixed x, as one does without an upper problem or to try values of x one after
the other. It is a baseline for the other methods, not a bilevel method itself.
"""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from simfbo.algorithms._common import Rule, ServerStep, local_steps, require_shared
from simfbo.core.federation import Client, Federation
from simfbo.core.method import Method, client_step
from simfbo.core.problem import BilevelProblem, Point, PyTree, grad_lower_y


class AvgState(NamedTuple):
    """The fixed x, y and the server's optimiser state."""

    x: PyTree
    y: PyTree
    server: PyTree


class FedAvg(Method):
    """FedAvg on the lower problem; `fedavg` has the equations."""

    known_violations: ClassVar = {
        "finds the solution": "FedAvg trains the lower problem only: x stays where it starts.",
        "unequal local work": "FedAvg weighs clients by p_i ||a_i||_1, so unequal local work "
        "moves its solution.",
    }
    residuals: ClassVar = {"fedavg_step": "y"}

    problem: BilevelProblem = eqx.field(static=True, converter=require_shared)
    local: float
    server: ServerStep = eqx.field(converter=ServerStep.of)

    def init(self, x: PyTree, y: PyTree) -> AvgState:
        x, y = jax.tree.map(jnp.asarray, (x, y))
        return AvgState(x, y, self.server.init(y))

    def round(self, state: AvgState, federation: Federation, key: jax.Array) -> AvgState:
        """Sum the clients' gradients, and move y along them."""
        cohort, at = federation.cohort(key), Point(x=state.x, y=state.y)
        q = federation.sum(self.fedavg_step, at, cohort, key).y
        return AvgState(state.x, *self.server.move(q, state.server, state.y))

    @client_step
    def fedavg_step(self, payload: Point[PyTree], client: Client) -> Point[PyTree]:
        """Return q_i, the weighted sum of the gradients of tau_i local steps."""

        def draw(at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
            batch = client.data.lower_batch(key)
            return Point(y=grad_lower_y(self.problem, payload.x, at.y, batch))

        return local_steps(draw, Point(y=payload.y), client, Point(y=self.local))


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

    Returns:
        The method; x does not change.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedavg(quadratic().problem, 0.2)
    """
    rule = local if server is None else server
    eta = local.y if isinstance(local, Point) else local
    return FedAvg(problem, eta, rule.y if isinstance(rule, Point) else rule)
