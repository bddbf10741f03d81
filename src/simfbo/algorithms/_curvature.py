"""The curvature of the lower problem, found through the federation.

Lanczos' method finds mu and L, between which all eigenvalues of grad^2_yy G lie: the power
iteration that keeps its earlier vectors, and so finds both ends at once and sooner. Conjugate
gradients find how far y*(x) moves with x. Every product is one exchange, entered into the ledger
like any other; no Hessian is formed.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._common import drawn_directions, local_steps
from simfbo.core import trees
from simfbo.core.federation import Client, ClientStep, Federation
from simfbo.core.keys import Purpose, host_rng
from simfbo.core.method import client_step
from simfbo.core.problem import (
    BilevelProblem,
    Point,
    PyTree,
    directions,
    grad_lower_y,
    hvp,
    residual,
)
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
        noisy: above 0 where clients draw minibatches, or only some of them take part.
        vectors: approximate eigenvectors of L and mu, their residuals, and how they last changed,
            one per row; the starting point of `refresh`.
    """

    mu: float
    L: float
    work: float
    noisy: float
    vectors: np.ndarray = np.zeros((6, 0))

    @property
    def rate(self) -> float:
        """Return 1/sqrt(kappa), the rate at which y and v settle; at least a thousandth."""
        return (
            min(1.0, max(LEAST_RATE, math.sqrt(max(self.mu, 0.0) / self.L))) if self.L > 0 else 1.0
        )


class Probes(eqx.Module):
    """Client steps that measure a problem, on all of a client's samples and without codecs."""

    problem: BilevelProblem = eqx.field(static=True)

    @partial(client_step, uncoded=True)
    def curvature(
        self, payload: Point[PyTree], client: Client
    ) -> tuple[Point[PyTree], jax.Array, jax.Array]:
        """(x, y, u) -> grad^2_yy g_i u, ||a_i||_1, and 1 if the client draws minibatches."""
        data = client.data
        product = hvp(self.problem, *payload, data.lower.full(data.client))
        drawn = data.lower.batch_size is not None or data.upper.batch_size is not None
        return Point(v=product), jnp.asarray(client.plan.norm, float), jnp.asarray(drawn, float)

    @partial(client_step, uncoded=True)
    def response(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(x, y, u) -> grad^2_yx g_i u, for u like x."""
        x, y, u = payload
        batch = client.data.lower.full(client.data.client)
        slope = jax.jvp(lambda x: grad_lower_y(self.problem, x, y, batch), (x,), (u,))[1]
        return Point(v=slope)

    @partial(client_step, uncoded=True)
    def check(self, payload: PyTree, client: Client) -> Point[PyTree]:
        """(point, best point, rows of vectors like y) -> what the end of a window needs.

        The three directions at the point, the products of grad^2_yy g_i with the vectors, and the
        upper loss with y solved to first order, f_i - <grad_y g_i, v>: at the point, its excess
        over that at the best point, the square of the excess, and the correction
        <grad_y g_i, v>.
        """
        problem, (at, best, vectors) = self.problem, payload
        (x, y, v), data = at, client.data
        lower, upper = data.lower.full(data.client), data.upper.full(data.client)
        d = directions(problem, x, y, v, lower, upper)
        value = -residual(problem, x, y, v, lower, upper)
        excess = value + residual(problem, best.x, best.y, best.v, lower, upper)
        correction = trees.dot(d.y, v)
        numbers = [value, excess, excess**2, correction]
        numbers = jnp.stack([number.astype(value.dtype) for number in numbers])
        images = jax.lax.map(lambda u: hvp(problem, x, y, u, lower), vectors)
        return Point(x=(d.x, numbers), y=d.y, v=(d.v, images))

    @partial(client_step, uncoded=True)
    def hypergradient_size(self, at: Point[PyTree], client: Client) -> Point[PyTree]:
        """(x, y, v) -> SimFBO's directions, with all local steps taken at the point."""
        still = Point(0.0, 0.0, 0.0)
        return local_steps(drawn_directions(self.problem), at, client, still)


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
        client_step: `Probes(problem).curvature`.
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
    flat, steep = min(seen, key=lambda one: one.mu), max(seen, key=lambda one: one.L)
    vectors = np.stack([(steep, flat)[row % 2].vectors[row] for row in range(6)])
    return Curvature(flat.mu, steep.L, work, 1.0, vectors)


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
        client_step: `Probes(problem).curvature`.
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
    basis, diagonal, beside = [first / np.linalg.norm(first)], [], []
    rest, values, vectors = np.zeros_like(first), np.zeros(1), np.ones((1, 1))
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
    ends = vectors[:, [-1, 0]].T @ np.stack(basis[: len(diagonal)])
    rows = np.concatenate([ends, np.outer(vectors[-1, [-1, 0]], rest), 0 * ends])
    return Curvature(float(values[0]), float(values[-1]), product.work, product.noisy, rows)


def refresh(old: Curvature, basis: np.ndarray, images: np.ndarray) -> Curvature:
    """Update mu and L from the products of a later Hessian with a few vectors.

    One step of LOBPCG (Knyazev 2001) at both ends of the spectrum, without a preconditioner.

    Args:
        old: the curvature so far.
        basis: orthonormal vectors, one per row (`orthonormal(old.vectors)`).
        images: the products of the Hessian with them.

    Returns:
        The curvature, with the vectors to use next time.
    """
    used = np.linalg.norm(basis, axis=1) > 0.5
    basis, images = basis[used], images[used]
    values, vectors = np.linalg.eigh((basis @ images.T + images @ basis.T) / 2)
    ends, moved = vectors[:, [-1, 0]].T @ basis, vectors[:, [-1, 0]].T @ images
    residuals = moved - values[[-1, 0], None] * ends
    caution = 0.9 if old.noisy else 0.5  # the factor by which L may fall, and mu rise, at a time
    mu, L = float(values[0]), max(float(values[-1]), caution * old.L)
    if old.mu > 0:  # else rounding, or a lower loss that is not convex, made it negative
        mu = min(mu, old.mu / caution)
    along = np.sum(ends * old.vectors[:2], axis=1, keepdims=True)
    changes = ends - along * old.vectors[:2]
    rows = np.concatenate([ends, residuals, changes])
    return Curvature(mu, L, old.work, old.noisy, rows)


def orthonormal(vectors: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the rows' span, padded with zero rows to as many rows."""
    basis: list[np.ndarray] = []
    for vector in vectors:
        length = float(np.linalg.norm(vector))
        rest = vector / length if length > 0 else vector
        if basis:
            rest = _without(_without(rest, basis), basis)
        size = float(np.linalg.norm(rest))
        basis.append(rest / size if size > _TINY else np.zeros_like(rest))
    return np.stack(basis)


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
        steps: the client steps that measure the problem.
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
        noisy: above 0 where clients draw minibatches.
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
        self.size, self._like = sum(a.size for a in jax.tree.leaves(y)), y
        self.work, self.noisy = 1.0, 0.0
        self._step, self._federation, self._at = client_step, federation, (x, y)
        self._cohort, self._key = cohort, key
        self._total = cohort.weights.sum()  # one only in expectation where not everyone takes part

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        payload = Point(*self._at, _shaped(vector, self._like))
        reply, norm, drawn = self._federation.sum(self._step, payload, self._cohort, self._key)
        self.work, self.noisy = float(norm) / self._total, float(drawn)
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


def rows_like(matrix: np.ndarray, like: PyTree) -> PyTree:
    """Return a tree like y whose leaves have one more axis, for the rows of a matrix."""
    shaped = [_shaped(row, like) for row in matrix]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *shaped)


def rows_of(tree: PyTree) -> np.ndarray:
    """Return the rows of a matrix; the inverse of `rows_like`."""
    leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


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
