"""MimeFBO with the control variates of SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning", ICML 2020.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from simfbo.algorithms._common import STALE, add_scaled
from simfbo.algorithms._corrected import CorrectedLoop, MimeState, mean_direction
from simfbo.core import Client, Federation, Point, WithMemory, client_step, trees
from simfbo.core.problem import PyTree


class ScaffoldFBO(CorrectedLoop):
    """MimeFBO with stateful clients: c_i is the client's last m_i, and h = sum p_i c_i.

    The server steps along h + sum_C p~_i (m_i - c_i).
    """

    known_violations: ClassVar = {"identical clients": STALE}
    needs_unmodified_sums = True

    def client_memory(self, x: PyTree, y: PyTree) -> Point[PyTree]:
        x, y = trees.host_zeros((x, y))
        return Point(x, y, y)

    def round(self, state: MimeState, federation: Federation, key: jax.Array) -> MimeState:
        cohort = federation.cohort(key)
        u, norm = federation.sum(self.mimefbo_step, (self.point(state), state.h), cohort, key)
        sampled, latest = len(cohort.ids) / federation.n, federation.latest
        share = sampled if latest is None else sampled / latest.factor  # of admitted replies
        m, h = add_scaled(u, 1.0, state.h), add_scaled(state.h, share, u)
        return self.advance(state, m, norm, federation, cohort, key)._replace(h=h)

    @client_step
    def mimefbo_step(self, payload: PyTree, client: Client) -> WithMemory:
        """Send m_i - c_i and ||a_i||_1; store m_i."""
        (z, h), c = payload, client.memory
        m = mean_direction(self.draw, z, h, client, self.local, c)
        return WithMemory((trees.subtract(m, c), jnp.asarray(client.plan.norm)), m)
