"""The engine that computes nothing: it only counts what would be sent."""

from typing import final

import jax
import numpy as np

from simfbo.core.exchange import Exchange
from simfbo.core.federation import Algorithm
from simfbo.core.ledger import Ledger
from simfbo.core.problem import PyTree
from simfbo.engines.base import Call, Engine, zeros_for


@final
class CountingFederation(Engine):
    """Clients that reply with zeros of the right shape; nothing is computed."""

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Return zeros shaped like the sum, or the stack, of the cohort's messages."""
        size, like = len(call.cohort.ids), self.like(call)
        squares = np.zeros((size, len(jax.tree.leaves(like))))
        exchange = Exchange(self.request(call, like), np.ones(size, bool), squares, [])
        return zeros_for(size, self.stacks(call, like), like), exchange


def cost(
    algorithm: Algorithm, federation: Engine, x0: PyTree, y0: PyTree, iterations: int = 1
) -> Ledger:
    """Count what iterations of an algorithm send, without any client computing anything.

    Args:
        algorithm: whose cost to count.
        federation: the engine it would run on; only its sampler and local work are used.
        x0: initial x, for its shape.
        y0: initial y, for its shape.
        iterations: how many to count, for methods whose iterations differ in cost.

    Returns:
        The ledger of all iterations together.
    """
    counting = CountingFederation(federation.data, federation.sampler, federation.local_work)
    state = algorithm.init(x0, y0)
    for key in jax.random.split(jax.random.key(0), iterations):
        algorithm.round(state, counting, key)
    return counting.ledger
