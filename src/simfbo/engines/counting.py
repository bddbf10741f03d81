"""The engine that computes nothing: it only writes down what would be sent."""

from typing import Any, final

import jax
import numpy as np

from simfbo.core.federation import (
    Algorithm,
    ClientWork,
    Engine,
    Exchange,
    Ledger,
    sums_of_nothing,
)
from simfbo.core.local_work import Coefs
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort


@final
class CountingFederation(Engine):
    """Clients that answer zeros of the right shape, found without computing."""

    def collect(
        self, work: ClientWork, payload: PyTree, cohort: Cohort, coefs: Coefs, key: jax.Array
    ) -> tuple[Any, Exchange]:
        """Return zeros shaped like a client's message."""
        like, size = self.like(work, payload, coefs, key), len(cohort.ids)
        squares = np.zeros((size, len(jax.tree.leaves(like))))
        exchange = Exchange(self.ask(work, cohort, like), np.ones(size, bool), squares, [])
        return sums_of_nothing(*self.weights(cohort, like), like), exchange


def cost(
    algorithm: Algorithm, federation: Engine, x0: PyTree, y0: PyTree, iterations: int = 1
) -> Ledger:
    """Return the ledger of one iteration of `algorithm`, without a client computing anything.

    Args:
        algorithm: whose cost is asked.
        federation: the engine it would run on; its sampler and local work are used, nothing else.
        x0: initial x, for its shape.
        y0: initial y, for its shape.
        iterations: how many to count, for methods whose iterations differ.

    Returns:
        What the iterations send together.
    """
    counting = CountingFederation(federation.data, federation.sampler, federation.local_work)
    state = algorithm.init(x0, y0)
    for key in jax.random.split(jax.random.key(0), iterations):
        algorithm.round(state, counting, key)
    return counting.ledger
