"""FedMBO: Huang, Zhang, Ji, "Achieving Linear Speedup in Non-IID Federated Bilevel Learning",
ICML 2023.
"""

from typing import ClassVar

import jax

from simfbo.algorithms._common import add_scaled, scale
from simfbo.algorithms._nested import (
    Mode,
    NestedLoops,
    Oracles,
    draw_terms,
    inexact,
    is_released,
)
from simfbo.core.federation import ClientStep, Federation
from simfbo.core.keys import Purpose, host_rng
from simfbo.core.ledger import PerClient
from simfbo.core.method import Method, marked
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.ranges import Count


class FedMBO(NestedLoops):
    """FedMBO; `fedmbo` has the equations."""

    name = "FedMBO"
    known_violations: ClassVar = {
        "ledger is cost": "The length of the chains is drawn in every iteration.",
        **inexact(
            "Chains are drawn in every iteration: v is right only in the mean, and x jitters."
        ),
    }
    residuals: ClassVar = {"lower_grad": "y", "hypergrad": "x"}

    def round(self, state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        (x, y, _), ask = state, Oracles(self.problem)
        *lower, series, last = jax.random.split(key, self.lower_rounds + 2)
        for key in lower:
            q = federation.sum(ask.lower_grad, (x, y), federation.cohort(key), key)
            y = add_scaled(y, -self.steps.y, q.y)
        v = _shuffle(self._chains(x, y, federation, series), last)
        h = federation.sum(ask.hypergrad, (x, y, PerClient(v)), federation.cohort(last), last)
        return Point(add_scaled(x, -self.steps.x, h.x), y, _mean(v))

    def _chains(self, x: PyTree, y: PyTree, federation: Federation, key: jax.Array) -> PyTree:
        """Compute v of all chains, stacked."""
        ask, step = Oracles(self.problem), self.steps.v

        def singles(client_step: ClientStep, payload: PyTree, key: jax.Array) -> PyTree:
            """Gather a new cohort's messages, each with an unbiased weight."""
            cohort = federation.cohort(key)
            messages = federation.gather(client_step, payload, cohort, key)
            return _weigh(messages, len(cohort.ids) * cohort.weights)

        keys = jax.random.split(key, draw_terms(key, self.neumann_terms) + 1)
        p = singles(ask.upper_grad_y, (x, y), keys[0]).v
        for key in keys[1:]:
            p = _shuffle(p, key)
            product = singles(ask.hessian_product, (x, y, PerClient(p)), key)
            p = add_scaled(self.kept(p), -step, product.v)
        return scale(self.neumann_terms * step, p)

    def kept(self, p: PyTree) -> PyTree:
        """Return the term of p in a step of a chain."""
        return p

    @property
    def client_steps(self) -> dict[str, ClientStep]:
        return marked(Oracles(self.problem))


class ReleasedFedMBO(FedMBO):
    """FedMBO as in its published code: p <- (2 I - s grad^2_yy g_i) p."""

    def kept(self, p: PyTree) -> PyTree:
        return scale(2.0, p)


def _shuffle(stacked: PyTree, key: jax.Array) -> PyTree:
    """Permute the chains at random.

    Cohorts are sorted by id: without a permutation, the first chain would have the lowest ids.
    """
    size = len(jax.tree.leaves(stacked)[0])
    return _take(stacked, host_rng(key, Purpose.CHAINS).permutation(size))


@jax.jit
def _weigh(stacked: PyTree, weights: jax.Array) -> PyTree:
    def rows(leaf: jax.Array) -> jax.Array:
        return leaf * weights.astype(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))

    return jax.tree.map(rows, stacked)


_take = jax.jit(lambda stacked, order: jax.tree.map(lambda a: a[order], stacked))
_mean = jax.jit(lambda stacked: jax.tree.map(lambda a: a.mean(0), stacked))


def fedmbo(
    problem: BilevelProblem,
    steps: Point[float],
    lower_rounds: Count = 1,
    neumann_terms: Count = 5,
    mode: Mode = "paper",
) -> Method:
    """FedMBO, without local steps; in the paper clients are sampled with replacement.

        K times:      y -= beta sum_C w_i grad_y g_i(x, y)
        each chain:   p = grad_y f_i(x, y) at a sampled client i;  N' ~ U{0..N-1} times, at a new
                      client i:  p -= s grad^2_yy g_i(x, y) p;  v = N s p
        finally:      x -= alpha (mean over chains of [grad_x f_i - grad^2_xy g_i v], each at a new
                      client)

    All chains take the same N' steps in parallel, with one exchange for each step.

    Args:
        problem: the two losses.
        steps: beta for y, alpha for x, and for v the step s of the series, which must stay below 1
            over the largest eigenvalue of any client's grad^2_yy g_i.
        lower_rounds: K.
        neumann_terms: N.
        mode: "paper"; or "as_released" for the step of a chain in the published code, with which
            chains grow: p <- (2 I - s grad^2_yy g_i) p.

    Returns:
        The method; the state's v is the mean of the last chains.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedmbo(quadratic().problem, Point(x=0.02, y=0.2, v=0.2))
    """
    kind = ReleasedFedMBO if is_released(mode) else FedMBO
    return kind(problem, steps, lower_rounds, neumann_terms)
