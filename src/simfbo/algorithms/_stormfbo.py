"""MimeFBO with a STORM estimate (Cutkosky, Orabona, "Momentum-Based Variance Reduction in
Non-Convex SGD", NeurIPS 2019) for h and m, which also uses directions at the previous iterate.
"""

from typing import Any

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import State, add_scaled, drawn_directions
from simfbo.algorithms._corrected import CorrectedLoop, MimeState, mean_direction
from simfbo.core import trees
from simfbo.core.federation import Client, Federation
from simfbo.core.method import client_step
from simfbo.core.problem import Point, PyTree


class StormFBO(CorrectedLoop):
    """MimeFBO whose h and m are m = (1 - theta) h + sum_C p~_i [m_i - (1 - theta) D_i(z')]."""

    def payload(self, state: MimeState) -> tuple[PyTree, ...]:
        """Return what the server sends: also the previous iterate, and its weight."""
        return self.point(state), state.h, state.previous, self._weight(state)

    def directions(
        self, state: MimeState, sent: Point[PyTree], federation: Federation, size: int
    ) -> tuple[Point[PyTree], Point[PyTree]]:
        """Return the estimate twice."""
        m = add_scaled(sent, self._weight(state), state.h)
        return m, m

    def _weight(self, state: MimeState) -> jax.Array:
        """Return 1 - theta; at first there is no previous iterate."""
        return jnp.where(state.norm_count > 0, 1 - self.theta, 0.0)

    def remembered(self, base: State) -> Any:
        """Return the iterate."""
        return Point(*base[:3])

    @client_step
    def mimefbo_step(self, payload: PyTree, client: Client) -> Any:
        """Return m_i - (1 - theta) D_i(z') on the batch of the first step, and ||a_i||_1."""
        (z, h, previous, old), draw = payload, drawn_directions(self.problem)
        before = draw(previous, client, jax.random.fold_in(client.key, 0))
        m = mean_direction(draw, z, h, client, self.local)
        return trees.add_scaled(m, -old, before), jnp.asarray(client.plan.norm)
