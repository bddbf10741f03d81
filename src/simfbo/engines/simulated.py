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

from simfbo.core import trees
from simfbo.core.data import ClientData
from simfbo.core.federation import (
    Client,
    ClientWork,
    Engine,
    Exchange,
    as_message,
    client_key,
    part_for,
    signature,
    sums_of_nothing,
)
from simfbo.core.gate import (
    AT_THE_LIMIT,
    NO_REPLY,
    Asked,
    Gate,
    Refusal,
    names,
    occurrences,
    squared_norms,
    too_large,
    within,
)
from simfbo.core.local_work import Coefs
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort

_SECOND_LANE = ThreadPoolExecutor(1, thread_name_prefix="simfbo")


@final
class SimulatedFederation(Engine):
    """All clients on this machine, compiled.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> from simfbo.core.sampling import without_replacement
        >>> federation = SimulatedFederation(quadratic().data, without_replacement(2))
    """

    @cached_property
    def _programs(self) -> dict[Any, Callable[..., Any]]:
        """Return the programs compiled so far."""
        return {}

    def collect(
        self, work: ClientWork, payload: PyTree, cohort: Cohort, coefs: Coefs, key: jax.Array
    ) -> tuple[Any, Exchange]:
        """Return the weighted sums of the messages that pass the gate."""
        absent = self.absent(key, cohort.ids)
        like = self.like(work, payload, coefs, key)
        weights = self.weights(cohort, like)
        found = self.compute(work, payload, cohort.ids, weights, absent, coefs, key)
        sums, squares, passed = found
        squares, admitted = np.asarray(squares, float), np.asarray(passed) > 0
        asked = self.ask(work, cohort, like)
        refusals = _refusals(asked, admitted, absent, squares, self.gate)
        return sums, Exchange(asked, admitted, squares, refusals)

    def compute(
        self,
        work: ClientWork,
        payload: PyTree,
        clients: np.ndarray,
        weights: tuple[np.ndarray, bool],
        absent: np.ndarray,
        coefs: Coefs,
        key: jax.Array,
    ) -> tuple[Any, jax.Array, jax.Array]:
        """Return the sums, the squared norms of all messages and which passed, from two lanes.

        Args:
            work: what each client does.
            payload: what each client receives.
            clients: by their places in the data, ascending.
            weights: of their messages, and whether these stay apart or are added.
            absent: who computes nothing, and leaves zeros in its place.
            coefs: local work.
            key: of the exchange.
        """
        order, middle, end = deal(coefs.tau, absent)
        data, ids, repeats = self.data.client(clients), self.data.ids[clients], occurrences(clients)
        factors, apart = weights
        inputs = (payload, data, ids, repeats, factors, coefs, order, key)
        wide = jnp.result_type(float) == jnp.float64
        program = self._program(work, apart, inputs)
        if middle == end:
            return program(*inputs, np.int32(0), end)
        second = _SECOND_LANE.submit(_call, wide, program, (*inputs, middle, end))
        return _ADD(program(*inputs, np.int32(0), middle), second.result())

    def _program(self, work: ClientWork, apart: bool, inputs: tuple) -> Callable[..., Any]:
        """Return the compiled sum for inputs of these shapes and this precision.

        Compiled ahead of the call: the second thread does not share JAX's thread-local settings
        and must have nothing left to trace.
        """
        payload, _, _, _, weights, coefs, _, key = inputs
        form = apart, self.gate, signature(work, (payload, weights, coefs, key))
        if form not in self._programs:
            zero, job = np.int32(0), partial(_gated_sum, work, apart, self.gate)
            self._programs[form] = jax.jit(job).lower(*inputs, zero, zero).compile()
        return self._programs[form]


def _refusals(
    asked: Asked, admitted: np.ndarray, absent: np.ndarray, squares: np.ndarray, gate: Gate
) -> list[Refusal]:
    """Return the replies that do not count, with the reasons that `admit` would give."""
    leaves = names(asked.like)

    def reason(j: int) -> str:
        return NO_REPLY if absent[j] else too_large(squares[j], leaves, gate) or AT_THE_LIMIT

    return [
        Refusal(asked.number, asked.work, int(asked.ids[j]), reason(j))
        for j in np.flatnonzero(~admitted).tolist()
    ]


def _call(wide: bool, program: Callable[..., Any], inputs: tuple) -> Any:
    """Return program(*inputs), with NumPy inputs of 64 bits taken as in the calling thread."""
    with jax.enable_x64(wide):
        return program(*inputs)


def deal(tau: np.ndarray, absent: np.ndarray) -> tuple[np.ndarray, np.int32, np.int32]:
    """Return an order of the cohort and where to cut it, so that both parts work equally long.

    It depends on nothing but who works how long, so neither does the order in which messages are
    added. Who is absent comes after the second cut.

    Example:
        >>> deal(np.array([1, 9, 5, 4, 7]), np.array([False, False, False, False, True]))
        (array([1, 0, 2, 3, 4], dtype=int32), np.int32(2), np.int32(4))
    """
    descending = np.argsort(np.where(absent, 1, -tau), kind="stable").astype(np.int32)
    end = len(tau) - np.count_nonzero(absent)
    place = np.arange(end) % 4
    first = (place == 0) | (place == 3)
    working, away = descending[:end], descending[end:]
    order = np.concatenate([working[first], working[~first], away])
    return order, np.int32(first.sum()), np.int32(end)


def _gated_sum(
    work: ClientWork,
    apart: bool,
    gate: Gate,
    payload: PyTree,
    data: ClientData,
    ids: jax.Array,
    repeats: jax.Array,
    weights: jax.Array,
    coefs: Coefs,
    order: jax.Array,
    key: jax.Array,
    start: jax.Array,
    stop: jax.Array,
) -> Any:
    """Return the weighted sum over the clients order[start:stop], one after the other.

    With it come the squared norms of all messages and which of them counted. `apart` keeps the
    messages side by side, each times its weight, in place of their sum.
    """
    places = data.client
    keys = jax.vmap(client_key, (None, 0, 0))(key, ids, repeats)

    def message(j: Any) -> Any:
        client = Client(data._replace(client=places[j]), coefs[j], keys[j])
        return as_message(work, work(part_for(payload, j), client))

    def add(k: Any, carry: Any) -> Any:
        total, squares, passed = carry
        j = order[k]
        z = message(j)
        own = squared_norms(z)
        ok = within(own, gate)
        z = jax.tree.map(lambda a: jnp.where(ok, a, jnp.zeros_like(a)), z)
        if apart:
            z = trees.scale(weights[j], z)
            total = jax.tree.map(lambda rows, row: rows.at[j].set(row), total, z)
        else:
            total = trees.add_weighed(total, weights[j], z)
        return total, squares.at[j].set(own), passed.at[j].set(ok.astype(jnp.int32))

    like = jax.eval_shape(message, 0)
    sums = sums_of_nothing(weights, apart, like)
    squares = jnp.zeros((len(ids), len(jax.tree.leaves(like))))
    return jax.lax.fori_loop(start, stop, add, (sums, squares, jnp.zeros(len(ids), jnp.int32)))


_ADD = jax.jit(trees.add, donate_argnums=0)
