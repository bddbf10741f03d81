"""SimFBO: Yang, Xiao, Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient
Federated Bilevel Learning", NeurIPS 2023, Algorithm 1.

One communication round per iteration. The server sends (x, y, v); client i takes tau_i steps on all
three at once and returns q_i, the weighted sum of its directions; the server applies the cohort's
weighted sum of the q_i with steps of its own and projects v onto a ball.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, Federation
from simfbo.core.problem import BilevelProblem, Point, PyTree, directions, independent_directions
from simfbo.errors import UserError

Draw = Callable[[Point, Client, jax.Array], Point]


class Steps(NamedTuple):
    """Step sizes for y, v and x: eta on the clients, gamma on the server."""

    y: float
    v: float
    x: float


class Server(NamedTuple):
    """An Optax transformation each for y, v and x; what it is fed is the aggregated direction.

    Example:
        >>> import optax
        >>> server = Server(y=optax.sgd(0.2), v=optax.sgd(0.1), x=optax.adam(0.001))
    """

    y: optax.GradientTransformation
    v: optax.GradientTransformation
    x: optax.GradientTransformation


class State(NamedTuple):
    """The three variables, the server's optimiser states, and how often the projection acted."""

    x: PyTree
    y: PyTree
    v: PyTree
    server: Point
    projected: jax.Array


def simfbo(
    problem: BilevelProblem,
    local: Steps,
    server: Server | Steps | None = None,
    radius: float | None = None,
    independent_batches: bool = False,
) -> Algorithm:
    """Return SimFBO.

    Client i, for k = 0 .. tau_i - 1, from the iterates at k:

        (y_i, v_i, x_i) -= a_k (eta_y d_y, eta_v d_v, eta_x d_x),     q += a_k d

    and the server, with p~_i the cohort's weights:

        y -= gamma_y sum_C p~_i q_y,i;   v = Proj_r(v - gamma_v sum_C p~_i q_v,i);
        x -= gamma_x sum_C p~_i q_x,i

    Clients that do unequal amounts of local work pull the solution towards themselves: use
    `shrofbo` there.

    Args:
        problem: the two losses.
        local: eta, the clients' step sizes. With one local step they do not matter.
        server: gamma, as step sizes or Optax transformations; the same as `local` by default.
        radius: r of the projection of v on the server; None for no projection.
        independent_batches: draw batches of their own for the three directions, as the paper
            writes it, at about 1.5 times the cost; by default they share one lower and one upper
            batch.

    Returns:
        The algorithm.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> algorithm = simfbo(quadratic().problem, Steps(y=0.2, v=0.1, x=0.05), radius=10.0)
    """
    steps = local_steps(drawn_directions(problem, independent_batches), local)
    init, advance = server_side(local if server is None else server, radius)

    def simfbo_step(payload: Point, client: Client) -> Point:
        return steps(payload, client)

    def round(state: State, federation: Federation, key: jax.Array) -> State:
        cohort = federation.cohort(key)
        q = federation.aggregate(simfbo_step, Point(state.x, state.y, state.v), cohort, key)
        return advance(state, q)

    bias = "SimFBO weighs clients by p_i ||a_i||_1, so unequal local work moves its solution."
    return Algorithm("SimFBO", init, round, (simfbo_step,), {"unequal local work": bias})


def local_steps(draw: Draw, eta: Steps) -> Callable[[Point, Client], Point]:
    """Return the clients' work (start, client) -> q = sum_k a_k d_k over tau_i local steps."""

    def moved(start: Point, q: Point) -> Point:
        steps = Point(x=eta.x, y=eta.y, v=eta.v)
        return Point(*(trees.add_scaled(z, -e, d) for z, e, d in zip(start, steps, q, strict=True)))

    def work(start: Point, client: Client) -> Point:
        coefs, rule, sizes = client.coefs, client.coefs.rule, jnp.asarray(client.coefs.steps)

        def step(k: Any, carry: tuple[Point, Any], at: Point) -> tuple[Point, Any]:
            q, speed = carry
            d = draw(at, client, jax.random.fold_in(client.key, k))
            change = trees.scale(sizes[k], d)
            if rule.momentum:
                speed = change = trees.add_scaled(change, rule.momentum, speed)
            kept = q if rule.keep == 1.0 else trees.scale(rule.keep, q)
            return trees.add(kept, change), speed

        zero = trees.zeros_like(start)
        carry = (zero, zero if rule.momentum else ())
        if coefs.steps.shape[-1] == 1:
            return step(0, carry, start)[0]
        return jax.lax.fori_loop(
            0, coefs.tau, lambda k, carry: step(k, carry, moved(start, carry[0])), carry
        )[0]

    return work


def drawn_directions(problem: BilevelProblem, independent_batches: bool = False) -> Draw:
    """Return (at, client, key) -> the three directions at a point, from batches of the client."""

    def shared(at: Point, client: Client, key: jax.Array) -> Point:
        lower, upper = jax.random.split(key)
        batches = client.data.lower_batch(lower), client.data.upper_batch(upper)
        return directions(problem, *at, *batches)

    def independent(at: Point, client: Client, key: jax.Array) -> Point:
        """Return them from five batches: zeta; psi and xi, a lower and an upper one each."""
        zeta, *keys = jax.random.split(key, 5)
        lower, upper = client.data.lower_batch, client.data.upper_batch
        psi, xi = (lower(keys[0]), upper(keys[1])), (lower(keys[2]), upper(keys[3]))
        return independent_directions(problem, *at, lower(zeta), psi, xi)

    return independent if independent_batches else shared


def server_side(
    gamma: Server | Steps, radius: float | None
) -> tuple[Callable[[PyTree, PyTree], State], Callable[[State, Point], State]]:
    """Return the server's `init(x0, y0)` and its compiled `advance(state, direction)`."""
    server = Server(*map(optax.sgd, gamma)) if isinstance(gamma, Steps) else gamma
    if radius is not None and not radius > 0:
        raise UserError(f"The radius of v must be positive, got {radius}; leave it out for none.")

    def init(x: PyTree, y: PyTree) -> State:
        x, y = jax.tree.map(jnp.asarray, (x, y))
        v = trees.zeros_like(y)
        states = Point(server.x.init(x), server.y.init(y), server.v.init(v))
        return State(x, y, v, states, jnp.zeros((), jnp.int32))

    @jax.jit
    def advance(state: State, d: Point) -> State:
        x, opt_x = _apply(server.x, d.x, state.server.x, state.x)
        y, opt_y = _apply(server.y, d.y, state.server.y, state.y)
        v, opt_v = _apply(server.v, d.v, state.server.v, state.v)
        v, acted = project(v, radius)
        return State(x, y, v, Point(opt_x, opt_y, opt_v), state.projected + acted)

    return init, advance


def _apply(rule: optax.GradientTransformation, d: PyTree, state: Any, z: PyTree) -> tuple:
    """Return z moved by one Optax step along d, and the optimiser's new state."""
    updates, state = rule.update(d, state, z)
    return optax.apply_updates(z, updates), state


def project(v: PyTree, radius: float | None) -> tuple[PyTree, jax.Array]:
    """Return v within the ball of `radius`, and 1 if that moved it, else 0."""
    if radius is None:
        return v, jnp.zeros((), jnp.int32)
    acted = (jnp.sqrt(trees.squared_norm(v)) > radius).astype(jnp.int32)
    return optax.projections.projection_l2_ball(v, radius), acted
