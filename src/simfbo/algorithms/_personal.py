"""A personal lower level: every client has a lower variable of its own, and only x travels.

    min_x  sum_i p_i f_i(x, y_i*(x))    s.t.    y_i*(x) = argmin_y g_i(x, y)

SimFBO and ShroFBO for this problem (`BilevelProblem(..., lower_level="private")`): y_i and v_i stay
in the client's memory. Li, Huang, Huang, NeurIPS 2023, treat it as "local lower level problems".
"""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from simfbo.algorithms._common import (
    BIASED,
    ServerStep,
    as_local,
    drawn_directions,
    is_rule,
    local_steps,
    project,
    require_point,
    require_radius,
    scale,
)
from simfbo.algorithms._work import mean_work
from simfbo.core import trees
from simfbo.core.federation import Client, Federation, WithMemory
from simfbo.core.method import Method, client_step
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.errors import UserError


class PersonalState(NamedTuple):
    """x, the initial y_i, the server's optimiser state, and the estimates of rho so far."""

    x: PyTree
    y: PyTree
    server: PyTree
    norm_sum: jax.Array
    norm_count: jax.Array


def _step_of_x(gamma: Any) -> ServerStep:
    """Return the server's step of x, the only variable that it moves."""
    if is_rule(gamma):
        raise UserError(
            "With a personal lower level the server moves x alone: tuning-free step sizes and "
            "other rules for x, y and v together do not apply."
        )
    return ServerStep.of(require_point("server", gamma).x)


class PersonalSimFBO(Method):
    """SimFBO for a personal lower level.

    Client i, from x and its own y_i and v_i, takes tau_i steps on all three as in `simfbo`. It
    keeps y_i and v_i, projected, and sends q_x. The server's steps of y and v are not used.
    """

    name = "SimFBO"
    is_personal = True
    known_violations: ClassVar = BIASED
    residuals: ClassVar = {"private_step": "x"}

    problem: BilevelProblem = eqx.field(static=True)
    local: Point[float] = eqx.field(converter=as_local)
    server: ServerStep = eqx.field(converter=_step_of_x)
    radius: float | None = eqx.field(converter=require_radius, default=None)
    independent_batches: bool = eqx.field(static=True, default=False)

    def init(self, x: PyTree, y: PyTree) -> PersonalState:
        x, y = trees.on_device((x, y))
        return PersonalState(x, y, self.server.init(x), jnp.zeros(()), jnp.zeros(()))

    def round(self, state: PersonalState, federation: Federation, key: jax.Array) -> PersonalState:
        """Sum the clients' directions of x, and move along them."""
        cohort = federation.cohort(key)
        q = federation.sum(self.private_step, Point(x=state.x), cohort, key)
        return self._moved(state, q, 1.0)

    @client_step
    def private_step(self, payload: Point[PyTree], client: Client) -> WithMemory:
        """Return q_x, and remember y_i and v_i."""
        q, memory = self._stepped(payload.x, client)
        return WithMemory(Point(x=q), memory)

    def _moved(self, state: PersonalState, q: Point[PyTree], norm: Any) -> PersonalState:
        x, server = self.server.move(q.x, state.server, state.x)
        return PersonalState(x, state.y, server, state.norm_sum + norm, state.norm_count + 1)

    def _stepped(self, x: PyTree, client: Client) -> tuple[PyTree, Point[PyTree]]:
        """Take tau_i steps; return the sum of the directions of x, and the new y_i and v_i."""
        own, eta = client.memory, self.local
        draw = drawn_directions(self.problem, self.independent_batches)
        q = local_steps(draw, Point(x, own.y, own.v), client, eta)
        v, _ = project(trees.add_scaled(own.v, -eta.v, q.v), self.radius)
        return q.x, Point(y=trees.add_scaled(own.y, -eta.y, q.y), v=v)

    def client_memory(self, x: PyTree, y: PyTree) -> Point[PyTree]:
        y = trees.on_device(y)
        return Point(y=y, v=trees.host_zeros(y))


class PersonalShroFBO(PersonalSimFBO):
    """ShroFBO for a personal lower level: messages are divided by ||a_i||_1."""

    name = "ShroFBO"
    known_violations: ClassVar = {}

    def round(self, state: PersonalState, federation: Federation, key: jax.Array) -> PersonalState:
        """Sum the clients' mean directions of x, and move along them with rho gamma."""
        cohort = federation.cohort(key)
        h, norm = federation.sum(self.private_step, Point(x=state.x), cohort, key)
        rho = mean_work(federation, cohort, key, norm, state)
        return self._moved(state, scale(rho, h), norm)

    @client_step
    def private_step(self, payload: Point[PyTree], client: Client) -> WithMemory:
        """Return q_x / ||a_i||_1 and ||a_i||_1, and remember y_i and v_i."""
        q, memory = self._stepped(payload.x, client)
        norm = jnp.asarray(client.plan.norm)
        return WithMemory((Point(x=trees.scale(1 / norm, q)), norm), memory)
