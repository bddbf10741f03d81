"""The penalty methods MemFBO and F2SA-2: hypergradients without second derivatives."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax

from simfbo.algorithms._common import (
    BilevelMethod,
    ServerSteps,
    State,
    is_rule,
    local_steps,
    require_point,
    weighs_work,
)
from simfbo.core import Client, Federation, Point, client_step
from simfbo.core.problem import PyTree, evaluate
from simfbo.errors import UserError

Gradient = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


class MemState(NamedTuple):
    """The variables: `base.v` is another lower variable, not SimFBO's v."""

    base: State


def _same_for_u(sizes: Any) -> Any:
    """Use the step size of y for u too."""
    if is_rule(sizes):
        raise UserError(
            "MemFBO must move y and u alike: give the server a step size or rule for x and y."
        )
    return sizes._replace(v=sizes.y)


class PenaltyMethod(BilevelMethod):
    """A first-order method with the lower problem as a penalty."""

    name = "MemFBO"
    known_violations: ClassVar = weighs_work("MemFBO")
    residuals: ClassVar = {"memfbo_step": "xy"}

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
        at, cohort = Point(*state.base[:3]), federation.cohort(key)
        q = federation.sum(self.memfbo_step, at, cohort, key)
        return MemState(self.server.advance(state.base, q))

    @client_step
    def memfbo_step(self, at: Point[PyTree], client: Client) -> Point[PyTree]:
        """Send the weighted sum of the directions of tau_i local steps."""
        return local_steps(self._draw, at, client, self.local)

    def _draw(self, at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
        lower_key, upper_key = jax.random.split(key)
        lower, upper = client.data.lower_batch(lower_key), client.data.upper_batch(upper_key)
        grad_f = jax.grad(lambda x, y: evaluate(self.problem.upper, x, y, upper), (0, 1))
        grad_g = jax.grad(lambda x, y: evaluate(self.problem.lower, x, y, lower), (0, 1))
        return self.directions(at, grad_f, grad_g)

    @abstractmethod
    def directions(self, at: Point[PyTree], grad_f: Gradient, grad_g: Gradient) -> Point[PyTree]:
        """Return the directions of the three variables from gradients on one batch each."""
