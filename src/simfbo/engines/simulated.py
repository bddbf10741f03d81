"""The fast engine: a whole cohort in one compiled call.

Clients run one after the other inside the call and are added up as they finish, so memory does not
grow with the cohort, matrix products keep their full size, and a client that takes few local steps
costs few local steps. Measured against `vmap` in docs/explanation-performance.md.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from simfbo import trees
from simfbo.data import FederatedData
from simfbo.federation import Client, ClientWork, Engine, client_key, occurrences
from simfbo.local_work import Coefs, LocalWork
from simfbo.problem import PyTree
from simfbo.sampling import Cohort, Sampler


@final
class SimulatedFederation(Engine):
    """All clients on this machine, compiled.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> from simfbo.sampling import without_replacement
        >>> federation = SimulatedFederation(quadratic().data, without_replacement(2))
    """

    def __init__(
        self,
        data: FederatedData,
        sampler: Sampler | None = None,
        local_work: LocalWork | None = None,
    ) -> None:
        """Hold the data; by default everyone takes part, with one local step."""
        super().__init__(data, sampler, local_work)
        self._compiled: dict[ClientWork, Callable[..., Any]] = {}

    def weighted_sum(
        self, work: ClientWork, payload: PyTree, cohort: Cohort, coefs: Coefs, key: jax.Array
    ) -> Any:
        """Return the weighted sum of the cohort's messages."""
        if work not in self._compiled:
            self._compiled[work] = jax.jit(partial(_weighted_sum, work))
        ids = np.asarray(cohort.ids, np.int32)
        return self._compiled[work](
            payload, self.data, ids, occurrences(ids), cohort.weights, coefs, key
        )


def _weighted_sum(
    work: ClientWork,
    payload: PyTree,
    data: FederatedData,
    ids: jax.Array,
    repeats: jax.Array,
    weights: jax.Array,
    coefs: Coefs,
    key: jax.Array,
) -> Any:
    """Return the weighted sum, one client at a time in the order of `ids`."""

    def message(j: Any) -> Any:
        client = Client(data.client(ids[j]), coefs[j], client_key(key, ids[j], repeats[j]))
        return jax.tree.map(jnp.asarray, work(payload, client))

    def add(j: Any, total: Any) -> Any:
        return trees.add_scaled(total, weights[j], message(j))

    zero = trees.zeros_like(jax.eval_shape(message, 0))
    return jax.lax.fori_loop(0, ids.shape[0], add, zero)
