"""FedNest: Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel, Minimax, and
Compositional Optimization", ICML 2022, Algorithms 1 to 4.

Three loops: K rounds of federated SVRG on y (FedInn), N products with the cohort's Hessian for the
linear system (FedIHGP), a federated SVRG step on x (FedOut).
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import (
    Mode,
    Oracles,
    add,
    add_scaled,
    draw_terms,
    drift,
    is_released,
    oracles,
    require_counts,
    scale,
    start,
)
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.ledger import PerClient
from simfbo.core.problem import BilevelProblem, Point, PyTree, grad_lower_y, grad_upper_x
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError

Keys = Iterator[jax.Array]
Series = Callable[[PyTree, PyTree, Federation, Cohort, Keys], PyTree]


@with_settings
def fednest(
    problem: BilevelProblem,
    steps: Point[float],
    lower_rounds: int = 1,
    neumann_terms: int = 5,
    mode: Mode = "paper",
    drawn: bool = False,
    one_upper_step: bool = False,
) -> Algorithm:
    """FedNest, in three nested loops.

        FedInn, K times:  q = sum_C w_i grad_y g_i(x, y);
                          tau_i steps y_i -= (beta/tau_i) [grad_y g_i(x, y_i) - grad_y g_i(x, y) + q];
                          y += -beta q + sum_C w_i (y_i - y + beta q)
        FedIHGP:          p_0 = sum_C w_i grad_y f_i(x, y);   p_j = p_{j-1} - s sum_C w_i H_i p_{j-1};
                          v = s sum_{j=0..N} p_j
        FedOut:           h = sum_C w_i [grad_x f_i - grad^2_xy g_i v];
                          tau_i steps x_i -= (alpha/tau_i) [grad_x f_i(x_i, y) - grad_x f_i(x, y) + h];
                          x += -alpha h + sum_C w_i (x_i - x + alpha h)

    Args:
        problem: the two losses.
        steps: beta for y, alpha for x, and for v the step s = 1/l of the Neumann series, which must
            stay below 1 over the largest eigenvalue of grad^2_yy g.
        lower_rounds: K.
        neumann_terms: N.
        mode: "paper"; or "as_released" for what the published code computes instead: clients
            recurse on their own Hessians and later terms are divided by their number,
            v = s [p_0 + sum_{j=1..N} (1/j) sum_C w_i (I - s H_i)^j p_0], with s the step of x; every
            question to a client is answered from all of its samples.
        drawn: draw the number of products uniformly from {0..N-1} and take N s p_N' for v, the
            other estimator of the paper, in place of the whole sum.
        one_upper_step: take one local step on x, as released, whatever tau_i is.

    Returns:
        The algorithm; the state's v is that of its last iteration.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fednest(quadratic().problem, Point(x=0.1, y=0.2, v=0.3), neumann_terms=10)
    """  # noqa: E501
    require_counts(lower_rounds=lower_rounds, neumann_terms=neumann_terms)
    released = is_released(mode)
    if released and drawn:
        raise UserError("The released series is always summed: use drawn with mode 'paper'.")
    ask = oracles(problem, full=released)
    lower_drift, upper_drift = local_drifts(problem, one_upper_step)
    if released:
        series = _released_series(ask, steps.x, neumann_terms)
    else:
        series = _neumann_series(ask, steps.v, neumann_terms, drawn)

    def round(state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        x, y, _ = state
        keys = iter(jax.random.split(key, 2 * lower_rounds + neumann_terms + 4))
        for _ in range(lower_rounds):
            cohort = federation.cohort(key := next(keys))
            q = federation.sum(ask.lower_grad, (x, y), cohort, key).y
            change = federation.sum(lower_drift, (x, y, q), cohort, next(keys), steps)
            y = add(add_scaled(y, -steps.y, q), change.y)
        cohort = federation.cohort(next(keys))
        v = series(x, y, federation, cohort, keys)
        h = federation.sum(ask.hypergrad, (x, y, v), cohort, next(keys)).x
        change = federation.sum(upper_drift, (x, y, h), cohort, next(keys), steps)
        return Point(add(add_scaled(x, -steps.x, h), change.x), y, v)

    violations = _RELEASED if released else _DRAWN if drawn else {}
    client_steps = (*ask, lower_drift, upper_drift)
    residuals = {"lower_grad": "y", "hypergrad": "x"}
    return Algorithm("FedNest", start, round, client_steps, violations, residuals)


def _everywhere(why: str) -> dict[str, str]:
    """Return the laws that a wrong or jittering v breaks, with the reason."""
    return dict.fromkeys(("sends changes", "finds the solution", "unequal local work"), why)


_RELEASED = _everywhere("The released series is not that of the inverse Hessian.")
_DRAWN = {
    "ledger is cost": "The number of products is drawn in every iteration.",
    **_everywhere("The length of the series is drawn, so x jitters about the solution."),
}


@once_per_problem
def local_drifts(
    problem: BilevelProblem, one_upper_step: bool = False
) -> tuple[ClientStep, ClientStep]:
    """Return FedInn's and FedOut's local steps: (x, y, q) -> y: y_i - (y - beta q), and x alike.

    What all clients have in common, -beta q, is the server's to apply: added up by the clients it
    would count sum_C w_i times, and the weights of a cohort sum to one only in expectation.
    """

    def lower_drift(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y, q = payload

        def gradient(y: PyTree, key: jax.Array) -> PyTree:
            return grad_lower_y(problem, x, y, client.data.lower_batch(key))

        return Point(y=drift(y, gradient, q, client, client.eta.y))

    def upper_drift(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y, h = payload
        if one_upper_step:
            return Point(x=trees.zeros_like(x))

        def gradient(x: PyTree, key: jax.Array) -> PyTree:
            return grad_upper_x(problem, x, y, client.data.upper_batch(key))

        return Point(x=drift(x, gradient, h, client, client.eta.x))

    return lower_drift, upper_drift


def _neumann_series(ask: Oracles, step: float, terms: int, drawn: bool) -> Series:
    """Return FedIHGP: v = s sum_j (I - s H)^j p_0, or one term of it drawn and scaled."""

    def series(x: PyTree, y: PyTree, federation: Federation, cohort: Cohort, keys: Keys) -> PyTree:
        term = federation.sum(ask.upper_grad_y, (x, y), cohort, key := next(keys)).v
        total = term
        for _ in range(draw_terms(key, terms) if drawn else terms):
            product = federation.sum(ask.hessian_product, (x, y, term), cohort, next(keys))
            term = add_scaled(term, -step, product.v)
            total = add(total, term)
        return scale(step * terms, term) if drawn else scale(step, total)

    return series


def _released_series(ask: Oracles, step: float, terms: int) -> Series:
    """Return the published code's series: every client recurses on its own Hessian."""

    def series(x: PyTree, y: PyTree, federation: Federation, cohort: Cohort, keys: Keys) -> PyTree:
        total = federation.sum(ask.upper_grad_y, (x, y), cohort, next(keys)).v
        own = _copies(total, len(cohort.ids))
        for j in range(1, terms + 1):
            payload = (x, y, PerClient(own))
            products = federation.gather(ask.hessian_product, payload, cohort, next(keys))
            own = add_scaled(own, -step, products.v)
            total = add_scaled(total, 1 / j, _weigh(own, cohort.weights))
        return scale(step, total)

    return series


def _copies(tree: PyTree, count: int) -> PyTree:
    """Return `count` copies of a tree, stacked along a new first axis."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), tree)


@jax.jit
def _weigh(stacked: PyTree, weights: jax.Array) -> PyTree:
    """Return sum_j weights_j stacked[j]."""
    return jax.tree.map(lambda a: jnp.tensordot(weights.astype(a.dtype), a, 1), stacked)
