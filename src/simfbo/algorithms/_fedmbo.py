"""FedMBO: Huang, Zhang, Ji, "Achieving Linear Speedup in Non-IID Federated Bilevel Learning",
ICML 2023.

Distributed minibatch SGD on y; the hypergradient from as many parallel chains as there are clients
in a cohort. Each chain moves from one freshly sampled client to the next, so its terms are products
of independent Hessians and the only bias of the estimate is the truncation of the series.
"""

from typing import Any

import jax

from simfbo.algorithms._common import (
    Mode,
    add_scaled,
    draw_terms,
    is_released,
    oracles,
    require_counts,
    scale,
    start,
)
from simfbo.algorithms._settings import with_settings
from simfbo.core.federation import Algorithm, ClientStep, Federation
from simfbo.core.keys import Purpose, host_rng
from simfbo.core.ledger import PerClient
from simfbo.core.problem import BilevelProblem, Point, PyTree


@with_settings
def fedmbo(
    problem: BilevelProblem,
    steps: Point[float],
    lower_rounds: int = 1,
    neumann_terms: int = 5,
    mode: Mode = "paper",
) -> Algorithm:
    """FedMBO; its authors sample clients with replacement, and clients take no local steps.

        K times:      y -= beta sum_C w_i grad_y g_i(x, y)
        each chain:   p = grad_y f_i(x, y) at a client i drawn for it;  N' ~ U{0..N-1} times, at a
                      new client i:  p -= s grad^2_yy g_i(x, y) p;  v = N s p
        at last:      x -= alpha (mean over chains of [grad_x f_i - grad^2_xy g_i v], each at yet
                      another client)

    All chains take the same N' steps, side by side: one exchange for each.

    Args:
        problem: the two losses.
        steps: beta for y, alpha for x, and for v the step s of the series, which must stay below 1
            over the largest eigenvalue of any client's grad^2_yy g_i.
        lower_rounds: K.
        neumann_terms: N.
        mode: "paper"; or "as_released" for the published code's step of a chain, which grows it:
            p <- (2 I - s grad^2_yy g_i) p.

    Returns:
        The algorithm; the state's v is the mean of the last chains.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = fedmbo(quadratic().problem, Point(x=0.02, y=0.2, v=0.2))
    """
    require_counts(lower_rounds=lower_rounds, neumann_terms=neumann_terms)
    ask = oracles(problem)
    kept = 2.0 if is_released(mode) else 1.0

    def chains(x: PyTree, y: PyTree, federation: Federation, key: jax.Array) -> PyTree:
        """Return all chains' v, stacked."""
        hops = draw_terms(key, neumann_terms)
        keys = jax.random.split(key, hops + 1)
        p = _singles(federation, ask.upper_grad_y, (x, y), keys[0]).v
        for key in keys[1:]:
            p = _shuffle(p, key)
            product = _singles(federation, ask.hessian_product, (x, y, PerClient(p)), key)
            p = add_scaled(scale(kept, p), -steps.v, product.v)
        return scale(neumann_terms * steps.v, p)

    def round(state: Point[PyTree], federation: Federation, key: jax.Array) -> Point[PyTree]:
        x, y, _ = state
        *lower, series, last = jax.random.split(key, lower_rounds + 2)
        for key in lower:
            q = federation.sum(ask.lower_grad, (x, y), federation.cohort(key), key)
            y = add_scaled(y, -steps.y, q.y)
        v = _shuffle(chains(x, y, federation, series), last)
        h = federation.sum(ask.hypergrad, (x, y, PerClient(v)), federation.cohort(last), last)
        return Point(add_scaled(x, -steps.x, h.x), y, _mean(v))

    residuals = {"lower_grad": "y", "hypergrad": "x"}
    return Algorithm("FedMBO", start, round, ask, _VIOLATIONS, residuals)


def _singles(federation: Federation, client_step: ClientStep, payload: PyTree, key: Any) -> PyTree:
    """Return a new cohort's messages one by one, each weighted to be unbiased by itself."""
    cohort = federation.cohort(key)
    messages = federation.gather(client_step, payload, cohort, key)
    return _weigh(messages, len(cohort.ids) * cohort.weights)


def _shuffle(stacked: PyTree, key: jax.Array) -> PyTree:
    """Return the chains in random order.

    Cohorts come sorted by id: without this, the first chain would always visit the lowest ids.
    """
    size = len(jax.tree.leaves(stacked)[0])
    return _take(stacked, host_rng(key, Purpose.CHAINS).permutation(size))


@jax.jit
def _weigh(stacked: PyTree, weights: jax.Array) -> PyTree:
    def rows(leaf: jax.Array) -> jax.Array:
        return leaf * weights.astype(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))

    return jax.tree.map(rows, stacked)


@jax.jit
def _take(stacked: PyTree, places: Any) -> PyTree:
    return jax.tree.map(lambda a: a[places], stacked)


@jax.jit
def _mean(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda a: a.mean(0), stacked)


_JITTER = "Chains are drawn in every iteration, so v is right only in the mean and x jitters."
_VIOLATIONS = {
    "ledger is cost": "The length of the chains is drawn in every iteration.",
    "sends changes": _JITTER,
    "finds the solution": _JITTER,
    "unequal local work": _JITTER,
}
