"""MimeFBO with the control variates of SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning", ICML 2020. Clients remember their last m_i.
"""

from typing import Any, ClassVar

import jax.numpy as jnp

from simfbo.algorithms._common import STALE, add_scaled, drawn_directions
from simfbo.algorithms._corrected import CorrectedLoop, MimeState, mean_direction
from simfbo.core import trees
from simfbo.core.federation import Client, Federation, WithMemory
from simfbo.core.method import client_step
from simfbo.core.problem import Point, PyTree


class ScaffoldFBO(CorrectedLoop):
    """MimeFBO whose server moves along h + sum_C p~_i (m_i - c_i), with h = sum p_i c_i."""

    known_violations: ClassVar = {"identical clients": STALE}
    needs_unmodified_sums = True

    def directions(
        self, state: MimeState, sent: Point[PyTree], federation: Federation, size: int
    ) -> tuple[Point[PyTree], Point[PyTree]]:
        """Return h + sum_C p~_i (m_i - c_i), and h with the new c_i."""
        asked, latest = size / federation.n, federation.latest
        share = asked if latest is None else asked / latest.factor  # admitted, of all clients
        return add_scaled(sent, 1.0, state.h), add_scaled(state.h, share, sent)

    @client_step
    def mimefbo_step(self, payload: PyTree, client: Client) -> Any:
        """Return m_i - c_i and ||a_i||_1, and remember m_i."""
        (z, h), c = payload, client.memory
        m = mean_direction(drawn_directions(self.problem), z, h, client, self.local, c)
        return WithMemory((trees.subtract(m, c), jnp.asarray(client.plan.norm)), m)

    def client_memory(self, x: PyTree, y: PyTree) -> Point[PyTree]:
        x, y = trees.host_zeros((x, y))
        return Point(x, y, y)
