"""The fast engine: all clients on this machine, compiled.

An exchange is one compiled program. Where a client's step is large, as of networks, it is computed
in two lanes instead: two programs side by side in two threads, in each of which clients run one
after the other. Two lanes keep two cores busy where one program would have to divide every small
product between them, memory does not grow with the cohort, and a client that takes few local steps
costs few (docs/explanation-performance.md). The choice depends on what the step computes, never on
how long it takes, so it is the same in every run.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import is_not
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from simfbo.codecs.messages import Codecs
from simfbo.core import keys, trees
from simfbo.core.data import FederatedData, Split
from simfbo.core.exchange import Exchange, ExchangeReport
from simfbo.core.gate import Gate, limit_of
from simfbo.core.local_work import LocalWork
from simfbo.core.method import Parts
from simfbo.core.problem import Point, PyTree
from simfbo.core.sampling import Absence, AnySampler, Cohort
from simfbo.engines.base import PROGRAMS, Call, Engine, exchange_of
from simfbo.engines.exchange import (
    AXIS,
    Clients,
    Job,
    Results,
    Strategy,
    exchange,
    finish_exchange,
    form,
    prepare_exchange,
    run_in_chunks,
    trace_reply,
)
from simfbo.errors import NeedsHost, UserError
from simfbo.robust.aggregation import Aggregator

_MEASURED = 2  # clients in an exchange in lanes whose entropy codes are measured
_PADDING = 2  # how many times as large as the samples their stacks may be
_SECOND_LANE = ThreadPoolExecutor(1, thread_name_prefix="simfbo")


@final
class SimulatedFederation(Engine):
    """All clients on this machine, compiled.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> from simfbo.core.sampling import without_replacement
        >>> federation = SimulatedFederation(quadratic().data, without_replacement(2))
    """

    def __init__(
        self,
        data: FederatedData,
        sampler: AnySampler | None = None,
        local_work: LocalWork | None = None,
        *,
        gate: Gate | None = None,
        aggregators: Point[Aggregator | None] | None = None,
        absence: Absence | Callable[..., Any] | None = None,
        codecs: Codecs | None = None,
        detect_anomalies: bool = False,
        strategy: Strategy = "auto",
        chunk: int | None = None,
        devices: int | None = None,
    ) -> None:
        """Hold the data; by default every client takes part, with one local step.

        Args:
            data: the clients' data.
            sampler: draws the clients that take part in a round.
            local_work: the local steps of each client.
            gate: the rules that a reply must satisfy; by default it must be finite.
            aggregators: how replies are combined, by channel; weighted sums by default.
            absence: draws the clients that fail to reply, to simulate drop-outs; none by default.
            codecs: how messages are coded, by direction and channel; not at all by default. What
                arrives of a message is computed to the bit; the lengths of entropy codes are
                computed too, in lanes of two clients in every exchange, and the ledger says how
                exact that is.
            detect_anomalies: whether clients' messages are compared, and those that stand out are
                reported, as on Flower; here all clients are yours, so it is off by default.
            strategy: "lanes" computes clients one after the other in two threads, for large
                models; "batches" computes many at once, for small ones; "auto" chooses by the cost
                of a client's step. Results are equal up to rounding.
            chunk: clients in a batch; by default as many as fit the cache, or an accelerator's
                memory.
            devices: how many JAX devices share the clients; all by default.
        """
        super().__init__(
            data,
            sampler,
            local_work,
            gate=gate,
            aggregators=aggregators,
            absence=absence,
            codecs=codecs,
            detect_anomalies=detect_anomalies,
        )
        if strategy not in ("auto", "lanes", "batches"):
            raise UserError(f"strategy must be 'auto', 'lanes' or 'batches', got {strategy!r}.")
        if chunk is not None and chunk < 1:
            raise UserError(f"chunk must be at least 1, got {chunk}.")
        self.strategy: Strategy = strategy
        self.chunk = chunk
        self.mesh = None if strategy == "lanes" else _mesh(devices)
        self._stacked: tuple[Any, ...] = None, None
        self._clients: tuple[Any, ...] = None, None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run besides data and algorithm, by name."""
        return {
            **super().settings,
            "strategy": self.strategy,
            "chunk": self.chunk,
            "devices": 1 if self.mesh is None else self.mesh.size,
        }

    def clients(self, limit: float | None) -> Clients:
        """Clients and rules as inputs of programs; a new object only after a change of settings.

        Args:
            limit: the largest norm of a message; None lets everything pass.
        """
        start = None if self.codecs is None else self.start
        given = (
            self.data,
            self.draws,
            limit,
            start,
            self.aggregators,
            self.codecs,
            self.strategy,
            self.chunk,
            self.mesh,
            self.detect_anomalies,
        )
        if self._clients[0] is None or any(map(is_not, self._clients[0], given)):
            if self._stacked[0] is not self.data:
                self._stacked = self.data, _stacks_of(self.data, self.mesh)
            lower, upper = self._stacked[1]
            sampler, work, absence = self.draws
            self._clients = (
                given,
                Clients(
                    lower,
                    upper,
                    np.asarray(self.data.p),
                    np.asarray(self.data.ids),
                    sampler,
                    work,
                    absence,
                    limit,
                    start,
                    self.aggregators,
                    self.codecs,
                    self.detect_anomalies,
                    True,
                    self.chunk,
                    self.mesh,
                    self.strategy,
                ),
            )
        return self._clients[1]

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Run one exchange: combine the messages that pass the gate."""
        rules, number = self.rules(call.name), self.ledger.total.rounds + 1
        clients, ids = self.clients(limit_of(rules)), np.asarray(call.cohort.ids, np.int32)
        work, absence = keys.draw_on_host((clients.work, clients.absence), call.key, ids)
        clients = replace(clients, work=work, absence=absence)
        step, weights = Parts.of(call.step), np.asarray(call.cohort.weights, jnp.result_type(float))
        inputs = (
            clients,
            step.numbers,
            jax.device_put(call.payload),
            ids,
            weights,
            call.key,
            self.client_memory,
            np.int32(number),
        )
        leaves, structure = jax.tree.flatten(inputs)
        everyone, complete = np.arange(self.n, dtype=np.int32), call.cohort.is_everyone(self.n)

        def run(*leaves: Any) -> tuple[PyTree, PyTree, ExchangeReport]:
            given = jax.tree.unflatten(structure, leaves)
            clients, numbers, payload, ids, weights, key, memory, number = given
            own = jax.tree.unflatten(step.structure, numbers)
            cohort = Cohort(everyone if complete else ids, weights)
            return exchange(clients, own, payload, cohort, key, memory, call.stack, number)

        def build() -> Callable[..., Any] | bool:
            try:
                return jax.jit(run).lower(*leaves).compile()
            except NeedsHost:  # two threads; whether they keep messages one by one
                return self.stacks(call, self.message_of(call))

        key = structure, step.structure, call.stack, complete, form(leaves)
        program = PROGRAMS.get(call.name, key, build)
        if isinstance(program, bool):
            found, memory, report = self._in_threads(call, inputs, program)
        else:
            found, memory, report = program(*leaves)
        return found, exchange_of(report, number, rules, self.codecs, memory)

    def _in_threads(
        self, call: Call, inputs: tuple[Any, ...], keep: bool
    ) -> tuple[PyTree, PyTree, ExchangeReport]:
        """Run an exchange in two threads."""
        clients, _, payload, ids, *rest, number = inputs
        step = Parts.of(call.step).joined()
        job, report = _prepare_exchange(clients, step, payload, ids, *rest)
        rows = job.rows
        if report.down is not None and not clients.codecs.exact_size and len(ids) > _MEASURED:
            present = np.flatnonzero(np.asarray(rows.replies))
            turn = (number * _MEASURED + np.arange(_MEASURED)) % max(1, len(present))
            rows = replace(
                rows, measured=np.isin(np.arange(len(ids)), present[turn[: len(present)]])
            )
        whole = replace(job, step=step, data=(clients.lower, clients.upper), rows=rows)
        sums, results = run_in_threads(whole, keep)
        return _finish_exchange(job, report, clients.aggregators, sums, results, call.stack, number)


@jax.jit
def _prepare_exchange(
    clients: Clients, step: Any, payload: PyTree, ids: Any, weights: Any, key: Any, memory: PyTree
) -> tuple[Job, ExchangeReport]:
    job, report = prepare_exchange(clients, step, payload, Cohort(ids, weights), key, memory)
    return replace(job, step=None, data=None), report


_finish_exchange = jax.jit(finish_exchange, static_argnums=(2, 5))


def run_in_threads(job: Job, keep: bool) -> tuple[PyTree, Results]:
    """Run the clients of a job in two threads; in each of them one after the other.

    Args:
        job: the clients' part of the exchange.
        keep: keep messages one by one, rather than add them up.
    """
    leaves, structure = jax.tree.flatten(job)
    none = np.zeros(len(job.rows.position), np.int32), np.int32(0), np.int32(0)

    def run(order: Any, first: Any, last: Any, *leaves: Any) -> tuple[PyTree, Results]:
        job = jax.tree.unflatten(structure, leaves)
        return run_in_chunks(job, trace_reply(job), keep, 1, (order, first, last))

    # Compiled ahead of the call: the second thread must have nothing left to trace.
    program = PROGRAMS.get(
        job.step.__name__,
        ("lane", structure, keep, form(leaves)),
        lambda: jax.jit(run).lower(*none, *leaves).compile(),
    )
    plan = job.plan if job.rows.plan is None else job.rows.plan
    assert plan is not None
    tau = np.broadcast_to(np.asarray(plan.tau), len(none[0]))
    order, middle, end = deal(tau, ~np.asarray(job.rows.replies))
    if middle == end:
        return program(order, np.int32(0), end, *leaves)
    wide = jnp.result_type(float) == jnp.float64

    def second() -> tuple[PyTree, Results]:
        with jax.enable_x64(wide):  # the settings of JAX belong to a thread
            return program(order, middle, end, *leaves)

    other = _SECOND_LANE.submit(second)
    return _ADD(program(order, np.int32(0), middle, *leaves), other.result())


_ADD = jax.jit(trees.add, donate_argnums=0)


def deal(tau: np.ndarray, absent: np.ndarray) -> tuple[np.ndarray, np.int32, np.int32]:
    """Order the cohort, and divide it so that both lanes work equally long.

    It depends on the local work alone, so neither does the order in which messages are added. The
    absent come after the second cut.

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


def _stacks_of(data: FederatedData, mesh: Mesh | None) -> tuple[Split, Split]:
    """Arrange lower and upper samples as inputs of programs.

    They are stacked client by client, and divided between devices, if there are several; on one
    device not if that wastes space, nor for minibatches.
    """
    if mesh is None and not all(map(_is_dense, (data.lower, data.upper))):
        return data.lower, data.upper
    lower = data.lower.stacked()
    upper = lower if _is_same(data.lower, data.upper) else data.upper.stacked()
    if mesh is None:
        return trees.on_device((lower, upper))

    def padded(a: Any) -> np.ndarray:
        rows = np.asarray(a)
        return np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % mesh.size, 0)])

    return jax.device_put(
        jax.tree.map(padded, (lower, upper)), jax.NamedSharding(mesh, PartitionSpec(AXIS))
    )


def _is_dense(part: Split) -> bool:
    """Whether a stack of a part, for whole batches, is hardly larger than the part."""
    return part.batch_size is None and part.start.size * part.largest <= _PADDING * part.rows.size


def _is_same(lower: Split, upper: Split) -> bool:
    """Whether both parts hold the same samples."""
    shared = lower.samples is upper.samples and lower.rows.shape == upper.rows.shape
    pairs = ((lower.rows, upper.rows), (lower.start, upper.start))
    return shared and all(np.array_equal(a, b) for a, b in pairs)


def _mesh(devices: int | None) -> Mesh | None:
    """The devices to use; None for the default one alone."""
    there = jax.devices()
    if devices is not None and not 1 <= devices <= len(there):
        raise UserError(
            f"devices must lie between 1 and {len(there)}, which JAX has here, got {devices}."
        )
    count = devices or len(there)
    return None if count == 1 else Mesh(np.array(there[:count]), (AXIS,))
