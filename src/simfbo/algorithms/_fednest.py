"""FedNest: Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel, Minimax, and
Compositional Optimization", ICML 2022, Algorithms 1 to 4.
"""

from collections.abc import Iterator
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from simfbo.algorithms._common import add, add_scaled, scale
from simfbo.algorithms._nested import (
    Drifts,
    Mode,
    NestedLoops,
    Oracles,
    draw_terms,
    inexact,
    is_released,
)
from simfbo.core.federation import ClientStep, Federation
from simfbo.core.ledger import PerClient
from simfbo.core.method import Method, marked
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError
from simfbo.ranges import Count

Keys = Iterator[jax.Array]


class FedNest(NestedLoops):
    """FedNest; `fednest` has the equations."""

    residuals: ClassVar = {"lower_grad": "y", "hypergrad": "x"}

    one_upper_step: bool = eqx.field(static=True, default=False)

    def round(self, state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        (x, y, _), steps, ask, drifts = state, self.steps, self.oracles, self.drifts
        keys = iter(jax.random.split(key, 2 * self.lower_rounds + self.neumann_terms + 4))
        for _ in range(self.lower_rounds):
            cohort = federation.cohort(key := next(keys))
            q = federation.sum(ask.lower_grad, (x, y), cohort, key).y
            change = federation.sum(drifts.lower_drift, (x, y, q), cohort, next(keys))
            y = add(add_scaled(y, -steps.y, q), change.y)
        cohort = federation.cohort(next(keys))
        v = self.series(x, y, federation, cohort, keys)
        h = federation.sum(ask.hypergrad, (x, y, v), cohort, next(keys)).x
        change = federation.sum(drifts.upper_drift, (x, y, h), cohort, next(keys))
        return Point(add(add_scaled(x, -steps.x, h), change.x), y, v)

    def series(
        self, x: PyTree, y: PyTree, federation: Federation, cohort: Cohort, keys: Keys
    ) -> PyTree:
        """Run FedIHGP: v = s sum_j (I - s H)^j p_0."""
        total = p = federation.sum(self.oracles.upper_grad_y, (x, y), cohort, next(keys)).v
        for _ in range(self.neumann_terms):
            hessian_p = federation.sum(
                self.oracles.hessian_product, (x, y, p), cohort, next(keys)
            ).v
            p = add_scaled(p, -self.steps.v, hessian_p)
            total = add(total, p)
        return scale(self.steps.v, total)

    @property
    def oracles(self) -> Oracles:
        """The client steps that return a single gradient or product."""
        return Oracles(self.problem)

    @property
    def drifts(self) -> Drifts:
        """The client steps with local steps."""
        return Drifts(self.problem, self.steps, self.one_upper_step)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        return marked(self.oracles, self.drifts)


class DrawnFedNest(FedNest):
    """FedNest with the other estimator of its paper: one random term of the series, scaled."""

    name = "FedNest"
    known_violations: ClassVar = {
        "ledger is cost": "The number of products is drawn in every iteration.",
        **inexact("The length of the series is drawn, so x jitters about the solution."),
    }

    def series(
        self, x: PyTree, y: PyTree, federation: Federation, cohort: Cohort, keys: Keys
    ) -> PyTree:
        """Compute v = N s p_N', with N' uniform in {0..N-1}."""
        ask = self.oracles
        p = federation.sum(ask.upper_grad_y, (x, y), cohort, key := next(keys)).v
        for _ in range(draw_terms(key, self.neumann_terms)):
            hessian_p = federation.sum(ask.hessian_product, (x, y, p), cohort, next(keys)).v
            p = add_scaled(p, -self.steps.v, hessian_p)
        return scale(self.steps.v * self.neumann_terms, p)


class ReleasedFedNest(FedNest):
    """FedNest as in its published code, with a recursion on every client's Hessian."""

    name = "FedNest"
    known_violations: ClassVar = inexact("The released series is not that of the inverse Hessian.")

    def series(
        self, x: PyTree, y: PyTree, federation: Federation, cohort: Cohort, keys: Keys
    ) -> PyTree:
        """Compute v = s [p_0 + sum_j (1/j) sum_C w_i (I - s H_i)^j p_0], with s the step of x."""
        ask, step, size = self.oracles, self.steps.x, len(cohort.ids)
        total = federation.sum(ask.upper_grad_y, (x, y), cohort, next(keys)).v
        terms = jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *a.shape)), total)
        for j in range(1, self.neumann_terms + 1):
            payload = (x, y, PerClient(terms))
            products = federation.gather(ask.hessian_product, payload, cohort, next(keys))
            terms = add_scaled(terms, -step, products.v)
            total = add_scaled(total, 1 / j, _weighted_sum(terms, cohort.weights))
        return scale(step, total)

    @property
    def oracles(self) -> Oracles:
        """Oracles on all samples of a client."""
        return Oracles(self.problem, full=True)


@jax.jit
def _weighted_sum(stacked: PyTree, weights: jax.Array) -> PyTree:
    return jax.tree.map(lambda a: jnp.tensordot(weights.astype(a.dtype), a, 1), stacked)


def fednest(
    problem: BilevelProblem,
    steps: Point[float],
    lower_rounds: Count = 1,
    neumann_terms: Count = 5,
    mode: Mode = "paper",
    drawn: bool = False,
    one_upper_step: bool = False,
) -> Method:
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
        mode: "paper"; or "as_released" for the series of the published code, with the clients'
            Hessians and with term j divided by j,
            v = s [p_0 + sum_{j=1..N} (1/j) sum_C w_i (I - s H_i)^j p_0], with s the step of x, and
            with all samples of a client in place of minibatches.
        drawn: sample the number of products N' uniformly from {0..N-1} and use v = N s p_N', the
            other estimator of the paper, in place of the whole sum.
        one_upper_step: take one local step on x, as released, regardless of tau_i.

    Returns:
        The method; the state's v is that of its last iteration.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fednest(quadratic().problem, Point(x=0.1, y=0.2, v=0.3), neumann_terms=10)
    """  # noqa: E501
    released = is_released(mode)
    if released and drawn:
        raise UserError("The released series is always summed: use drawn with mode 'paper'.")
    kind = ReleasedFedNest if released else DrawnFedNest if drawn else FedNest
    return kind(problem, steps, lower_rounds, neumann_terms, one_upper_step)
