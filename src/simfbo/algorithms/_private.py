"""A personal lower level: every client has a lower variable of its own, and only x travels.

    min_x  sum_i p_i f_i(x, y_i*(x))    s.t.    y_i*(x) = argmin_y g_i(x, y)

SimFBO and ShroFBO for this problem (`BilevelProblem(..., lower_level="private")`): y_i and v_i stay
in the client's memory. Li, Huang, Huang, NeurIPS 2023, treat it as "local lower level problems".
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from simfbo.algorithms._common import (
    Draw,
    Server,
    drawn_directions,
    local_steps,
    project,
    scale,
    server_step,
)
from simfbo.algorithms._settings import once_per_problem
from simfbo.algorithms._work import mean_work
from simfbo.core import trees
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation, WithMemory
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.errors import UserError


class PrivateState(NamedTuple):
    """x, what clients start y_i from, the server's optimiser, and the estimates of rho so far."""

    x: PyTree
    y: PyTree
    server: PyTree
    norm_sum: jax.Array
    norm_count: jax.Array


def private_lower(
    problem: BilevelProblem,
    local: Point[float],
    server: Server,
    radius: float | None,
    independent_batches: bool,
    normalised: bool,
) -> Algorithm:
    """Return SimFBO, or ShroFBO if messages are normalised, for a personal lower level.

    Client i, from x and its own y_i and v_i, takes tau_i steps on all three as in `simfbo`. It
    keeps y_i and v_i, projected, and sends q_x. The server's steps of y and v are not used.
    """
    if isinstance(server, optax.GradientTransformation):
        raise UserError(
            "With a personal lower level the server moves x alone: tuning-free step sizes and "
            "other rules for x, y and v together do not apply."
        )
    private_step = _client_step(problem, radius, independent_batches, normalised)
    init_x, move = server_step(server.x)

    def init(x: PyTree, y: PyTree) -> PrivateState:
        x, y = trees.on_device((x, y))
        return PrivateState(x, y, init_x(x), jnp.zeros(()), jnp.zeros(()))

    def round(state: PrivateState, federation: Federation, key: jax.Array) -> PrivateState:
        cohort = federation.cohort(key)
        q, norm = federation.sum(private_step, Point(x=state.x), cohort, key, local), 1.0
        if normalised:
            q, norm = q
            q = scale(mean_work(federation, cohort, key, norm, state), q)
        x, kept = move(q.x, state.server, state.x)
        return PrivateState(x, state.y, kept, state.norm_sum + norm, state.norm_count + 1)

    return Algorithm(
        "ShroFBO" if normalised else "SimFBO", init, round, (private_step,),
        residuals={"private_step": "x"}, memory=first_memory,
        own_y=_own_y,
    )  # fmt: skip


def first_memory(x0: PyTree, y0: PyTree) -> Point[PyTree]:
    """Return y_i and v_i before a client first takes part."""
    y = trees.on_device(y0)
    return Point(y=y, v=trees.host_zeros(y))


def _own_y(memory: Point[PyTree]) -> PyTree:
    return memory.y


@once_per_problem
def _client_step(
    problem: BilevelProblem, radius: float | None, independent_batches: bool, normalised: bool
) -> ClientStep:
    draw = drawn_directions(problem, independent_batches)

    def private_step(payload: Point[PyTree], client: Client) -> WithMemory:
        q, memory = _stepped(draw, payload.x, client, radius)
        if not normalised:
            return WithMemory(Point(x=q), memory)
        norm = jnp.asarray(client.plan.norm)
        return WithMemory((Point(x=trees.scale(1 / norm, q)), norm), memory)

    return private_step


def _stepped(
    draw: Draw, x: PyTree, client: Client, radius: float | None
) -> tuple[PyTree, Point[PyTree]]:
    """Take tau_i steps; return the sum of the directions of x, and the new y_i and v_i."""
    own, eta = client.memory, client.eta
    q = local_steps(draw, Point(x, own.y, own.v), client)
    v, _ = project(trees.add_scaled(own.v, -eta.v, q.v), radius)
    return q.x, Point(y=trees.add_scaled(own.y, -eta.y, q.y), v=v)
