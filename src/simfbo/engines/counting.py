"""The engine that computes nothing: it only counts what would be sent."""

from typing import final

import jax
import numpy as np

from simfbo.codecs.messages import Codecs, code_message, code_payload
from simfbo.core.exchange import Exchange
from simfbo.core.ledger import Ledger, is_per_client
from simfbo.core.method import Method
from simfbo.core.problem import PyTree
from simfbo.engines._coding import Sent
from simfbo.engines._messages import zeros_for
from simfbo.engines.base import Call, Engine


@final
class CountingFederation(Engine):
    """Clients that reply with zeros of the right shape; nothing is computed."""

    holds_memory = False

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Return zeros shaped like the sum, or the stack, of the cohort's messages."""
        size, like = len(call.cohort.ids), self.like(call)
        squares = np.zeros((size, len(jax.tree.leaves(like))))
        exchange = Exchange(self.request(call, like), np.ones(size, bool), squares, [])
        if call.codecs is not None:
            typical = code_message(call.codecs, _normal(like, call.key), call.key)
            exchange = exchange._replace(octets=np.full(size, float(typical.weigh())))
        return zeros_for(size, self.stacks(call, like), like), exchange

    def deliver(self, codecs: Codecs, payload: PyTree, key: jax.Array) -> tuple[PyTree, Sent]:
        """Return a payload as it is, and the bytes of a normally distributed one."""
        nowhere = [None] * len(jax.tree.leaves(payload, is_leaf=is_per_client))
        coded = code_payload(codecs, _normal(payload, key), nowhere, key)
        return payload, Sent(None, float(coded.weigh()))


def _normal(tree: PyTree, key: jax.Array) -> PyTree:
    """Return a tree of normally distributed numbers."""
    return jax.tree.map(lambda a: jax.random.normal(key, a.shape, a.dtype), tree)


def cost(
    algorithm: Method, federation: Engine, x0: PyTree, y0: PyTree, iterations: int = 1
) -> Ledger:
    """Count what iterations of an algorithm send, without any client computing anything.

    Args:
        algorithm: whose cost to count.
        federation: the engine it would run on; its sampler, local work and codecs are used. The
            lengths of entropy codes are those of normally distributed messages.
        x0: initial x, for its shape.
        y0: initial y, for its shape.
        iterations: how many to count, for methods whose iterations differ in cost.

    Returns:
        The ledger of all iterations together.
    """
    counting = CountingFederation(
        federation.data, federation.sampler, federation.local_work, codecs=federation.codecs
    )
    state = algorithm.init(x0, y0)
    counting.remember(algorithm, x0, y0)
    for key in jax.random.split(jax.random.key(0), iterations):
        algorithm.round(state, counting, key)
    return counting.ledger
