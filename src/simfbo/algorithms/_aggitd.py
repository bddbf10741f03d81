"""FBO-AggITD: Xiao, Ji, "Communication-Efficient Federated Hypergradient Computation via Aggregated
Iterative Differentiation", ICML 2023.

The products with the Hessian travel with the messages of the K lower rounds, so the hypergradient
needs no loop of its own.
"""

import jax

from simfbo.algorithms._common import (
    add,
    add_scaled,
    draw_terms,
    oracles,
    require_counts,
    scale,
    start,
)
from simfbo.algorithms._fednest import local_drifts
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree, grad_upper_x, mixed


@with_settings
def aggitd(problem: BilevelProblem, steps: Point[float], lower_rounds: int = 5) -> Algorithm:
    """FBO-AggITD, which solves the linear system while it updates y.

    Q is drawn uniformly from {0..K-1}. For t = 0 .. K-1, with lambda the step of v:

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
        The algorithm; the state's v is that of its last iteration.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = aggitd(quadratic().problem, Point(x=0.05, y=0.2, v=0.3), lower_rounds=10)
    """
    require_counts(lower_rounds=lower_rounds)
    ask = oracles(problem)
    lower_drift, upper_drift = local_drifts(problem)
    lower_and_upper_grad, lower_grad_and_product, direct, indirect = _client_steps(problem)

    def round(state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        x, y, z = state
        keys = iter(jax.random.split(key, 2 * lower_rounds + 3))
        first = draw_terms(key, lower_rounds)
        for t in range(lower_rounds):
            cohort = federation.cohort(key := next(keys))
            if t < first:
                q = federation.sum(ask.lower_grad, (x, y), cohort, key)
            elif t == first:
                q = federation.sum(lower_and_upper_grad, (x, y), cohort, key)
                z = q.v
            else:
                q = federation.sum(lower_grad_and_product, (x, y, z), cohort, key)
                z = add_scaled(z, -steps.v, q.v)
            change = federation.sum(lower_drift, (x, y, q.y), cohort, next(keys), steps)
            y = add(add_scaled(y, -steps.y, q.y), change.y)
        v = scale(steps.v * lower_rounds, z)
        cohort = federation.cohort(key := next(keys))
        cross = federation.sum(indirect, (x, y, v), cohort, key)
        h = add_scaled(federation.sum(direct, (x, y), cohort, next(keys)), -1.0, cross).x
        change = federation.sum(upper_drift, (x, y, h), cohort, next(keys), steps)
        return Point(add(add_scaled(x, -steps.x, h), change.x), y, v)

    client_steps = (ask.lower_grad, lower_and_upper_grad, lower_grad_and_product, lower_drift,
                    direct, indirect, upper_drift)  # fmt: skip
    violations = _VIOLATIONS if lower_rounds > 1 else {}
    with_lower = ("lower_grad", "lower_and_upper_grad", "lower_grad_and_product")
    residuals: dict[str, str] = dict.fromkeys(with_lower, "y")
    return Algorithm("FBO-AggITD", start, round, client_steps, violations, residuals)


@once_per_problem
def _client_steps(problem: BilevelProblem) -> tuple[ClientStep, ...]:
    """Return the client steps that compute two things at once, and the two parts of h."""
    ask = oracles(problem)

    def lower_and_upper_grad(payload: PyTree, client: Client) -> Point[PyTree]:
        lower, upper = _two_clients(client)
        return ask.lower_grad(payload, lower)._replace(v=ask.upper_grad_y(payload, upper).v)

    def lower_grad_and_product(payload: PyTree, client: Client) -> Point[PyTree]:
        lower, other = _two_clients(client)
        return ask.hessian_product(payload, other)._replace(y=ask.lower_grad(payload[:2], lower).y)

    def direct(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y = payload
        return Point(x=grad_upper_x(problem, x, y, client.data.upper_batch(client.key)))

    def indirect(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y, v = payload
        return Point(x=mixed(problem, x, y, v, client.data.lower_batch(client.key)))

    return lower_and_upper_grad, lower_grad_and_product, direct, indirect


def _two_clients(client: Client) -> tuple[Client, Client]:
    """Return the client twice, with different keys, so that the two parts use different batches."""
    first, second = jax.random.split(client.key)
    return client._replace(key=first), client._replace(key=second)


_JITTER = "Q is drawn in every iteration, so v is right only in the mean and x jitters."
_VIOLATIONS = {
    "ledger is cost": "How many messages carry a second vector depends on the draw of Q.",
    "sends changes": _JITTER,
    "finds the solution": _JITTER,
    "unequal local work": _JITTER,
}
