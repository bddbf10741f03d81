"""MemFBO: the memory-efficient first-order single-loop method for federated bilevel optimisation,
AAAI 2025.
"""

from typing import Annotated, Literal

from simfbo.algorithms._common import Server
from simfbo.algorithms._f2sa2 import F2SA2
from simfbo.algorithms._penalty import Gradient, MemState, PenaltyMethod
from simfbo.core import BilevelProblem, Method, Point, trees
from simfbo.core.problem import PyTree
from simfbo.errors import UserError
from simfbo.ranges import Channels, Positive


class MemFBO(PenaltyMethod):
    """MemFBO; `memfbo` has the equations. `base.v` of the state is u."""

    def point(self, state: MemState) -> Point[PyTree]:
        return Point(state.base.x, state.base.y)

    def directions(self, at: Point[PyTree], grad_f: Gradient, grad_g: Gradient) -> Point[PyTree]:
        x, y, u = at
        (f_x, f_u), (gu_x, g_u), (gy_x, g_y) = grad_f(x, u), grad_g(x, u), grad_g(x, y)
        d_x = trees.add_scaled(f_x, self.penalty, trees.subtract(gu_x, gy_x))
        return Point(d_x, g_y, trees.add_scaled(g_u, 1 / self.penalty, f_u))


def memfbo(
    problem: BilevelProblem,
    local: Annotated[Point[float], Channels("xy")],
    server: Server | None = None,
    penalty: Positive = 100.0,
    order: Literal[1, 2] = 1,
) -> Method:
    """MemFBO, without second derivatives: the lower problem becomes a penalty.

    With u the minimiser of f + lambda g over y and y that of g alone,

        d_y = grad_y g(x, y);     d_u = grad_y f(x, u) / lambda + grad_y g(x, u);
        d_x = grad_x f(x, u) + lambda [grad_x g(x, u) - grad_x g(x, y)]

    and clients and server step along them as in SimFBO. The error of d_x is O(1/lambda).

    With `order=2` the difference is central: with u+ and u- the minimisers of g +- f/lambda,

        d_+- = grad_y g(x, u+-) +- grad_y f(x, u+-) / lambda;
        d_x = [grad_x f(x, u+) + grad_x f(x, u-)] / 2 + lambda/2 [grad_x g(x, u+) - grad_x g(x, u-)]

    and the state's y is (u+ + u-) / 2. The error of d_x is O(1/lambda^2), at the cost of a second
    gradient of f. lambda must be large enough for g - f/lambda to be convex in y.

    Args:
        problem: the two losses.
        local: the clients' step sizes. That of y is used for u too, since lambda times the
            difference of y and u is part of d_x; that of v is not used.
        server: as in `simfbo`.
        penalty: lambda; larger values reduce the bias and increase rounding errors.
        order: 1 for the forward difference, 2 for the central one.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = memfbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.2), penalty=50.0)
    """
    if order not in (1, 2):
        raise UserError(f"The order must be 1 or 2, got {order}.")
    kind = MemFBO if order == 1 else F2SA2
    return kind(problem, local, local if server is None else server, penalty)
