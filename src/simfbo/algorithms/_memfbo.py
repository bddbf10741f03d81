"""MemFBO: the memory-efficient first-order single-loop method for federated bilevel optimisation,
AAAI 2025.

No product with a Hessian: the lower problem enters as a penalty, and the hypergradient is a
difference of two gradients. One communication round per iteration, as SimFBO.
"""

from typing import Any, NamedTuple

import jax

from simfbo.algorithms._simfbo import Draw, Server, State, Steps, local_steps, server_side
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, Federation
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


def memfbo(
    problem: BilevelProblem,
    local: Steps,
    server: Server | Steps | None = None,
    penalty: float = 100.0,
) -> Algorithm:
    """Return MemFBO.

    With u the minimiser of f + lambda g over y and y that of g alone,

        d_y = grad_y g(x, y);     d_u = grad_y f(x, u) / lambda + grad_y g(x, u);
        d_x = grad_x f(x, u) + lambda [grad_x g(x, u) - grad_x g(x, y)]

    and clients and server move along them as in SimFBO. d_x tends to the hypergradient as 1/lambda.

    Args:
        problem: the two losses.
        local: the clients' step sizes. That of y serves u too, and v is not used: where x moves, y
            and u must follow alike, since lambda times their difference enters d_x.
        server: as in `simfbo`.
        penalty: lambda. A large one brings a small bias, and needs as many digits.

    Returns:
        The algorithm.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = memfbo(quadratic().problem, Steps(y=0.2, v=0.2, x=0.05), penalty=50.0)
    """
    if not 0 < penalty < float("inf"):
        raise UserError(f"The penalty must be a positive number, got {penalty}.")
    steps = local_steps(penalised_directions(problem, penalty), _alike(local))
    init_base, advance = server_side(_alike(local if server is None else server), None)

    def memfbo_step(payload: Point, client: Client) -> Point:
        return steps(payload, client)

    def init(x: PyTree, y: PyTree) -> MemState:
        base = init_base(x, y)
        return MemState(base._replace(v=base.y))

    def round(state: MemState, federation: Federation, key: jax.Array) -> MemState:
        cohort = federation.cohort(key)
        q = federation.aggregate(memfbo_step, Point(*state.base[:3]), cohort, key)
        return MemState(advance(state.base, q))

    bias = "MemFBO weighs clients by p_i ||a_i||_1, so unequal local work moves its solution."
    return Algorithm("MemFBO", init, round, (memfbo_step,), {"unequal local work": bias})


def _alike(sizes: Any) -> Any:
    """Return the step sizes with that of y for u."""
    return sizes._replace(v=sizes.y)


def penalised_directions(problem: BilevelProblem, penalty: float) -> Draw:
    """Return (at, client, key) -> (d_x, d_y, d_u); both gradients of g see the same batch."""

    def draw(at: Point, client: Client, key: jax.Array) -> Point:
        x, y, u = at
        lower_key, upper_key = jax.random.split(key)
        lower, upper = client.data.lower_batch(lower_key), client.data.upper_batch(upper_key)
        grad_f = jax.grad(lambda x, y: evaluate(problem.upper, x, y, upper), (0, 1))
        grad_g = jax.grad(lambda x, y: evaluate(problem.lower, x, y, lower), (0, 1))
        (f_x, f_u), (gu_x, g_u), (gy_x, g_y) = grad_f(x, u), grad_g(x, u), grad_g(x, y)
        d_x = trees.add_scaled(f_x, penalty, trees.subtract(gu_x, gy_x))
        return Point(d_x, g_y, trees.add_scaled(g_u, 1 / penalty, f_u))

    return draw
