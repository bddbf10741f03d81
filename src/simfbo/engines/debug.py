"""The slow engine for finding mistakes: one client at a time, nothing compiled.

`print`, breakpoints and ordinary tracebacks work inside losses and client works, and a failure
names the client and what it was doing.
"""

from typing import Any, final

import jax
import jax.numpy as jnp

from simfbo import trees
from simfbo.errors import ClientError, UserError
from simfbo.federation import (
    Client,
    ClientWork,
    Engine,
    as_message,
    client_key,
    occurrences,
    part_for,
    sums_of_nothing,
)
from simfbo.local_work import Coefs
from simfbo.problem import PyTree
from simfbo.sampling import Cohort


@final
class DebugFederation(Engine):
    """All clients on this machine, interpreted; the same numbers as `SimulatedFederation`."""

    def weighted_sum(
        self, work: ClientWork, payload: PyTree, cohort: Cohort, coefs: Coefs, key: jax.Array
    ) -> Any:
        """Return the weighted sum of the cohort's messages, added in the order of the ids."""
        total = None
        for j, (i, repeat) in enumerate(
            zip(cohort.ids.tolist(), occurrences(cohort.ids).tolist(), strict=True)
        ):
            client = Client(self.data.client(i), coefs[j], client_key(key, i, repeat))
            message = _reply(work, part_for(payload, j), client)
            if total is None:
                total = sums_of_nothing(cohort.weights, message)
            total = trees.add_weighed(total, cohort.weights[j], message)
        return total


def _reply(work: ClientWork, payload: PyTree, client: Client) -> Any:
    """Return a client's message, or raise with its name."""
    where = f"Client {client.data.client} failed in '{work.__name__}'"
    try:
        with jax.disable_jit():
            message = as_message(work, work(payload, client))
    except UserError:
        raise
    except Exception as error:
        raise ClientError(f"{where}: {type(error).__name__}: {error}") from error
    for path, leaf in jax.tree.leaves_with_path(message):
        if not bool(jnp.isfinite(leaf).all()):
            raise ClientError(
                f"{where}: its message{jax.tree_util.keystr(path)} is not finite; "
                "smaller step sizes often help."
            )
    return message
