"""The curvature of the lower problem, measured through the federation.

The Lanczos method estimates mu and L, the extreme eigenvalues of grad^2_yy G; one step of LOBPCG
per window updates them while x changes. Conjugate gradients estimate the change of y*(x) with x.
Every product is one exchange, which the ledger records; no Hessian is formed.
"""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._common import drawn_directions, local_steps
from simfbo.core import trees
from simfbo.core.federation import Client, Federation
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

VECTORS = 6  # approximate eigenvectors of L and mu, their residuals, and their last changes
_TINY = 1e-6  # the relative size of a residual that consists of rounding errors
_KNOWN = 0.1  # the relative error at which an eigenvalue has converged
_SETTLED = 1e-3  # the relative residual at which a linear system is solved
_FEWEST, _MOST_NUMBERS = 3, 10**8  # Lanczos vectors; numbers in all of them
_LEAST_RATE = 1e-3
_SHORT = 8  # exchanges with each of several cohorts, at least


class Curvature(NamedTuple):
    """The curvature of the lower problem at a point.

    Attributes:
        mu: the estimate of the smallest eigenvalue of grad^2_yy G, from above.
        L: the estimate of the largest eigenvalue, from below.
        work: the clients' mean ||a_i||_1, the number of local steps in a message.
        noisy: above 0 with minibatches or partial participation.
        vectors: the starting point of `refresh`, one vector per row.
    """

    mu: Any
    L: Any
    work: Any
    noisy: Any
    vectors: Any

    @property
    def rate(self) -> jax.Array:
        """1/sqrt(kappa), the rate of convergence of y and v; at least a thousandth."""
        L = jnp.where(self.L > 0, self.L, 1.0)
        rate = jnp.clip(jnp.sqrt(jnp.maximum(self.mu, 0.0) / L), _LEAST_RATE, 1.0)
        return jnp.where(self.L > 0, rate, 1.0)


class Probes(eqx.Module):
    """Client steps of measurements, on all samples of a client and without codecs."""

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
        """(point, best point, rows of vectors like y) -> the measurements at the end of a window.

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
        numbers = [value, excess, excess**2, trees.dot(d.y, v)]
        numbers = jnp.stack([number.astype(value.dtype) for number in numbers])
        images = jax.lax.map(lambda u: hvp(problem, x, y, u, lower), vectors)
        return Point(x=(d.x, numbers), y=d.y, v=(d.v, images))

    @partial(client_step, uncoded=True)
    def hypergradient_size(self, at: Point[PyTree], client: Client) -> Point[PyTree]:
        """(x, y, v) -> SimFBO's directions, with zero step sizes on the clients."""
        eta = Point(0.0, 0.0, 0.0)
        return local_steps(drawn_directions(self.problem), at, client, eta)


# Before and after a run: Lanczos


def measure(
    probes: Probes, federation: Federation, x: PyTree, y: PyTree, key: jax.Array, exchanges: int
) -> Curvature:
    """Measure mu and L at (x, y); with partial participation, the extremes of three cohorts.

    `key` is for the cohorts and initial directions; `exchanges` is the maximum number of products.
    """
    if len(federation.cohort(key).ids) >= federation.n:
        return measure_cohort(probes, federation, x, y, key, exchanges)
    exchanges, keys = max(_SHORT, exchanges // 3), jax.random.split(key, 3)
    curvatures = [measure_cohort(probes, federation, x, y, key, exchanges) for key in keys]
    flattest, steepest = min(curvatures, key=lambda c: c.mu), max(curvatures, key=lambda c: c.L)
    vectors = np.stack([(steepest, flattest)[row % 2].vectors[row] for row in range(VECTORS)])
    work = sum(curvature.work for curvature in curvatures) / len(curvatures)
    return Curvature(flattest.mu, steepest.L, work, 1.0, vectors)


def measure_cohort(
    probes: Probes, federation: Federation, x: PyTree, y: PyTree, key: jax.Array, exchanges: int
) -> Curvature:
    """Measure mu and L at (x, y) on one cohort, to a relative error of ten per cent.

    All exchanges are with the same clients and all of their samples, so that all products are with
    the same matrix: the clients' mean, with weights normalised to a sum of one.
    """
    cohort, size = federation.cohort(key), sum(leaf.size for leaf in jax.tree.leaves(y))
    total, work, noisy = cohort.weights.sum(), 1.0, 0.0
    first = host_rng(key, Purpose.LANCZOS_START).normal(size=size)
    basis, diagonal, off_diagonal = [first / np.linalg.norm(first)], [], []
    rest, values, vectors = np.zeros_like(first), np.zeros(1), np.ones((1, 1))
    for _ in range(min(exchanges, size, max(_FEWEST, _MOST_NUMBERS // size))):
        payload = Point(x, y, shaped(basis[-1], y))
        reply, norm, drawn = federation.sum(probes.curvature, payload, cohort, key)
        work, noisy = float(norm / total), float(drawn)
        image = np.concatenate([np.ravel(a).astype(float) for a in jax.tree.leaves(reply.v)])
        image /= total
        diagonal.append(float(image @ basis[-1]))
        stack = np.stack(basis)
        rest = image - stack.T @ (stack @ image)
        rest = rest - stack.T @ (stack @ rest)  # reorthogonalisation
        length = float(np.linalg.norm(rest))
        values, vectors = np.linalg.eigh(
            np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
        )
        errors = length * np.abs(vectors[-1, [0, -1]])
        converged = np.all(errors < _KNOWN * np.abs(values[[0, -1]])) and len(diagonal) >= _FEWEST
        if converged or not length > _TINY * max(map(abs, diagonal)):
            break
        off_diagonal.append(length)
        basis.append(rest / length)
    ends = vectors[:, [-1, 0]].T @ np.stack(basis[: len(diagonal)])
    rows = np.concatenate([ends, np.outer(vectors[-1, [-1, 0]], rest), 0 * ends])
    return Curvature(float(values[0]), float(values[-1]), work, noisy, rows)


# While x moves: LOBPCG


def refresh(old: Curvature, basis: jax.Array, images: jax.Array) -> Curvature:
    """Update mu and L by the products of a new Hessian with a few vectors.

    One step of LOBPCG (Knyazev 2001) at both ends of the spectrum, without a preconditioner.

    Args:
        old: the previous curvature.
        basis: orthonormal vectors, one per row (`orthonormal(old.vectors)`).
        images: the products of the Hessian with them.
    """
    ritz = (basis @ images.T + images @ basis.T) / 2
    # Rows of zeros are padding: the shift keeps their eigenvalues away from both ends.
    missing = jnp.linalg.norm(basis, axis=1) <= 0.5
    shift = jnp.diag(jnp.where(missing, 2 * jnp.linalg.norm(ritz), 0.0))
    high, high_vectors = jnp.linalg.eigh(ritz - shift)
    low, low_vectors = jnp.linalg.eigh(ritz + shift)
    weights = jnp.stack([high_vectors[:, -1], low_vectors[:, 0]])
    ends, products = weights @ basis, weights @ images
    residuals = products - jnp.stack([high[-1], low[0]])[:, None] * ends
    caution = jnp.where(old.noisy > 0, 0.9, 0.5)  # limits the decrease of L and the increase of mu
    # mu is not positive because of rounding errors or a lower loss that is not convex.
    mu = jnp.where(old.mu > 0, jnp.minimum(low[0], old.mu / caution), low[0])
    L = jnp.maximum(high[-1], caution * old.L)
    along = jnp.sum(ends * old.vectors[:2], axis=1, keepdims=True)
    rows = jnp.concatenate([ends, residuals, ends - along * old.vectors[:2]])
    return Curvature(mu, L, old.work, old.noisy, rows)


def orthonormal(vectors: Any) -> jax.Array:
    """Return an orthonormal basis of the rows' span, padded with zeros to the same shape."""
    basis = jnp.zeros_like(vectors)
    for k, vector in enumerate(vectors):
        length = jnp.linalg.norm(vector)
        rest = vector / jnp.where(length > 0, length, 1.0)
        for _ in range(2):
            rest = rest - basis.T @ (basis @ rest)
        size = jnp.linalg.norm(rest)
        row = jnp.where(size > _TINY, rest / jnp.where(size > 0, size, 1.0), 0.0)
        basis = basis.at[k].set(row)
    return basis


# The change of y*(x): conjugate gradients, one product per round


class Shift(NamedTuple):
    """Conjugate gradients for z = (grad^2_yy G)^-1 grad^2_yx G u, the derivative of y*(x) along u.

    Attributes:
        z: the approximate solution.
        rest: the residual.
        direction: of the next step.
        square: the squared norm of the residual.
        enough: the squared norm at which the system is solved.
        left: the maximum number of remaining products; 0 at the end.
        key: data of the key of the cohort.
    """

    z: PyTree
    rest: PyTree
    direction: PyTree
    square: Any
    enough: Any
    left: Any
    key: Any


def no_shift(y: PyTree) -> Shift:
    """Return the state before conjugate gradients have started."""
    zero = trees.host_zeros(trees.on_device(y))
    scalar = np.zeros((), jnp.result_type(float))
    words = np.zeros_like(jax.random.key_data(jax.random.key(0)))
    return Shift(zero, zero, zero, scalar, scalar, np.zeros((), np.int32), words)


def begin_shift(
    probes: Probes, federation: Federation, at: Point[PyTree], u: PyTree, key: jax.Array, most: Any
) -> Shift:
    """Compute the right-hand side at x and y in one exchange; at most `most` products follow."""
    cohort = federation.cohort(key)
    rhs = federation.sum(probes.response, (at.x, at.y, u), cohort, key).v
    return _begun(rhs, cohort.weights, key, most)


def continue_shift(
    probes: Probes, federation: Federation, at: Point[PyTree], shift: Shift
) -> Shift:
    """Take one step of conjugate gradients, with one product."""
    key = jax.random.wrap_key_data(shift.key)
    cohort = federation.cohort(key)
    payload = Point(at.x, at.y, shift.direction)
    image = federation.sum(probes.curvature, payload, cohort, key)[0].v
    return _continued(shift, image, cohort.weights)


@jax.jit
def _begun(rhs: PyTree, weights: Any, key: jax.Array, most: Any) -> Shift:
    rhs = trees.scale(1 / jnp.sum(jnp.asarray(weights)), rhs)
    square = trees.squared_norm(rhs).astype(float)
    left = jnp.where(square > 0, jnp.asarray(most, jnp.int32), 0)
    words = jax.random.key_data(key)
    return Shift(trees.zeros_like(rhs), rhs, rhs, square, _SETTLED**2 * square, left, words)


@jax.jit
def _continued(at: Shift, image: PyTree, weights: Any) -> Shift:
    image = trees.scale(1 / jnp.sum(jnp.asarray(weights)), image)
    curved = trees.dot(at.direction, image).astype(float)
    step = jnp.where(curved > 0, at.square / jnp.where(curved > 0, curved, 1.0), 0.0)
    rest = trees.add_scaled(at.rest, -step, image)
    square = trees.squared_norm(rest).astype(float)
    unsolved = (curved > 0) & (square > at.enough)
    return Shift(
        trees.add_scaled(at.z, step, at.direction),
        rest,
        trees.add_scaled(rest, square / at.square, at.direction),
        square,
        at.enough,
        jnp.where(unsolved, at.left - 1, 0),
        at.key,
    )


def shaped(vector: Any, like: PyTree) -> PyTree:
    """Convert a vector to a pytree with the shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    arrays = [
        vector[end - leaf.size : end].reshape(leaf.shape).astype(leaf.dtype)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def flat_rows(tree: PyTree) -> jax.Array:
    """Flatten a pytree of stacked leaves to a matrix with one row per slice."""
    leaves = [jnp.reshape(leaf, (len(leaf), -1)).astype(float) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves, axis=1)
