"""The slow engine for debugging, one client at a time and nothing compiled, and one that counts.

`print`, breakpoints and ordinary tracebacks work inside losses and client steps, and a failure
names the client and its step.
"""

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.messages import (
    REQUEST_BYTES,
    code_message,
    code_payload,
    deliver,
    encode_message,
)
from simfbo.core.exchange import Exchange
from simfbo.core.federation import Client, ClientStep
from simfbo.core.gate import Reply, admit, occurrences
from simfbo.core.keys import client_key
from simfbo.core.ledger import Ledger, is_per_client
from simfbo.core.method import Method
from simfbo.core.problem import PyTree
from simfbo.core.trees import as_arrays
from simfbo.engines.base import Call, Engine, code_key, estimated
from simfbo.engines.exchange import run_client_step, slice_for, zeros_for
from simfbo.errors import ClientError, UserError
from simfbo.robust.anomalies import probed

Wire = Callable[[list[Any]], list[Any]]


@final
class DebugFederation(Engine):
    """All clients on this machine, interpreted; the same numbers as `SimulatedFederation`.

    Messages pass a wire one by one, as they would between machines. Set `wire` to a function from
    replies to replies to simulate failures of the transport.
    """

    wire: Wire = list

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Run one exchange: combine the replies that pass the gate."""
        ids, key, codecs = call.cohort.ids, call.key, self.codecs_for(call.step)
        plan, repeats = self.plan(key, ids), occurrences(ids)
        payload, down = call.payload, 0.0
        if codecs is not None:
            payload, _, down = deliver(codecs, payload, self.start, key)
        messages, after = {}, {}
        for j in np.flatnonzero(~self.absent(key, ids)).tolist():
            i = int(ids[j])
            own = client_key(key, i, int(repeats[j]))
            kept = jax.tree.map(lambda a, i=i: a[i], self.client_memory)
            client = Client(self.data.client(i), plan[j], own, kept)
            messages[j], after[j] = _answer(call.step, slice_for(payload, j), client)
        # From a real message: a loss may hold code that cannot be traced.
        like = next(iter(messages.values()), ())
        request = self.request(call, like)

        def letter(j: int) -> Any:
            if codecs is None:
                return as_arrays(messages[j])
            return encode_message(codecs, messages[j], code_key(key, ids, j))

        replies: list[Any] = [
            Reply(int(ids[j]), request.number, letter(j), int(repeats[j])) for j in messages
        ]
        arrived = self.wire(replies)
        rules, decode = self.rules(call.name), self.decoder(call, like)
        found, squares, refusals = admit(arrived, request, rules, decode)
        admitted = np.array([message is not None for message in found])
        coded = None
        if codecs is not None:  # whatever arrived, decoded or not
            encoded_bytes = [len(one.arrays) for one in arrived if _is_coded(one)]
            replied = len(ids) - sum(refusal.reason.silent for refusal in refusals)
            down = len(ids) * (down + REQUEST_BYTES)
            coded = estimated(np.array(encoded_bytes, float), replied, down, False)
        exchange = Exchange(
            request,
            admitted,
            squares,
            refusals,
            probed(found, request) if self.detect_anomalies else None,
            self._rows(after, len(ids)),
            coded,
            np.asarray(call.cohort.weights),
            plan.norm,
        )
        return self.aggregated(call, found, exchange), exchange

    def _rows(self, after: dict[int, PyTree], size: int) -> PyTree:
        """Stack the memory of a cohort by position; zeros without a reply."""
        if self.client_memory is None:
            return None
        nothing = jax.tree.map(lambda a: jnp.zeros_like(a[0]), self.client_memory)
        rows = [after.get(j, nothing) for j in range(size)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def _is_coded(reply: Any) -> bool:
    return isinstance(reply, Reply) and isinstance(reply.arrays, bytes)


def _answer(client_step: ClientStep, payload: PyTree, client: Client) -> tuple[PyTree, PyTree]:
    """Run a client step, and name the client where it fails."""
    try:
        with jax.disable_jit():
            return run_client_step(client_step, payload, client)
    except Exception as failure:
        error = failure.__cause__ if isinstance(failure, UserError) else failure
        if error is None:
            raise
        where = f"Client {client.data.client} failed in '{client_step.__name__}'"
        raise ClientError(f"{where}: {type(error).__name__}: {error}") from error


@final
class CountingFederation(Engine):
    """Clients that reply with zeros of the right shape: only the traffic is counted."""

    holds_memory = False

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Count one exchange; its messages are zeros of the right shape."""
        size, like, codecs = len(call.cohort.ids), self.message_of(call), self.codecs_for(call.step)
        coded = None
        if codecs is not None:  # the bytes of normally distributed messages
            payload, key = jax.tree.map(jnp.asarray, call.payload), call.key
            nowhere = [None] * len(jax.tree.leaves(payload, is_leaf=is_per_client))
            sent = code_payload(codecs, _normal(payload, key), nowhere, key)
            down = size * (float(sent.count_bytes()) + REQUEST_BYTES)
            up = float(code_message(codecs, _normal(like, key), key).count_bytes())
            coded = estimated(np.full(size, up), size, down, not codecs.exact_size)
        squares = np.zeros((size, len(jax.tree.leaves(like))))
        exchange = Exchange(self.request(call, like), np.ones(size, bool), squares, [], coded=coded)
        return zeros_for(size, call.stack, like), exchange


def _normal(tree: PyTree, key: jax.Array) -> PyTree:
    """Draw normally distributed numbers of a tree's shapes."""
    return jax.tree.map(lambda a: jax.random.normal(key, a.shape, a.dtype), tree)


def cost(
    algorithm: Method, federation: Engine, x0: PyTree, y0: PyTree, iterations: int = 1
) -> Ledger:
    """Count the traffic of iterations of an algorithm, without any client computing anything.

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
    counting.remember(algorithm, x0, y0)
    key = jax.random.key(0)
    state = algorithm.prepare(algorithm.init(x0, y0), counting, key)
    counting.ledger = Ledger()  # what is measured before the run is no part of an iteration
    for own in jax.random.split(key, iterations):
        algorithm.round(state, counting, own)
    return counting.ledger
