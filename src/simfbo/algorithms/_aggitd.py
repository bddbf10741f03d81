"""FBO-AggITD: Xiao, Ji, "Communication-Efficient Federated Hypergradient Computation via Aggregated
Iterative Differentiation", ICML 2023.
"""

from typing import ClassVar

import equinox as eqx
import jax

from simfbo.algorithms._common import SteppedMethod, add, add_scaled, scale
from simfbo.algorithms._nested import Drifts, Oracles, draw_terms, inexact, require_counts
from simfbo.core.federation import Client, ClientStep, Federation
from simfbo.core.method import Method, client_step, marked
from simfbo.core.problem import BilevelProblem, Point, PyTree, grad_upper_x, mixed
from simfbo.ranges import Count


class AggregatedOracles(eqx.Module):
    """Client steps with two results on different batches, and those of the two parts of h."""

    problem: BilevelProblem = eqx.field(static=True)

    @client_step
    def lower_and_upper_grad(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y) -> y, v: grad_y g_i and grad_y f_i."""
        (lower, upper), ask = _two_clients(client), Oracles(self.problem)
        return ask.lower_grad(payload, lower)._replace(v=ask.upper_grad_y(payload, upper).v)

    @client_step
    def lower_grad_and_product(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, z) -> y, v: grad_y g_i and grad^2_yy g_i z."""
        (lower, other), ask = _two_clients(client), Oracles(self.problem)
        return ask.hessian_product(payload, other)._replace(y=ask.lower_grad(payload[:2], lower).y)

    @client_step
    def direct(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y) -> x: grad_x f_i."""
        x, y = payload
        return Point(x=grad_upper_x(self.problem, x, y, client.data.upper_batch(client.key)))

    @client_step
    def indirect(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, v) -> x: grad^2_xy g_i v."""
        x, y, v = payload
        return Point(x=mixed(self.problem, x, y, v, client.data.lower_batch(client.key)))


def _two_clients(client: Client) -> tuple[Client, Client]:
    """Return the client twice, with different keys."""
    first, second = jax.random.split(client.key)
    return client._replace(key=first), client._replace(key=second)


class AggITD(SteppedMethod):
    """FBO-AggITD; `aggitd` has the equations."""

    name = "FBO-AggITD"
    residuals: ClassVar = dict.fromkeys(
        ("lower_grad", "lower_and_upper_grad", "lower_grad_and_product"), "y"
    )

    lower_rounds: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        require_counts(lower_rounds=self.lower_rounds)

    def round(self, state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        (x, y, z), steps, (ask, both, drifts) = state, self.steps, self._modules()
        keys = iter(jax.random.split(key, 2 * self.lower_rounds + 3))
        first = draw_terms(key, self.lower_rounds)
        for t in range(self.lower_rounds):
            cohort = federation.cohort(key := next(keys))
            if t < first:
                q = federation.sum(ask.lower_grad, (x, y), cohort, key)
            elif t == first:
                q = federation.sum(both.lower_and_upper_grad, (x, y), cohort, key)
                z = q.v
            else:
                q = federation.sum(both.lower_grad_and_product, (x, y, z), cohort, key)
                z = add_scaled(z, -steps.v, q.v)
            change = federation.sum(drifts.lower_drift, (x, y, q.y), cohort, next(keys))
            y = add(add_scaled(y, -steps.y, q.y), change.y)
        v = scale(steps.v * self.lower_rounds, z)
        cohort = federation.cohort(key := next(keys))
        cross = federation.sum(both.indirect, (x, y, v), cohort, key)
        direct = federation.sum(both.direct, (x, y), cohort, next(keys))
        h = add_scaled(direct, -1.0, cross).x
        change = federation.sum(drifts.upper_drift, (x, y, h), cohort, next(keys))
        return Point(add(add_scaled(x, -steps.x, h), change.x), y, v)

    def _modules(self) -> tuple[Oracles, AggregatedOracles, Drifts]:
        problem = self.problem
        return Oracles(problem), AggregatedOracles(problem), Drifts(problem, self.steps)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        ask, both, drifts = self._modules()
        return {"lower_grad": ask.lower_grad, **marked(both, drifts)}

    @property
    def known_violations(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> dict[str, str]:
        if self.lower_rounds == 1:
            return {}
        return {
            "ledger is cost": "How many messages carry a second vector depends on the draw of Q.",
            **inexact(
                "Q is drawn in every iteration, so v is right only in the mean and x jitters."
            ),
        }


def aggitd(problem: BilevelProblem, steps: Point[float], lower_rounds: Count = 5) -> Method:
    """FBO-AggITD, which solves the linear system while it updates y.

    Q is sampled uniformly from {0..K-1}. For t = 0 .. K-1, with lambda the step of v:

        q = sum_C w_i grad_y g_i(x, y^t), and in the same message
            z = sum_C w_i grad_y f_i(x, y^t)  at t = Q,
            z -= lambda sum_C w_i grad^2_yy g_i(x, y^t) z  at t > Q;
        tau_i variance-reduced local steps, as FedNest's FedInn, make y^{t+1}.

    Then v = lambda K z, so that over the draw of Q it is the Neumann series with K terms, and

        h = sum_C w_i grad_x f_i(x, y^K) - sum_C w_i grad^2_xy g_i(x, y^K) v

    in two messages, and x takes FedNest's FedOut steps.

    Args:
        problem: the two losses.
        steps: beta for y, alpha for x, and for v the step lambda, which must stay below 1 over the
            largest eigenvalue of grad^2_yy g.
        lower_rounds: K.

    Returns:
        The method; the state's v is that of its last iteration.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = aggitd(quadratic().problem, Point(x=0.05, y=0.2, v=0.3), lower_rounds=10)
    """
    return AggITD(problem, steps, lower_rounds)
