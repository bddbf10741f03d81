"""FedNest: Tarzanagh, Li, Thrampoulidis, Oymak, "FedNest: Federated Bilevel, Minimax, and
Compositional Optimization", ICML 2022, Algorithms 1 to 4.

Three loops: K rounds of federated SVRG on y (FedInn), N products with the cohort's Hessian for the
linear system (FedIHGP), a federated SVRG step on x (FedOut).
"""

from collections.abc import Iterator
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from simfbo.algorithms._common import (
    Mode,
    Oracles,
    add,
    add_scaled,
    as_steps,
    draw_terms,
    drift,
    is_released,
    require_counts,
    require_shared,
    scale,
    start,
)
from simfbo.core import trees
from simfbo.core.federation import Client, ClientStep, Federation
from simfbo.core.ledger import PerClient
from simfbo.core.method import Method, client_step, marked
from simfbo.core.problem import BilevelProblem, Point, PyTree, grad_lower_y, grad_upper_x
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError
from simfbo.ranges import Count

Keys = Iterator[jax.Array]


class Drifts(eqx.Module):
    """FedInn's and FedOut's local steps.

    What all clients have in common, -beta q, is the server's to apply: added up by the clients it
    would count sum_C w_i times, and the weights of a cohort sum to one only in expectation.

    Attributes:
        problem: the two losses.
        steps: beta for y and alpha for x.
        one_upper_step: whether clients take one step on x, and so have no drift.
    """

    problem: BilevelProblem = eqx.field(static=True)
    steps: Point[float]
    one_upper_step: bool = eqx.field(static=True, default=False)

    @client_step
    def lower_drift(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, q) -> y: y_i - (y - beta q)."""
        x, y, q = payload

        def gradient(y: PyTree, key: jax.Array) -> PyTree:
            return grad_lower_y(self.problem, x, y, client.data.lower_batch(key))

        return Point(y=drift(y, gradient, q, client, self.steps.y))

    @client_step
    def upper_drift(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, h) -> x: x_i - (x - alpha h)."""
        x, y, h = payload
        if self.one_upper_step:
            return Point(x=trees.zeros_like(x))

        def gradient(x: PyTree, key: jax.Array) -> PyTree:
            return grad_upper_x(self.problem, x, y, client.data.upper_batch(key))

        return Point(x=drift(x, gradient, h, client, self.steps.x))


def _everywhere(why: str) -> dict[str, str]:
    """Return the laws that a wrong or jittering v breaks, with the reason."""
    return dict.fromkeys(("sends changes", "finds the solution", "unequal local work"), why)


class FedNest(Method):
    """FedNest; `fednest` has the equations."""

    residuals: ClassVar = {"lower_grad": "y", "hypergrad": "x"}

    problem: BilevelProblem = eqx.field(static=True, converter=require_shared)
    steps: Point[float] = eqx.field(converter=as_steps)
    lower_rounds: int = eqx.field(static=True)
    neumann_terms: int = eqx.field(static=True)
    one_upper_step: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        require_counts(lower_rounds=self.lower_rounds, neumann_terms=self.neumann_terms)

    def init(self, x: PyTree, y: PyTree) -> Point[PyTree]:
        return start(x, y)

    def round(self, state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        """Run FedInn K times, FedIHGP, and FedOut."""
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
        term = federation.sum(self.oracles.upper_grad_y, (x, y), cohort, next(keys)).v
        total = term
        for _ in range(self.neumann_terms):
            term = self._next_term(x, y, term, federation, cohort, keys)
            total = add(total, term)
        return scale(self.steps.v, total)

    def _next_term(
        self, x: PyTree, y: PyTree, term: PyTree, federation: Federation, cohort: Cohort, keys: Keys
    ) -> PyTree:
        payload = x, y, term
        product = federation.sum(self.oracles.hessian_product, payload, cohort, next(keys))
        return add_scaled(term, -self.steps.v, product.v)

    @property
    def oracles(self) -> Oracles:
        """Return the client steps that answer one question each."""
        return Oracles(self.problem)

    @property
    def drifts(self) -> Drifts:
        """Return the client steps that take local steps."""
        return Drifts(self.problem, self.steps, self.one_upper_step)

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        return marked(self.oracles, self.drifts)


class DrawnFedNest(FedNest):
    """FedNest with the other estimator of its paper: one term of the series, drawn and scaled."""

    name = "FedNest"
    known_violations: ClassVar = {
        "ledger is cost": "The number of products is drawn in every iteration.",
        **_everywhere("The length of the series is drawn, so x jitters about the solution."),
    }

    def series(
        self, x: PyTree, y: PyTree, federation: Federation, cohort: Cohort, keys: Keys
    ) -> PyTree:
        """Compute v = N s p_N', with N' uniform in {0..N-1}."""
        term = federation.sum(self.oracles.upper_grad_y, (x, y), cohort, key := next(keys)).v
        for _ in range(draw_terms(key, self.neumann_terms)):
            term = self._next_term(x, y, term, federation, cohort, keys)
        return scale(self.steps.v * self.neumann_terms, term)


class ReleasedFedNest(FedNest):
    """FedNest as its published code computes it: every client recurses on its own Hessian."""

    name = "FedNest"
    known_violations: ClassVar = _everywhere(
        "The released series is not that of the inverse Hessian."
    )

    def series(
        self, x: PyTree, y: PyTree, federation: Federation, cohort: Cohort, keys: Keys
    ) -> PyTree:
        """Compute v = s [p_0 + sum_j (1/j) sum_C w_i (I - s H_i)^j p_0], with s the step of x."""
        ask, step = self.oracles, self.steps.x
        total = federation.sum(ask.upper_grad_y, (x, y), cohort, next(keys)).v
        own = _copies(total, len(cohort.ids))
        for j in range(1, self.neumann_terms + 1):
            payload = (x, y, PerClient(own))
            products = federation.gather(ask.hessian_product, payload, cohort, next(keys))
            own = add_scaled(own, -step, products.v)
            total = add_scaled(total, 1 / j, _weigh(own, cohort.weights))
        return scale(step, total)

    @property
    def oracles(self) -> Oracles:
        """Return oracles that use all of a client's samples."""
        return Oracles(self.problem, full=True)


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
        mode: "paper"; or "as_released" for what the published code computes instead: clients
            recurse on their own Hessians and later terms are divided by their number,
            v = s [p_0 + sum_{j=1..N} (1/j) sum_C w_i (I - s H_i)^j p_0], with s the step of x; every
            question to a client is answered from all of its samples.
        drawn: draw the number of products uniformly from {0..N-1} and take N s p_N' for v, the
            other estimator of the paper, in place of the whole sum.
        one_upper_step: take one local step on x, as released, whatever tau_i is.

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


def _copies(tree: PyTree, count: int) -> PyTree:
    """Return `count` copies of a tree, stacked along a new first axis."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), tree)


@jax.jit
def _weigh(stacked: PyTree, weights: jax.Array) -> PyTree:
    """Return sum_j weights_j stacked[j]."""
    return jax.tree.map(lambda a: jnp.tensordot(weights.astype(a.dtype), a, 1), stacked)
