"""SimFBO and ShroFBO for a personal lower level, as in "local lower level problems" of Li, Huang,
Huang, NeurIPS 2023: every client has a personal lower variable, and only x is sent.

    min_x  sum_i p_i f_i(x, y_i*(x))    s.t.    y_i*(x) = argmin_y g_i(x, y)
"""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from simfbo.algorithms._common import (
    BilevelMethod,
    ServerStep,
    drawn_directions,
    is_rule,
    local_steps,
    mean_work,
    moved,
    require_point,
    require_radius,
    scale,
    weighs_work,
)
from simfbo.core import Client, Federation, Point, WithMemory, client_step, trees
from simfbo.core.problem import PyTree
from simfbo.errors import UserError

BIASED = {
    **weighs_work("SimFBO"),
    "exact at any local step": "The client drift of SimFBO grows with eta.",
}


class PersonalState(NamedTuple):
    """x, the initial y_i, the server's optimiser state, and the estimates of rho so far."""

    x: PyTree
    y: PyTree
    server: PyTree
    norm_sum: jax.Array
    norm_count: jax.Array


def _step_of_x(gamma: Any) -> ServerStep:
    """Return the server's step of x; those of y and v are not used."""
    if is_rule(gamma):
        raise UserError(
            "With a personal lower level the server moves x alone: tuning-free step sizes and "
            "other rules for x, y and v together do not apply."
        )
    return ServerStep.of(require_point("server", gamma).x)


class PersonalSimFBO(BilevelMethod):
    """SimFBO for a personal lower level.

    Client i takes tau_i steps on x, y_i and v_i as in `simfbo`. It stores y_i and the projected
    v_i, and sends q_x. The server's steps of y and v are not used.
    """

    name = "SimFBO"
    is_personal = True
    known_violations: ClassVar = BIASED
    residuals: ClassVar = {"private_step": "x"}

    local: Point[float] = eqx.field(converter=partial(require_point, "local"))
    server: ServerStep = eqx.field(converter=_step_of_x)
    radius: float | None = eqx.field(converter=require_radius, default=None)
    independent_batches: bool = eqx.field(static=True, default=False)

    def init(self, x: PyTree, y: PyTree) -> PersonalState:
        x, y = trees.on_device((x, y))
        return PersonalState(x, y, self.server.init(x), jnp.zeros(()), jnp.zeros(()))

    def client_memory(self, x: PyTree, y: PyTree) -> Point[PyTree]:
        y = trees.on_device(y)
        return Point(y=y, v=trees.host_zeros(y))

    def round(self, state: PersonalState, federation: Federation, key: jax.Array) -> PersonalState:
        cohort = federation.cohort(key)
        q = federation.sum(self.private_step, Point(x=state.x), cohort, key)
        return self._advance(state, q, 1.0)

    @client_step
    def private_step(self, payload: Point[PyTree], client: Client) -> WithMemory:
        """Send q_x; store y_i and v_i."""
        q, memory = self._local_steps(payload.x, client)
        return WithMemory(Point(x=q), memory)

    def _local_steps(self, x: PyTree, client: Client) -> tuple[PyTree, Point[PyTree]]:
        """Take tau_i steps; return q_x, and the new y_i and v_i."""
        memory, draw = client.memory, drawn_directions(self.problem, self.independent_batches)
        q = local_steps(draw, memory._replace(x=x), client, self.local)
        return q.x, moved(memory, self.local, q._replace(x=None), self.radius)

    def _advance(self, state: PersonalState, q: Point[PyTree], norm: Any) -> PersonalState:
        x, server = self.server.move(q.x, state.server, state.x)
        return PersonalState(x, state.y, server, state.norm_sum + norm, state.norm_count + 1)


class PersonalShroFBO(PersonalSimFBO):
    """ShroFBO for a personal lower level: messages are divided by ||a_i||_1."""

    name = "ShroFBO"
    known_violations: ClassVar = {}

    def round(self, state: PersonalState, federation: Federation, key: jax.Array) -> PersonalState:
        cohort = federation.cohort(key)
        h, norm = federation.sum(self.private_step, Point(x=state.x), cohort, key)
        rho = mean_work(federation, cohort, key, norm, state)
        return self._advance(state, scale(rho, h), norm)

    @client_step
    def private_step(self, payload: Point[PyTree], client: Client) -> WithMemory:
        """Send q_x / ||a_i||_1 and ||a_i||_1; store y_i and v_i."""
        (q, memory), norm = self._local_steps(payload.x, client), jnp.asarray(client.plan.norm)
        return WithMemory((Point(x=trees.scale(1 / norm, q)), norm), memory)
