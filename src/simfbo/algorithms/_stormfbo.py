"""MimeFBO with a STORM estimate (Cutkosky, Orabona, "Momentum-Based Variance Reduction in
Non-Convex SGD", NeurIPS 2019) for h and m, which also uses directions at the previous iterate.
"""

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import add_scaled
from simfbo.algorithms._corrected import CorrectedLoop, MimeState, mean_direction
from simfbo.core import Client, Federation, Point, client_step, trees
from simfbo.core.problem import PyTree


class StormFBO(CorrectedLoop):
    """MimeFBO whose h and m are m = (1 - theta) h + sum_C p~_i [m_i - (1 - theta) D_i(z')]."""

    def init(self, x: PyTree, y: PyTree) -> MimeState:
        state = super().init(x, y)
        return state._replace(previous=self.point(state))

    def round(self, state: MimeState, federation: Federation, key: jax.Array) -> MimeState:
        cohort, z = federation.cohort(key), self.point(state)
        weight = jnp.where(state.norm_count > 0, 1 - self.theta, 0.0)  # no z' in the first round
        payload = z, state.h, state.previous, weight
        sent, norm = federation.sum(self.mimefbo_step, payload, cohort, key)
        m = add_scaled(sent, weight, state.h)
        return self.advance(state, m, norm, federation, cohort, key)._replace(h=m, previous=z)

    @client_step
    def mimefbo_step(self, payload: PyTree, client: Client) -> tuple[Point[PyTree], jax.Array]:
        """Send m_i - (1 - theta) D_i(z') on the batch of the first step, and ||a_i||_1."""
        (z, h, previous, weight), draw = payload, self.draw
        before = draw(previous, client, jax.random.fold_in(client.key, 0))
        m = mean_direction(draw, z, h, client, self.local)
        return trees.add_scaled(m, -weight, before), jnp.asarray(client.plan.norm)
