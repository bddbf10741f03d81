"""The curvature of the lower problem, found through the federation.

Lanczos' method finds mu and L, between which all eigenvalues of grad^2_yy G lie: the power
iteration that keeps its earlier vectors, and so finds both ends at once and sooner. Conjugate
gradients find how far y*(x) moves with x. Every product is one exchange, entered into the ledger
like any other; no Hessian is formed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._settings import once_per_problem
from simfbo.core.federation import Client, ClientStep, Federation
from simfbo.core.keys import Purpose, host_rng
from simfbo.core.problem import BilevelProblem, Point, PyTree, grad_lower_y, hvp
from simfbo.core.sampling import Cohort

_TINY = 1e-6  # a rest of a direction this small holds nothing but rounding
_KNOWN = 0.1  # the relative error at which an eigenvalue is known
_SETTLED = 1e-3  # the relative residual at which a linear system is solved
_FEWEST, _MOST_NUMBERS = 3, 10**8  # Lanczos vectors; numbers in all of them
LEAST_RATE = 1e-3  # of y and v, whatever the condition
_SHORT = 8  # exchanges with each of several cohorts, at least


class Curvature(NamedTuple):
    """The curvature of the lower problem at a point.

    Attributes:
        mu: the smallest eigenvalue of grad^2_yy G that was found; never below the true one.
        L: the largest that was found; never above the true one.
        work: the clients' mean ||a_i||_1, the number of local steps in a message.
    """

    mu: float
    L: float
    work: float

    @property
    def rate(self) -> float:
        """Return 1/sqrt(kappa), the rate at which y and v settle; at least a thousandth."""
        return (
            min(1.0, max(LEAST_RATE, math.sqrt(max(self.mu, 0.0) / self.L))) if self.L > 0 else 1.0
        )


class Probes(NamedTuple):
    """Client steps that measure the lower problem, on all of a client's samples.

    Attributes:
        curvature: (x, y, u) -> grad^2_yy g_i u, and ||a_i||_1.
        response: (x, y, u) -> grad^2_yx g_i u, for u like x.
    """

    curvature: ClientStep
    response: ClientStep


@once_per_problem
def probes(problem: BilevelProblem) -> Probes:
    """Return the client steps that measure the lower problem."""

    def curvature(payload: Point[PyTree], client: Client) -> tuple[Point[PyTree], jax.Array]:
        data = client.data
        product = hvp(problem, *payload, data.lower.full(data.client))
        return Point(v=product), jnp.asarray(client.plan.norm, float)

    def response(payload: PyTree, client: Client) -> Point[PyTree]:
        x, y, u = payload
        batch = client.data.lower.full(client.data.client)
        return Point(v=jax.jvp(lambda x: grad_lower_y(problem, x, y, batch), (x,), (u,))[1])

    for step in (curvature, response):
        step.uncoded = True  # pyright: ignore[reportFunctionMemberAccess]
    return Probes(curvature, response)


def measure(
    client_step: ClientStep,
    federation: Federation,
    x: PyTree,
    y: PyTree,
    key: jax.Array,
    exchanges: int,
) -> Curvature:
    """Measure mu and L at (x, y); where not everyone takes part, the worst of three cohorts'.

    Args:
        client_step: `probes(problem).curvature`.
        federation: the clients.
        x: the upper variable.
        y: the lower variable.
        key: of the cohorts and of the first directions.
        exchanges: the most products.

    Returns:
        The curvature.
    """
    if len(federation.cohort(key).ids) >= federation.n:
        return measure_cohort(client_step, federation, x, y, key, exchanges)
    keys, each = jax.random.split(key, 3), max(_SHORT, exchanges // 3)
    seen = [measure_cohort(client_step, federation, x, y, k, each) for k in keys]
    work = sum(one.work for one in seen) / len(seen)
    return Curvature(min(one.mu for one in seen), max(one.L for one in seen), work)


def measure_cohort(
    client_step: ClientStep,
    federation: Federation,
    x: PyTree,
    y: PyTree,
    key: jax.Array,
    exchanges: int,
) -> Curvature:
    """Measure mu and L at (x, y) on one cohort, until both are known to ten per cent.

    The same clients answer every time, with all their samples, so that all products are with one
    matrix: the mean of theirs, with their weights brought to a sum of one.

    Args:
        client_step: `probes(problem).curvature`.
        federation: the clients.
        x: the upper variable.
        y: the lower variable.
        key: of the cohort and of the first direction.
        exchanges: the most products.

    Returns:
        The curvature.
    """
    product = _Product(client_step, federation, x, y, federation.cohort(key), key)
    first = host_rng(key, Purpose.LANCZOS_START).normal(size=product.size)
    basis, diagonal, beside, values = [first / np.linalg.norm(first)], [], [], np.zeros(1)
    for _ in range(min(exchanges, product.size, max(_FEWEST, _MOST_NUMBERS // product.size))):
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        rest = _without(_without(image, basis), basis)  # twice: once loses too many digits
        length = float(np.linalg.norm(rest))
        values, vectors = np.linalg.eigh(
            np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        )
        errors = length * np.abs(vectors[-1, [0, -1]])
        known = np.all(errors < _KNOWN * np.abs(values[[0, -1]]))
        done = known and len(diagonal) >= _FEWEST
        if done or not length > _TINY * max(map(abs, diagonal)):
            break
        beside.append(length)
        basis.append(rest / length)
    return Curvature(float(values[0]), float(values[-1]), product.work)


def shift(
    steps: Probes,
    federation: Federation,
    x: PyTree,
    y: PyTree,
    u: PyTree,
    key: jax.Array,
    exchanges: int,
) -> float:
    """Return how far y*(x) moves as x moves by u: ||(grad^2_yy G)^-1 grad^2_yx G u||.

    Args:
        steps: from `probes`.
        federation: the clients.
        x: the upper variable.
        y: the lower variable.
        u: the direction, like x.
        key: of the cohort.
        exchanges: the most products with the Hessian.
    """
    cohort = federation.cohort(key)
    pushed = federation.sum(steps.response, (x, y, u), cohort, key).v
    rhs = _flat(pushed) / cohort.weights.sum()
    product = _Product(steps.curvature, federation, x, y, cohort, key)
    return float(np.linalg.norm(_conjugate_gradients(product, rhs, exchanges)))


class _Product:
    """Products of the cohort's mean Hessian with vectors, each one exchange.

    Attributes:
        size: the number of elements of y.
        work: the clients' mean ||a_i||_1, as last reported.
    """

    def __init__(
        self,
        client_step: ClientStep,
        federation: Federation,
        x: PyTree,
        y: PyTree,
        cohort: Cohort,
        key: jax.Array,
    ) -> None:
        self.size, self._like, self.work = sum(a.size for a in jax.tree.leaves(y)), y, 1.0
        self._step, self._federation, self._at = client_step, federation, (x, y)
        self._cohort, self._key = cohort, key
        self._total = cohort.weights.sum()  # one only in expectation where not everyone takes part

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        payload = Point(*self._at, _shaped(vector, self._like))
        reply, norm = self._federation.sum(self._step, payload, self._cohort, self._key)
        self.work = float(norm) / self._total
        return _flat(reply.v) / self._total


def _flat(tree: PyTree) -> np.ndarray:
    """Return all numbers of a tree, one after the other, on the host."""
    return np.concatenate([np.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)])


def _shaped(vector: np.ndarray, like: PyTree) -> PyTree:
    """Return a vector as a tree; the inverse of `_flat`."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
    shaped = [p.reshape(a.shape).astype(a.dtype) for p, a in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _conjugate_gradients(
    product: Callable[[np.ndarray], np.ndarray], rhs: np.ndarray, most: int
) -> np.ndarray:
    """Return an approximate solution of product(z) = rhs."""
    z, rest, direction = np.zeros_like(rhs), rhs, rhs
    square, enough = float(rhs @ rhs), _SETTLED**2 * float(rhs @ rhs)
    for _ in range(most):
        if not square > enough:
            break
        image = product(direction)
        curved = float(direction @ image)
        if not curved > 0:
            break
        step = square / curved
        z, rest = z + step * direction, rest - step * image
        square, before = float(rest @ rest), square
        direction = rest + square / before * direction
    return z


def _without(vector: np.ndarray, basis: list[np.ndarray]) -> np.ndarray:
    """Return the part of a vector orthogonal to an orthonormal basis."""
    stack = np.stack(basis)
    return vector - stack.T @ (stack @ vector)
