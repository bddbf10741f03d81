"""The slow engine for finding mistakes: one client at a time, nothing compiled.

`print`, breakpoints and ordinary tracebacks work inside losses and client works, and a failure
names the client and what it was doing.
"""

from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np

from simfbo.core.federation import (
    Client,
    ClientWork,
    Engine,
    Exchange,
    as_message,
    client_key,
    part_for,
    sums_of,
)
from simfbo.core.gate import Reply, admit, as_arrays, occurrences
from simfbo.core.local_work import Coefs
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort
from simfbo.errors import ClientError, UserError

Wire = Callable[[list[Any]], list[Any]]


@final
class DebugFederation(Engine):
    """All clients on this machine, interpreted; the same numbers as `SimulatedFederation`.

    Messages go through a wire, one by one, as they would between machines. Set `wire` to a function
    from replies to replies to rehearse what can happen to them on the way.
    """

    wire: Wire = list

    def collect(
        self, work: ClientWork, payload: PyTree, cohort: Cohort, coefs: Coefs, key: jax.Array
    ) -> tuple[Any, Exchange]:
        """Return the weighted sums of the replies that pass the gate, in the order of the ids."""
        absent, repeats = self.absent(key, cohort.ids), occurrences(cohort.ids)
        messages = {}
        for j in np.flatnonzero(~absent).tolist():
            i = int(cohort.ids[j])
            client = Client(self.data.client(i), coefs[j], client_key(key, i, int(repeats[j])))
            messages[j] = _message(work, part_for(payload, j), client)
        like = next(iter(messages.values()), ())
        asked = self.ask(work, cohort, like)
        replies: list[Any] = [
            Reply(int(cohort.ids[j]), asked.number, as_arrays(message), int(repeats[j]))
            for j, message in messages.items()
        ]
        found, squares, refusals = admit(self.wire(replies), asked, self.gate)
        admitted = np.array([message is not None for message in found])
        sums = sums_of(found, *self.weights(cohort, like), like)
        return sums, Exchange(asked, admitted, squares, refusals)


def _message(work: ClientWork, payload: PyTree, client: Client) -> Any:
    """Return a client's message, or raise with its name."""
    try:
        with jax.disable_jit():
            return as_message(work, work(payload, client))
    except UserError:
        raise
    except Exception as error:
        where = f"Client {client.data.client} failed in '{work.__name__}'"
        raise ClientError(f"{where}: {type(error).__name__}: {error}") from error
