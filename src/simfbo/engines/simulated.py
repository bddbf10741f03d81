"""The fast engine: a cohort in two compiled calls that run side by side.

Within a call clients run one after the other and are added up as they finish, so memory does not
grow with the cohort, matrix products keep their full size, and a client that takes few local steps
costs few local steps. Two calls side by side keep two cores busy where one call would have to split
every small product between them. Measured in docs/explanation-performance.md.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees, watch
from simfbo.core.data import ClientData, FederatedData
from simfbo.core.exchange import Exchange, Probed, Reason, Refusal, Request
from simfbo.core.federation import Client, ClientStep
from simfbo.core.gate import (
    Finding,
    Gate,
    limit_of,
    occurrences,
    squared_norms,
    too_large,
    within,
)
from simfbo.core.keys import client_key
from simfbo.core.local_work import LocalPlan
from simfbo.core.problem import Point, PyTree
from simfbo.engines.base import Call, Engine, as_message, form, slice_for, zeros_for
from simfbo.engines.compile_cache import PROGRAMS

Rows = Any  # an array: NumPy's outside of a trace, JAX's inside
_SECOND_LANE = ThreadPoolExecutor(1, thread_name_prefix="simfbo")


class _Inputs(NamedTuple):
    """What the compiled program of a cohort takes, by position in the cohort where it differs."""

    payload: PyTree
    data: ClientData
    ids: Rows
    repeats: Rows
    weights: Rows
    plan: LocalPlan
    eta: Point[PyTree]
    order: Rows
    limit: Any
    key: jax.Array


@final
class SimulatedFederation(Engine):
    """All clients on this machine, compiled, in two threads.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> from simfbo.core.sampling import without_replacement
        >>> federation = SimulatedFederation(quadratic().data, without_replacement(2))
    """

    _formed: tuple[FederatedData, Any] | None = None

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Return the weighted sum, or the stack, of the messages that pass the gate."""
        absent, like = self.absent(call.key, call.cohort.ids), self.like(call)
        stacked, rules = self.stacks(call, like), self.rules(call.client_step.__name__)
        found, squares, passed, probes = self._run(call, stacked, absent, rules)
        squares, admitted = np.asarray(squares, float), np.asarray(passed) > 0
        request = self.request(call, like)
        refusals = _refusals(request, admitted, absent, squares, rules)
        probed = None
        if watch.looks_at(request.number):
            widths = watch.probe_of(like, len(absent)).widths
            probed = Probed(np.asarray(probes, float), widths)
        return found, Exchange(request, admitted, squares, refusals, probed)

    def compute(
        self, call: Call, stacked: bool, absent: np.ndarray
    ) -> tuple[PyTree, jax.Array, jax.Array]:
        """Run a cohort in two lanes.

        Args:
            call: what to run; the cohort's ids are positions in this engine's data.
            stacked: whether to stack the messages rather than to add them up.
            absent: who computes nothing, and leaves zeros in its position.

        Returns:
            The sum or the stack, the squared norms of all messages and which of them passed.
        """
        return self._run(call, stacked, absent, self.gate)[:3]

    def _run(
        self, call: Call, stacked: bool, absent: np.ndarray, rules: Gate
    ) -> tuple[PyTree, jax.Array, jax.Array, jax.Array]:
        """Run a cohort as `compute` does, and return what is compared of the messages too."""
        order, middle, end = deal(call.plan.tau, absent)
        clients = np.asarray(call.cohort.ids, np.int32)  # one program, whatever the caller has
        data, ids = self.data.client(clients), self.data.ids[clients]
        inputs = _Inputs(call.payload, data, ids, occurrences(clients), call.cohort.weights,
                         call.plan, call.eta, order, _number(limit_of(rules)),
                         call.key)  # fmt: skip
        program = self._program(call.client_step, stacked, inputs)
        if middle == end:
            return program(inputs, np.int32(0), end)
        wide = jnp.result_type(float) == jnp.float64
        second = _SECOND_LANE.submit(_run_lane, wide, program, (inputs, middle, end))
        return _ADD(program(inputs, np.int32(0), middle), second.result())

    def _program(
        self, client_step: ClientStep, stacked: bool, inputs: _Inputs
    ) -> Callable[..., Any]:
        """Return the compiled sum for inputs of these shapes and this precision.

        Compiled ahead of the call: the second thread does not share JAX's thread-local settings
        and must have nothing left to trace.
        """
        rest = form((inputs.payload, inputs.weights, inputs.plan, inputs.eta, inputs.key))
        shape = stacked, inputs.limit is None, jnp.result_type(float), self._data_form, rest

        def build() -> Callable[..., Any]:
            job, zero = partial(_gated_sum, client_step, stacked), np.int32(0)
            return jax.jit(job).lower(inputs, zero, zero).compile()

        return PROGRAMS.get(client_step, shape, build)

    @property
    def _data_form(self) -> PyTree:
        """Return what programs depend on in the clients' data."""
        if self._formed is None or self._formed[0] is not self.data:
            self._formed = self.data, form((self.data.lower, self.data.upper))
        return self._formed[1]


def _refusals(
    request: Request, admitted: np.ndarray, absent: np.ndarray, squares: np.ndarray, gate: Gate
) -> list[Refusal]:
    """Return the replies that do not count, with the reasons that `admit` would give."""
    leaves = trees.names(request.like)

    def finding(j: int) -> Finding:
        if absent[j]:
            return Reason.NO_REPLY, Reason.NO_REPLY.text
        # Compiled sums round differently, so a norm may be just at the limit here.
        at_limit = Reason.TOO_LARGE, "sent a message of just the largest norm"
        return too_large(squares[j], leaves, gate) or at_limit

    return [
        Refusal(request.number, request.client_step, int(request.ids[j]), *finding(j))
        for j in np.flatnonzero(~admitted).tolist()
    ]


def _number(limit: float | None) -> np.ndarray | None:
    """Return a limit as an input of a program."""
    return None if limit is None else np.asarray(limit, jnp.result_type(float))


def _run_lane(wide: bool, program: Callable[..., Any], inputs: tuple[Any, ...]) -> PyTree:
    """Run a program in the second thread, in the precision of the calling thread."""
    with jax.enable_x64(wide):
        return program(*inputs)


def deal(tau: np.ndarray, absent: np.ndarray) -> tuple[np.ndarray, np.int32, np.int32]:
    """Return an order of the cohort and where to cut it, so that both lanes work equally long.

    It depends only on who works how long, so neither does the order in which messages are added.
    The absent come after the second cut.

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
    client_step: ClientStep,
    stacked: bool,
    inputs: _Inputs,
    start: jax.Array,
    stop: jax.Array,
) -> PyTree:
    """Sum, or stack, the messages of the clients order[start:stop], one after the other.

    Returns:
        The sum or the stack, the squared norms of all messages, which of them passed the gate, and
        what is compared of those.
    """
    size = len(inputs.ids)
    keys = jax.vmap(client_key, (None, 0, 0))(inputs.key, inputs.ids, inputs.repeats)

    def message(j: jax.Array | int) -> PyTree:
        data = inputs.data._replace(client=inputs.data.client[j])
        client = Client(data, inputs.plan[j], inputs.eta, keys[j])
        return as_message(client_step, client_step(slice_for(inputs.payload, j), client))

    def add(k: jax.Array, carry: PyTree) -> PyTree:
        total, squares, passed, probes = carry
        j = inputs.order[k]
        z = message(j)
        own = squared_norms(z)
        ok = within(own, inputs.limit)
        z = jax.tree.map(lambda a: jnp.where(ok, a, jnp.zeros_like(a)), z)
        if stacked:
            total = jax.tree.map(lambda rows, row: rows.at[j].set(row), total, z)
        else:
            total = trees.add_scaled(total, inputs.weights[j], z)
        squares, passed = squares.at[j].set(own), passed.at[j].set(ok.astype(jnp.int32))
        return total, squares, passed, probes.at[j].set(watch.take(probe, z))

    like = jax.eval_shape(message, 0)
    squares = jnp.zeros((size, len(jax.tree.leaves(like))))
    probe = watch.probe_of(like, size)
    probes = jnp.zeros((size, sum(probe.widths)))
    carry = zeros_for(size, stacked, like), squares, jnp.zeros(size, jnp.int32), probes
    return jax.lax.fori_loop(start, stop, add, carry)


_ADD = jax.jit(trees.add, donate_argnums=0)
