"""LFedNest: the light variant in Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel,
Minimax, and Compositional Optimization", ICML 2022.

K rounds of FedAvg on y, then one in which every client computes a hypergradient from its own
Hessian and steps x with it. That is cheap and biased: the mean of the clients' hypergradients is
not the hypergradient of the mean.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import add, descend, require_counts
from simfbo.algorithms._simfbo import Steps
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, Federation
from simfbo.core.problem import (
    BilevelProblem,
    Point,
    PyTree,
    grad_lower_y,
    grad_upper_y,
    hvp,
    residual,
)


class State(NamedTuple):
    """The two variables; every client has a v of its own and keeps it to itself."""

    x: PyTree
    y: PyTree


def lfednest(
    problem: BilevelProblem, steps: Steps, lower_rounds: int = 1, neumann_terms: int = 5
) -> Algorithm:
    """Return LFedNest.

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
        >>> algorithm = lfednest(quadratic().problem, Steps(y=0.2, v=0.3, x=0.1))
    """
    require_counts(lower_rounds=lower_rounds, neumann_terms=neumann_terms)

    def init(x: PyTree, y: PyTree) -> State:
        return State(*jax.tree.map(jnp.asarray, (x, y)))

    def lower_sgd(payload: PyTree, client: Client) -> Point:
        x, y = payload

        def gradient(y: PyTree, key: jax.Array) -> PyTree:
            return grad_lower_y(problem, x, y, client.data.lower_batch(key))

        return Point(y=descend(y, gradient, client, steps.y))

    def own_hypergradient(x: PyTree, y: PyTree, client: Client, key: jax.Array) -> PyTree:
        lower, upper, series = jax.random.split(key, 3)
        slope = grad_upper_y(problem, x, y, client.data.upper_batch(upper))

        def extend(j: Any, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            term, total = carry
            batch = client.data.lower_batch(jax.random.fold_in(series, j))
            term = trees.add_scaled(term, -steps.v, hvp(problem, x, y, term, batch))
            return term, trees.add(total, term)

        _, total = jax.lax.fori_loop(0, neumann_terms, extend, (slope, slope))
        v = trees.scale(steps.v, total)
        batches = client.data.lower_batch(lower), client.data.upper_batch(upper)
        return jax.grad(lambda x: -residual(problem, x, y, v, *batches))(x)

    def upper_sgd(payload: PyTree, client: Client) -> Point:
        x, y = payload

        def gradient(x: PyTree, key: jax.Array) -> PyTree:
            return own_hypergradient(x, y, client, key)

        return Point(x=descend(x, gradient, client, steps.x))

    def round(state: State, federation: Federation, key: jax.Array) -> State:
        x, y = state
        *lower, last = jax.random.split(key, lower_rounds + 1)
        for key in lower:
            y = add(y, federation.aggregate(lower_sgd, (x, y), federation.cohort(key), key).y)
        change = federation.aggregate(upper_sgd, (x, y), federation.cohort(last), last)
        return State(add(x, change.x), y)

    return Algorithm("LFedNest", init, round, (lower_sgd, upper_sgd), _BIASES)


_BIAS = "LFedNest averages hypergradients of the clients' own Hessians: that is another gradient."
_BIASES = {"finds the solution": _BIAS, "unequal local work": _BIAS}
