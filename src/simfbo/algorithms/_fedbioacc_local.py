"""FedBiOAcc with local lower problems: Li, Huang, Huang, "Communication-Efficient Federated Bilevel
Optimization with Global and Local Lower Level Problems", NeurIPS 2023 (arXiv 2302.06701): our
reading of the abstract.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.algorithms._common import STALE
from simfbo.algorithms._fedbioacc import StormMethod
from simfbo.core import Client, Federation, Method, WithMemory, client_step, trees
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.errors import UserError
from simfbo.ranges import Positive


class LocalState(NamedTuple):
    """x, the initial y_i, the estimator d of x's direction, and the local steps so far."""

    x: PyTree
    y: PyTree
    d: PyTree
    t: jax.Array


class Own(NamedTuple):
    """A client's memory: y_i and v_i, the estimators of their directions, 1 once they are set."""

    at: Point[PyTree]
    d: Point[PyTree]
    begun: jax.Array


class FedBiOAccLocal(StormMethod):
    """FedBiOAcc for a personal lower level; `fedbioacc_local` has the equations."""

    known_violations: ClassVar = {
        **dict.fromkeys(
            ("finds the solution", "unequal local work"),
            "Its lower problems are personal, so its solution is another.",
        ),
        "identical clients": STALE,
    }
    name = "FedBiOAcc-Local"
    is_personal = True

    def init(self, x: PyTree, y: PyTree) -> LocalState:
        x, y = trees.on_device((x, y))
        return LocalState(x, y, trees.host_zeros(x), trees.on_device(np.zeros(())))

    def client_memory(self, x: PyTree, y: PyTree) -> Own:
        y = trees.on_device(y)
        zero = trees.host_zeros(y)
        return Own(Point(y=y, v=zero), Point(y=zero, v=zero), trees.on_device(np.zeros(())))

    def client_y(self, memory: Own) -> PyTree:
        return memory.at.y

    def round(self, state: LocalState, federation: Federation, key: jax.Array) -> LocalState:
        payload, cohort = (Point(x=(state.x, state.d)), state.t), federation.cohort(key)
        change, tau, count = federation.sum(self.local_step, payload, cohort, key)
        x, d = trees.add((state.x, state.d), change.x)
        return LocalState(x, state.y, d, state.t + tau / count)

    @client_step
    def local_step(self, payload: PyTree, client: Client) -> WithMemory:
        """Send the changes of x and d_x over tau_i local steps, tau_i and 1; store the rest."""
        (shared, t), memory = payload, client.memory
        at, d = memory.at._replace(x=shared.x[0]), memory.d._replace(x=shared.x[1])
        z, d, tau = self.walk(at, d, t, memory.begun, client)
        change = Point(x=trees.subtract((z.x, d.x), shared.x))
        after = Own(z._replace(x=None), d._replace(x=None), jnp.ones_like(memory.begun))
        return WithMemory((change, tau, jnp.ones_like(tau)), after)


def fedbioacc_local(
    problem: BilevelProblem,
    steps: Point[float],
    radius: Positive | None = None,
    delta: Positive = 10.0,
    u: Positive = 1000.0,
    c: Positive = 0.1,
) -> Method:
    """FedBiOAcc for a personal lower level; arguments as for `fedbioacc`.

    Our reading of the abstract: the algorithm in the paper may differ.

    The local steps are those of `fedbioacc`. y_i, v_i, d_y and d_v are stored on the client; the
    server adds the mean changes of x and d_x. A client's first local step sets its estimators.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> problem = quadratic().problem._replace(lower_level="private")
        >>> algorithm = fedbioacc_local(problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    """
    if problem.lower_level != "private":
        raise UserError(
            "fedbioacc_local gives every client a lower variable of its own: declare the problem "
            'with lower_level="private" (task.private in configurations), or use fedbioacc.'
        )
    return FedBiOAccLocal(problem, steps, radius, delta, u, c)
