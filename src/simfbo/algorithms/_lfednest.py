"""LFedNest: the light variant in Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel,
Minimax, and Compositional Optimization", ICML 2022.
"""

from typing import ClassVar

import jax

from simfbo.algorithms._common import add
from simfbo.algorithms._nested import NestedLoops, descend, lower_gradient
from simfbo.core import Client, Federation, Method, client_step, trees
from simfbo.core.problem import BilevelProblem, Point, PyTree, Scalar, grad_upper_y, hvp, residual
from simfbo.ranges import Count


class LFedNest(NestedLoops):
    """LFedNest; `lfednest` has the equations. The state has no v, since clients do not send it."""

    known_violations: ClassVar = dict.fromkeys(
        ("finds the solution", "unequal local work"),
        "LFedNest averages hypergradients of the clients' own Hessians: that is another gradient.",
    )

    def init(self, x: PyTree, y: PyTree) -> Point[PyTree]:
        return Point(*trees.on_device((x, y)))

    def round(self, state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        x, y = state[:2]
        *lower, last = jax.random.split(key, self.lower_rounds + 1)
        for key in lower:
            y = add(y, federation.sum(self.lower_sgd, (x, y), federation.cohort(key), key).y)
        change = federation.sum(self.upper_sgd, (x, y), federation.cohort(last), last)
        return Point(add(x, change.x), y)

    @client_step
    def lower_sgd(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y) -> y: y_i - y."""
        x, y = payload
        return Point(y=descend(y, lower_gradient(self.problem, x, client), client, self.steps.y))

    @client_step
    def upper_sgd(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y) -> x: x_i - x."""
        (x, y), problem, data = payload, self.problem, client.data

        def local_hypergradient(x: PyTree, key: jax.Array) -> PyTree:
            lower, upper, series = jax.random.split(key, 3)
            slope = grad_upper_y(problem, x, y, data.upper_batch(upper))

            def extend(j: Scalar, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                term, total = carry
                batch = data.lower_batch(jax.random.fold_in(series, j))
                term = trees.add_scaled(term, -self.steps.v, hvp(problem, x, y, term, batch))
                return term, trees.add(total, term)

            _, total = jax.lax.fori_loop(0, self.neumann_terms, extend, (slope, slope))
            v, batches = (
                trees.scale(self.steps.v, total),
                (data.lower_batch(lower), data.upper_batch(upper)),
            )
            return jax.grad(lambda x: -residual(problem, x, y, v, *batches))(x)

        return Point(x=descend(x, local_hypergradient, client, self.steps.x))


def lfednest(
    problem: BilevelProblem, steps: Point[float], lower_rounds: Count = 1, neumann_terms: Count = 5
) -> Method:
    """LFedNest, with local hypergradients.

        K times:  tau_i steps y_i -= (beta/tau_i) grad_y g_i(x, y_i);      y += sum_C w_i (y_i - y)
        once:     tau_i steps x_i -= (alpha/tau_i) [grad_x f_i - grad^2_xy g_i v_i](x_i, y)
                  with v_i = s sum_{j=0..N} (I - s grad^2_yy g_i)^j grad_y f_i;
                  x += sum_C w_i (x_i - x)

    Args:
        problem: the two losses.
        steps: beta for y, alpha for x, and for v the step s of the Neumann series.
        lower_rounds: K.
        neumann_terms: N.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = lfednest(quadratic().problem, Point(x=0.1, y=0.2, v=0.3))
    """
    return LFedNest(problem, steps, lower_rounds, neumann_terms)
