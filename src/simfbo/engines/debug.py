"""The slow engine for debugging: one client at a time, nothing compiled.

`print`, breakpoints and ordinary tracebacks work inside losses and client steps, and a failure
names the client and what it was doing.
"""

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.messages import Codecs, encode_message
from simfbo.core.exchange import Exchange
from simfbo.core.federation import Client, ClientStep
from simfbo.core.gate import Reply, admit, occurrences
from simfbo.core.keys import client_key
from simfbo.core.problem import PyTree
from simfbo.core.trees import as_arrays
from simfbo.engines._coding import Sent, code_key, really_delivered
from simfbo.engines._messages import answer, combined, slice_for
from simfbo.engines.base import Call, Engine
from simfbo.errors import ClientError, UserError
from simfbo.robust.anomalies import probed

Wire = Callable[[list[Any]], list[Any]]


@final
class DebugFederation(Engine):
    """All clients on this machine, interpreted; the same numbers as `SimulatedFederation`.

    Messages pass a wire one by one, as they would between machines. Set `wire` to a function from
    replies to replies to simulate what can happen to them on the way.
    """

    wire: Wire = list

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Return the weighted sum, or the stack, of the replies that pass the gate."""
        ids, key = call.cohort.ids, call.key
        absent, repeats = self.absent(key, ids), occurrences(ids)
        messages, after = {}, {}
        for j in np.flatnonzero(~absent).tolist():
            i = int(ids[j])
            own = client_key(key, i, int(repeats[j]))
            kept = jax.tree.map(lambda a, i=i: a[i], self.client_memory)
            client = Client(self.data.client(i), call.plan[j], own, kept)
            payload = slice_for(call.payload, j)
            messages[j], after[j] = _answer(call.client_step, payload, client)
        # From a real message: a loss may hold what only runs, and cannot be traced.
        like = next(iter(messages.values()), ())
        request = self.request(call, like)
        replies: list[Any] = [
            Reply(int(ids[j]), request.number, self._letter(call, j, message), int(repeats[j]))
            for j, message in messages.items()
        ]
        arrived = self.wire(replies)
        rules, decode = self.rules(request.client_step), self.decoder(call, like)
        found, squares, refusals = admit(arrived, request, rules, decode)
        admitted = np.array([message is not None for message in found])
        total = combined(found, call.cohort.weights, self.stacks(call, like), like)
        octets = None
        if call.codecs is not None:  # whatever arrived, decoded or not
            octets = np.array([len(one.arrays) for one in arrived if _is_coded(one)], float)
        seen = probed(found, request) if self.detect_anomalies else None
        memory = self._rows(after, len(ids))
        return total, Exchange(request, admitted, squares, refusals, seen, octets, memory)

    def _rows(self, after: dict[int, PyTree], size: int) -> PyTree:
        """Return what clients remember, by position in a cohort; zeros without a reply."""
        if self.client_memory is None:
            return None
        nothing = jax.tree.map(lambda a: jnp.zeros_like(a[0]), self.client_memory)
        rows = [after.get(j, nothing) for j in range(size)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    def _letter(self, call: Call, position: int, message: PyTree) -> Any:
        """Return a message as it travels: as arrays, or coded."""
        if call.codecs is None:
            return as_arrays(message)
        return encode_message(call.codecs, message, code_key(call.key, call.cohort.ids, position))

    def deliver(self, codecs: Codecs, payload: PyTree, key: jax.Array) -> tuple[PyTree, Sent]:
        """Encode a payload and decode it again."""
        return really_delivered(codecs, payload, self.start, key)


def _is_coded(reply: Any) -> bool:
    return isinstance(reply, Reply) and isinstance(reply.arrays, bytes)


def _answer(client_step: ClientStep, payload: PyTree, client: Client) -> tuple[PyTree, PyTree]:
    """Run a client step, and name the client where it fails."""
    try:
        with jax.disable_jit():
            return answer(client_step, payload, client)
    except Exception as failure:
        error = failure.__cause__ if isinstance(failure, UserError) else failure
        if error is None:
            raise
        where = f"Client {client.data.client} failed in '{client_step.__name__}'"
        raise ClientError(f"{where}: {type(error).__name__}: {error}") from error
