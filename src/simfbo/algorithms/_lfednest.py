"""LFedNest: the light variant in Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel,
Minimax, and Compositional Optimization", ICML 2022.

K rounds of FedAvg on y, then one in which every client computes a hypergradient from its own
Hessian and steps x with it. That is cheap and biased: the mean of the clients' hypergradients is
not the hypergradient of the mean.
"""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from simfbo.algorithms._common import add, as_steps, descend, require_counts, require_shared
from simfbo.core import trees
from simfbo.core.federation import Client, Federation
from simfbo.core.method import Method, client_step
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
from simfbo.ranges import Count


class State(NamedTuple):
    """The two variables; every client computes a v of its own and does not send it."""

    x: PyTree
    y: PyTree


class LFedNest(Method):
    """LFedNest; `lfednest` has the equations."""

    known_violations: ClassVar = dict.fromkeys(
        ("finds the solution", "unequal local work"),
        "LFedNest averages hypergradients of the clients' own Hessians: that is another gradient.",
    )

    problem: BilevelProblem = eqx.field(static=True, converter=require_shared)
    steps: Point[float] = eqx.field(converter=as_steps)
    lower_rounds: int = eqx.field(static=True)
    neumann_terms: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        require_counts(lower_rounds=self.lower_rounds, neumann_terms=self.neumann_terms)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(*jax.tree.map(jnp.asarray, (x, y)))

    def round(self, state: State, federation: Federation, key: jax.Array) -> State:
        """Add the clients' changes of y, K times, and then those of x."""
        x, y = state
        *lower, last = jax.random.split(key, self.lower_rounds + 1)
        for key in lower:
            change = federation.sum(self.lower_sgd, (x, y), federation.cohort(key), key)
            y = add(y, change.y)
        change = federation.sum(self.upper_sgd, (x, y), federation.cohort(last), last)
        return State(add(x, change.x), y)

    @client_step
    def lower_sgd(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y) -> y: y_i - y."""
        x, y = payload

        def gradient(y: PyTree, key: jax.Array) -> PyTree:
            return grad_lower_y(self.problem, x, y, client.data.lower_batch(key))

        return Point(y=descend(y, gradient, client, self.steps.y))

    @client_step
    def upper_sgd(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y) -> x: x_i - x."""
        x, y = payload

        def gradient(x: PyTree, key: jax.Array) -> PyTree:
            return self._own_hypergradient(x, y, client, key)

        return Point(x=descend(x, gradient, client, self.steps.x))

    def _own_hypergradient(self, x: PyTree, y: PyTree, client: Client, key: jax.Array) -> PyTree:
        """Return the hypergradient with the client's own Hessian."""
        problem, step = self.problem, self.steps.v
        lower, upper, series = jax.random.split(key, 3)
        slope = grad_upper_y(problem, x, y, client.data.upper_batch(upper))

        def extend(j: Scalar, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            term, total = carry
            batch = client.data.lower_batch(jax.random.fold_in(series, j))
            term = trees.add_scaled(term, -step, hvp(problem, x, y, term, batch))
            return term, trees.add(total, term)

        _, total = jax.lax.fori_loop(0, self.neumann_terms, extend, (slope, slope))
        v = trees.scale(step, total)
        batches = client.data.lower_batch(lower), client.data.upper_batch(upper)
        return jax.grad(lambda x: -residual(problem, x, y, v, *batches))(x)


def lfednest(
    problem: BilevelProblem, steps: Point[float], lower_rounds: Count = 1, neumann_terms: Count = 5
) -> Method:
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
        The method.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = lfednest(quadratic().problem, Point(x=0.1, y=0.2, v=0.3))
    """
    return LFedNest(problem, steps, lower_rounds, neumann_terms)
