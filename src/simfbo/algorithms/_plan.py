"""Step sizes from what was measured of the lower problem (`_auto_steps`)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import Rule
from simfbo.algorithms._curvature import LEAST_RATE
from simfbo.core.method import Method
from simfbo.core.problem import BilevelProblem, Point


class Plan(NamedTuple):
    """Step sizes in the forms that methods take them.

    Attributes:
        local: eta, for methods with step sizes of clients and server.
        server: gamma, for the same methods.
        plain: one set of step sizes, for methods that take only that.
    """

    local: Point[float]
    server: Point[Rule]
    plain: Point[float]


class FromPlan(NamedTuple):
    """Builds a method with the step sizes of a plan; equal ones share compiled programs.

    Attributes:
        factory: (problem, local, server) -> the method.
        problem: the two losses.
    """

    factory: Callable[..., Method]
    problem: BilevelProblem

    def __call__(self, plan: Plan) -> Method:
        """Return the method with the steps of a plan."""
        return self.factory(self.problem, plan.local, plan.server)


class Sizes(NamedTuple):
    """The step sizes that a state stands for.

    Attributes:
        gamma: of y and v on the server, per unit of local work.
        momentum: of y and v.
        plain: of y and v, for a method with one set of step sizes.
        x: of x, for such a method.
    """

    gamma: Any
    momentum: Any
    plain: Any
    x: Any


@jax.jit
def sizes_for(found: Any, pull: Any, pace: Any, halvings: Any, typical: float) -> Sizes:
    """Return the step sizes for what was measured."""
    mu, largest, work, _ = found
    L = jnp.where(largest > 0, largest, 1.0)  # zeros: nothing was computed
    work = jnp.where(work > 0, work, 1.0)
    factor = 0.5 ** halvings.astype(L.dtype)
    rate = jnp.clip(jnp.sqrt(jnp.maximum(mu, 0.0) / L), LEAST_RATE, 1.0)
    x = jnp.where(pull > 0, pace[0] * typical / jnp.where(pull > 0, pull, 1.0), 0.0)
    return Sizes(factor / (L * work), (1 - rate) ** 2, factor / L, x)


def plan_for(sizes: Sizes, rules: Point[Rule], rounds: int) -> Plan:
    """Return step sizes in the forms that methods take them."""
    eta = sizes.gamma / math.sqrt(rounds)
    return Plan(Point(0.0, eta, eta), rules, Point(sizes.x, sizes.plain, sizes.plain))
