"""The curvature of the lower problem, found through the federation: mu and L.

The eigenvalues of grad^2_yy G between which all others lie, by Lanczos' method: the power iteration
that keeps its earlier vectors, and so finds both ends at once and sooner. Every product with the
Hessian is one exchange, entered into the ledger like any other; no Hessian is formed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from simfbo.algorithms._common import once_per_problem
from simfbo.core.federation import Client, ClientStep, Federation
from simfbo.core.keys import Purpose, host_rng
from simfbo.core.problem import BilevelProblem, Point, PyTree, hvp

EXCHANGES = 15
_TINY = 1e-6  # a rest of a direction this small holds nothing but rounding


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


@once_per_problem
def curvature_step(problem: BilevelProblem) -> ClientStep:
    """Return the client step (x, y, u) -> grad^2_yy g_i u on all samples, and ||a_i||_1."""

    def curvature(payload: Point[PyTree], client: Client) -> tuple[Point[PyTree], jax.Array]:
        data = client.data
        product = hvp(problem, *payload, data.lower.full(data.client))
        return Point(v=product), jnp.asarray(client.plan.norm, float)

    return curvature


def measure(
    client_step: ClientStep,
    federation: Federation,
    x: PyTree,
    y: PyTree,
    key: jax.Array,
    exchanges: int = EXCHANGES,
) -> Curvature:
    """Measure mu and L at (x, y) on one cohort.

    The same clients answer every time, with all their samples, so that all products are with one
    matrix: the mean of theirs, with their weights brought to a sum of one.

    Args:
        client_step: from `curvature_step`.
        federation: the clients.
        x: the upper variable.
        y: the lower variable.
        key: of the cohort and of the first direction.
        exchanges: the most products.

    Returns:
        The curvature.
    """
    cohort, (flat, shape) = federation.cohort(key), ravel_pytree(y)
    first = host_rng(key, Purpose.LANCZOS_START).normal(size=flat.size)
    basis, diagonal, beside, norm = [first / np.linalg.norm(first)], [], [], 1.0
    for _ in range(min(exchanges, flat.size)):
        direction = shape(jnp.asarray(basis[-1], flat.dtype))
        reply, norm = federation.sum(client_step, Point(x, y, direction), cohort, key)
        product = np.asarray(ravel_pytree(reply.v)[0], float)
        diagonal.append(float(product @ basis[-1]))
        rest = _without(_without(product, basis), basis)  # twice: once loses too many digits
        length = float(np.linalg.norm(rest))
        if not length > _TINY * max(map(abs, diagonal)):
            break
        beside.append(length)
        basis.append(rest / length)
    offset = beside[: len(diagonal) - 1]
    values = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(offset, 1) + np.diag(offset, -1))
    total = cohort.weights.sum()  # one only in expectation, where not everyone takes part
    return Curvature(*(float(value / total) for value in (values[0], values[-1], norm)))


def _without(vector: np.ndarray, basis: list[np.ndarray]) -> np.ndarray:
    """Return the part of a vector orthogonal to an orthonormal basis."""
    stack = np.stack(basis)
    return vector - stack.T @ (stack @ vector)
