"""MemFBO and F2SA-2: a hypergradient without second derivatives, from a penalty."""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax

from simfbo.algorithms._common import (
    ServerSteps,
    State,
    is_rule,
    local_steps,
    require_point,
    require_shared,
)
from simfbo.core.federation import Client, Federation
from simfbo.core.method import Method, client_step
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.errors import UserError


class MemState(NamedTuple):
    """The variables: `base.v` is another lower variable, not SimFBO's v."""

    base: State


def _same_for_u(sizes: Any) -> Any:
    """Return step sizes in which that of y serves u too."""
    if is_rule(sizes):
        raise UserError(
            "MemFBO must move y and u alike: give the server a step size or rule for x and y."
        )
    return sizes._replace(v=sizes.y)


class PenaltyMethod(Method):
    """A first-order method: the lower problem enters as a penalty."""

    name = "MemFBO"
    known_violations: ClassVar = {
        "unequal local work": "MemFBO weighs clients by p_i ||a_i||_1, so unequal local work moves "
        "its solution."
    }
    residuals: ClassVar = {"memfbo_step": "xy"}

    problem: BilevelProblem = eqx.field(static=True, converter=require_shared)
    local: Point[float] = eqx.field(converter=lambda eta: _same_for_u(require_point("local", eta)))
    server: ServerSteps = eqx.field(converter=lambda gamma: ServerSteps.of(_same_for_u(gamma)))
    penalty: float = 100.0

    def __check_init__(self) -> None:
        if not 0 < self.penalty < float("inf"):
            raise UserError(f"The penalty must be a positive number, got {self.penalty}.")

    def init(self, x: PyTree, y: PyTree) -> MemState:
        base = self.server.init(x, y)
        return MemState(base._replace(v=base.y))

    def round(self, state: MemState, federation: Federation, key: jax.Array) -> MemState:
        """Sum the clients' directions, and move along them."""
        at, cohort = Point(*state.base[:3]), federation.cohort(key)
        q = federation.sum(self.memfbo_step, at, cohort, key)
        return MemState(self.server.advance(state.base, q))

    @client_step
    def memfbo_step(self, at: Point[PyTree], client: Client) -> Point[PyTree]:
        """Return the weighted sum of the directions of tau_i local steps."""
        return local_steps(self.draw, at, client, self.local)

    @abstractmethod
    def draw(self, at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
        """Return the directions of the three variables on batches of a client."""
