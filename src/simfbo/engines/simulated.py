"""The fast engine: a cohort in two compiled calls that run side by side.

Within a call clients run one after the other and are added up as they finish, so memory does not
grow with the cohort, matrix products keep their full size, and a client that takes few local steps
costs few local steps. Two calls side by side keep two cores busy where one call would have to split
every small product between them. Measured in docs/explanation-performance.md.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from simfbo import trees
from simfbo.data import ClientData
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

_SECOND_LANE = ThreadPoolExecutor(1, thread_name_prefix="simfbo")


@final
class SimulatedFederation(Engine):
    """All clients on this machine, compiled.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> from simfbo.sampling import without_replacement
        >>> federation = SimulatedFederation(quadratic().data, without_replacement(2))
    """

    @cached_property
    def _programs(self) -> dict[Any, Callable[..., Any]]:
        """Return the programs compiled so far."""
        return {}

    def weighted_sum(
        self, work: ClientWork, payload: PyTree, cohort: Cohort, coefs: Coefs, key: jax.Array
    ) -> Any:
        """Return the weighted sum of the cohort's messages."""
        order, middle, end = deal(coefs.tau)
        data, repeats = self.data.client(cohort.ids), occurrences(cohort.ids)
        inputs = (payload, data, repeats, cohort.weights, coefs, order, key)
        wide = jnp.result_type(float) == jnp.float64
        program = self._program(work, inputs, wide)
        if middle == end:
            return program(*inputs, np.int32(0), end)
        second = _SECOND_LANE.submit(_call, wide, program, (*inputs, middle, end))
        return _ADD(program(*inputs, np.int32(0), middle), second.result())

    def _program(self, work: ClientWork, inputs: tuple, wide: bool) -> Callable[..., Any]:
        """Return the compiled sum for inputs of these shapes and this precision.

        Compiled ahead of the call: the second thread does not share JAX's thread-local settings
        and must have nothing left to trace.
        """
        payload, _, _, weights, coefs, _, key = inputs
        leaves, structure = jax.tree.flatten((payload, weights, coefs, key))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        signature = work, wide, structure, shapes
        if signature not in self._programs:
            zero = np.int32(0)
            lowered = jax.jit(partial(_weighted_sum, work)).lower(*inputs, zero, zero)
            self._programs[signature] = lowered.compile()
        return self._programs[signature]


def _call(wide: bool, program: Callable[..., Any], inputs: tuple) -> Any:
    """Return program(*inputs), with NumPy inputs of 64 bits taken as in the calling thread."""
    with jax.enable_x64(wide):
        return program(*inputs)


def deal(tau: np.ndarray) -> tuple[np.ndarray, np.int32, np.int32]:
    """Return an order of the cohort and where to cut it, so that both parts work equally long.

    It depends on nothing but tau, so neither does the order in which messages are added.

    Example:
        >>> deal(np.array([1, 9, 5, 4]))
        (array([1, 0, 2, 3], dtype=int32), np.int32(2), np.int32(4))
    """
    descending = np.argsort(-tau, kind="stable").astype(np.int32)
    place = np.arange(len(tau)) % 4
    first = (place == 0) | (place == 3)
    order = np.concatenate([descending[first], descending[~first]])
    return order, np.int32(first.sum()), np.int32(len(tau))


def _weighted_sum(
    work: ClientWork,
    payload: PyTree,
    data: ClientData,
    repeats: jax.Array,
    weights: jax.Array,
    coefs: Coefs,
    order: jax.Array,
    key: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> Any:
    """Return the weighted sum over the clients order[start:stop], one after the other."""
    ids = data.client
    keys = jax.vmap(client_key, (None, 0, 0))(key, ids, repeats)

    def message(j: Any) -> Any:
        client = Client(data._replace(client=ids[j]), coefs[j], keys[j])
        return as_message(work, work(part_for(payload, j), client))

    def add(k: Any, total: Any) -> Any:
        return trees.add_weighed(total, weights[order[k]], message(order[k]))

    zero = sums_of_nothing(weights, jax.eval_shape(message, 0))
    return jax.lax.fori_loop(start, stop, add, zero)


_ADD = jax.jit(trees.add, donate_argnums=0)
