"""MemFBO: the memory-efficient first-order single-loop method for federated bilevel optimisation,
AAAI 2025; with `order=2`, the central difference of F2SA-2: Chen, Li, Chayti, Zhang, "Faster
Gradient Methods for Highly-smooth Stochastic Bilevel Optimization", ICLR 2026.

No product with a Hessian: the lower problem enters as a penalty, and the hypergradient is a
difference of two gradients. One communication round per iteration, as SimFBO.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from simfbo.algorithms._common import Draw, Server, State, local_steps, server_side
from simfbo.algorithms._settings import once_per_problem, with_settings
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree, evaluate
from simfbo.errors import UserError


class MemState(NamedTuple):
    """The variables: `base.v` is the minimiser of the penalised problem, not SimFBO's v."""

    base: State

    @property
    def x(self) -> PyTree:
        """Return x."""
        return self.base.x

    @property
    def y(self) -> PyTree:
        """Return the solution of the lower problem (the paper's z)."""
        return self.base.y

    @property
    def penalised(self) -> PyTree:
        """Return the minimiser of f + lambda g over y (the paper's y)."""
        return self.base.v


class CentralState(NamedTuple):
    """The variables of order 2: `base.y` and `base.v` are u- and u+, a minimiser on each side."""

    base: State

    @property
    def x(self) -> PyTree:
        """Return x."""
        return self.base.x

    @property
    def y(self) -> PyTree:
        """Return the mean of u- and u+, which solves the lower problem to order 1/lambda^2."""
        return _middle(self.base.y, self.base.v)

    @property
    def sides(self) -> tuple[PyTree, PyTree]:
        """Return u- and u+, the minimisers of g - f/lambda and of g + f/lambda over y."""
        return self.base.y, self.base.v


@with_settings
def memfbo(
    problem: BilevelProblem,
    local: Point[float],
    server: Server | None = None,
    penalty: float = 100.0,
    order: int = 1,
) -> Algorithm:
    """MemFBO, which needs no second derivatives: the lower problem becomes a penalty.

    With u the minimiser of f + lambda g over y and y that of g alone,

        d_y = grad_y g(x, y);     d_u = grad_y f(x, u) / lambda + grad_y g(x, u);
        d_x = grad_x f(x, u) + lambda [grad_x g(x, u) - grad_x g(x, y)]

    and clients and server move along them as in SimFBO. d_x tends to the hypergradient as 1/lambda.

    With `order=2` the difference is central: with u+ and u- the minimisers of g +- f/lambda,

        d_+- = grad_y g(x, u+-) +- grad_y f(x, u+-) / lambda;
        d_x = [grad_x f(x, u+) + grad_x f(x, u-)] / 2 + lambda/2 [grad_x g(x, u+) - grad_x g(x, u-)]

    and the state's y is (u+ + u-) / 2. d_x tends to the hypergradient as 1/lambda^2, at the price
    of one more gradient of f. lambda must be so large that g - f/lambda is still convex in y.

    Args:
        problem: the two losses.
        local: the clients' step sizes. That of y serves u too, and v is not used: where x moves, y
            and u must follow alike, since lambda times their difference enters d_x.
        server: as in `simfbo`.
        penalty: lambda; a larger one has a smaller bias but loses more digits to rounding.
        order: 1 for the forward difference, 2 for the central one.

    Returns:
        The algorithm.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = memfbo(quadratic().problem, Point(x=0.05, y=0.2, v=0.2), penalty=50.0)
    """
    if not 0 < penalty < float("inf"):
        raise UserError(f"The penalty must be a positive number, got {penalty}.")
    if order not in _ORDERS:
        raise UserError(f"The order must be 1 or 2, got {order}.")
    memfbo_step, of = _client_step(problem, penalty, order), _ORDERS[order]
    init_base, advance = server_side(_alike(local if server is None else server), None)

    def init(x: PyTree, y: PyTree) -> MemState | CentralState:
        base = init_base(x, y)
        return of.state(base._replace(v=base.y))

    def round(state: Any, federation: Federation, key: jax.Array) -> MemState | CentralState:
        cohort = federation.cohort(key)
        q = federation.sum(memfbo_step, Point(*state.base[:3]), cohort, key, _alike(local))
        return of.state(advance(state.base, q))

    bias = "MemFBO weighs clients by p_i ||a_i||_1, so unequal local work moves its solution."
    return Algorithm(
        "MemFBO", init, round, (memfbo_step,), {"unequal local work": bias}, {"memfbo_step": "xy"}
    )


@once_per_problem
def _client_step(problem: BilevelProblem, penalty: float, order: int) -> ClientStep:
    draw = _ORDERS[order].directions(problem, penalty)

    def memfbo_step(at: Point[PyTree], client: Client) -> Point[PyTree]:
        return local_steps(draw, at, client)

    return memfbo_step


def _alike(sizes: Any) -> PyTree:
    """Return the step sizes with that of y for u."""
    if isinstance(sizes, optax.GradientTransformation):
        raise UserError(
            "MemFBO must move y and u alike: give the server a step size or rule for x and y."
        )
    return sizes._replace(v=sizes.y)


def penalised_directions(problem: BilevelProblem, penalty: float) -> Draw:
    """Return (at, client, key) -> (d_x, d_y, d_u); both gradients of g see the same batch."""

    def draw(at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
        x, y, u = at
        lower_key, upper_key = jax.random.split(key)
        lower, upper = client.data.lower_batch(lower_key), client.data.upper_batch(upper_key)
        grad_f = jax.grad(lambda x, y: evaluate(problem.upper, x, y, upper), (0, 1))
        grad_g = jax.grad(lambda x, y: evaluate(problem.lower, x, y, lower), (0, 1))
        (f_x, f_u), (gu_x, g_u), (gy_x, g_y) = grad_f(x, u), grad_g(x, u), grad_g(x, y)
        d_x = trees.add_scaled(f_x, penalty, trees.subtract(gu_x, gy_x))
        return Point(d_x, g_y, trees.add_scaled(g_u, 1 / penalty, f_u))

    return draw


def central_directions(problem: BilevelProblem, penalty: float) -> Draw:
    """Return (at, client, key) -> (d_x, d_-, d_+); the gradients on both sides see one batch."""

    def draw(at: Point[PyTree], client: Client, key: jax.Array) -> Point[PyTree]:
        x, minus, plus = at
        lower_key, upper_key = jax.random.split(key)
        lower, upper = client.data.lower_batch(lower_key), client.data.upper_batch(upper_key)
        grad_f = jax.grad(lambda x, y: evaluate(problem.upper, x, y, upper), (0, 1))
        grad_g = jax.grad(lambda x, y: evaluate(problem.lower, x, y, lower), (0, 1))
        (f_x, f_m), (g_x, g_m), (fp_x, f_p), (gp_x, g_p) = (
            grad_f(x, minus), grad_g(x, minus), grad_f(x, plus), grad_g(x, plus)
        )  # fmt: skip
        d_x = trees.add_scaled(_middle(f_x, fp_x), penalty / 2, trees.subtract(gp_x, g_x))
        d_minus = trees.add_scaled(g_m, -1 / penalty, f_m)
        return Point(d_x, d_minus, trees.add_scaled(g_p, 1 / penalty, f_p))

    return draw


def _middle(a: PyTree, b: PyTree) -> PyTree:
    """Return (a + b) / 2."""
    return trees.scale(0.5, trees.add(a, b))


class _Order(NamedTuple):
    """What an order of the difference determines: the state, and the directions."""

    state: Callable[[State], Any]
    directions: Callable[[BilevelProblem, float], Draw]


_ORDERS = {1: _Order(MemState, penalised_directions), 2: _Order(CentralState, central_directions)}
