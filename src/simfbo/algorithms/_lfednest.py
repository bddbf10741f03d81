"""LFedNest: the light variant in Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel,
Minimax, and Compositional Optimization", ICML 2022.

K rounds of FedAvg on y, then one in which every client computes a hypergradient from its own
Hessian and steps x with it. That is cheap and biased: the mean of the clients' hypergradients is
not the hypergradient of the mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import add, descend, require_counts
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.problem import (
    BilevelProblem,
    Point,
    PyTree,
    Scalar,
    grad_lower_y,
    grad_upper_y,
    hvp,
    residual,
)


class State(NamedTuple):
    """The two variables; every client computes a v of its own and does not send it."""

    x: PyTree
    y: PyTree


@with_settings
def lfednest(
    problem: BilevelProblem, steps: Point[float], lower_rounds: int = 1, neumann_terms: int = 5
) -> Algorithm:
    """LFedNest, with every client's own hypergradient.

        K times:  tau_i steps y_i -= (beta/tau_i) grad_y g_i(x, y_i);      y += sum_C w_i (y_i - y)
        once:     tau_i steps x_i -= (alpha/tau_i) [grad_x f_i - grad^2_xy g_i v_i](x_i, y)
                  with v_i = s sum_{j=0..N} (I - s grad^2_yy g_i)^j grad_y f_i;
                  x += sum_C w_i (x_i - x)

    Args:
        problem: the two losses.
        steps: beta for y, alpha for x, and for v the step s of the Neumann series.
        lower_rounds: K.
        neumann_terms: N.

    Returns:
        The algorithm.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = lfednest(quadratic().problem, Point(x=0.1, y=0.2, v=0.3))
    """
    require_counts(lower_rounds=lower_rounds, neumann_terms=neumann_terms)

    def init(x: PyTree, y: PyTree) -> State:
        return State(*jax.tree.map(jnp.asarray, (x, y)))

    lower_sgd, upper_sgd = _client_steps(problem, neumann_terms)

    def round(state: State, federation: Federation, key: jax.Array) -> State:
        x, y = state
        *lower, last = jax.random.split(key, lower_rounds + 1)
        for key in lower:
            change = federation.sum(lower_sgd, (x, y), federation.cohort(key), key, steps)
            y = add(y, change.y)
        change = federation.sum(upper_sgd, (x, y), federation.cohort(last), last, steps)
        return State(add(x, change.x), y)

    return Algorithm("LFedNest", init, round, (lower_sgd, upper_sgd), _VIOLATIONS)


@once_per_problem
def _client_steps(problem: BilevelProblem, neumann_terms: int) -> tuple[ClientStep, ClientStep]:
    """Return the local steps on y and on x."""

    def lower_sgd(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y = payload

        def gradient(y: PyTree, key: jax.Array) -> PyTree:
            return grad_lower_y(problem, x, y, client.data.lower_batch(key))

        return Point(y=descend(y, gradient, client, client.eta.y))

    def own_hypergradient(x: PyTree, y: PyTree, client: Client, key: jax.Array) -> PyTree:
        lower, upper, series = jax.random.split(key, 3)
        slope = grad_upper_y(problem, x, y, client.data.upper_batch(upper))

        def extend(j: Scalar, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            term, total = carry
            batch = client.data.lower_batch(jax.random.fold_in(series, j))
            term = trees.add_scaled(term, -client.eta.v, hvp(problem, x, y, term, batch))
            return term, trees.add(total, term)

        _, total = jax.lax.fori_loop(0, neumann_terms, extend, (slope, slope))
        v = trees.scale(client.eta.v, total)
        batches = client.data.lower_batch(lower), client.data.upper_batch(upper)
        return jax.grad(lambda x: -residual(problem, x, y, v, *batches))(x)

    def upper_sgd(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y = payload

        def gradient(x: PyTree, key: jax.Array) -> PyTree:
            return own_hypergradient(x, y, client, key)

        return Point(x=descend(x, gradient, client, client.eta.x))

    return lower_sgd, upper_sgd


_BIAS = "LFedNest averages hypergradients of the clients' own Hessians: that is another gradient."
_VIOLATIONS = {"finds the solution": _BIAS, "unequal local work": _BIAS}
