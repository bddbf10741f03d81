"""The fast engine: all clients on this machine, compiled.

A cohort is computed in two lanes (`_lanes`) where a client's step is large, as of networks, and in
batches (`_batches`) where it is small, on an accelerator, and on several devices. The choice
depends on what the step computes, never on how long it takes, so it is the same in every run.
"""

from functools import partial
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from simfbo.codecs.messages import Codecs
from simfbo.core import memory, trees
from simfbo.core.data import FederatedData
from simfbo.core.exchange import Exchange, Probed, Reason, Refusal, Request
from simfbo.core.gate import Finding, Gate, limit_of, occurrences, too_large
from simfbo.core.local_work import LocalWork
from simfbo.core.problem import Point, PyTree
from simfbo.core.sampling import Absence, Sampler
from simfbo.engines import _batches, _lanes
from simfbo.engines._batches import AXIS, Layout
from simfbo.engines._cohort import Found, Inputs, Sender, Stacks
from simfbo.engines._messages import form
from simfbo.engines.base import Call, Engine
from simfbo.engines.compile_cache import PROGRAMS
from simfbo.errors import UserError
from simfbo.robust import anomalies
from simfbo.robust.aggregation import Aggregator

Strategy = Literal["auto", "lanes", "batches"]
_WEIGHED = 2  # clients in an exchange whose entropy codes are measured
_LARGE = 2 * 10**7  # operations of a client's step from which on lanes are faster


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
        sampler: Sampler | None = None,
        local_work: LocalWork | None = None,
        *,
        gate: Gate | None = None,
        aggregators: Point[Aggregator | None] | None = None,
        absence: Absence | None = None,
        codecs: Codecs | None = None,
        detect_anomalies: bool = False,
        strategy: Strategy = "auto",
        chunk: int | None = None,
        devices: int | None = None,
    ) -> None:
        """Hold the data; by default every client takes part, with one local step.

        Args:
            data: the clients' data.
            sampler: which clients take part in a round.
            local_work: how much each client does.
            gate: the rules that a reply must satisfy; by default it must be finite.
            aggregators: how replies are combined, by channel; weighted sums by default.
            absence: which clients fail to reply, to simulate drop-outs; none by default.
            codecs: how messages are coded, by direction and channel; not at all by default. What
                arrives of a message is computed to the bit; the lengths of entropy codes are
                computed too, of two clients in every exchange, and the ledger says how exact
                that is.
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
            data, sampler, local_work, gate=gate, aggregators=aggregators, absence=absence,
            codecs=codecs, detect_anomalies=detect_anomalies,
        )  # fmt: skip
        if strategy not in ("auto", "lanes", "batches"):
            raise UserError(f"strategy must be 'auto', 'lanes' or 'batches', got {strategy!r}.")
        if chunk is not None and chunk < 1:
            raise UserError(f"chunk must be at least 1, got {chunk}.")
        self.strategy, self.chunk = strategy, chunk
        mesh = _mesh(devices)
        self.mesh = None if strategy == "lanes" else mesh
        self._stacks: dict[int, Stacks | None] = {}
        self._stacked_data: FederatedData | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return what a run depends on besides data and algorithm, by name."""
        return {**super().settings, "strategy": self.strategy, "chunk": self.chunk,
                "devices": 1 if self.mesh is None else self.mesh.size}  # fmt: skip

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Return the weighted sum, or the stack, of the messages that pass the gate."""
        absent, like = self.absent(call.key, call.cohort.ids), self.like(call)
        stacked, rules = self.stacks(call, like), self.rules(call.client_step.__name__)
        request = self.request(call, like)
        found = self._run(call, stacked, absent, rules, request.number)
        outcome = exchange_of(request, found, absent, rules)
        return found.total, outcome

    def compute(self, call: Call, stacked: bool, absent: np.ndarray) -> Found:
        """Run a cohort.

        Args:
            call: what to run; the cohort's ids are positions in this engine's data.
            stacked: whether to stack the messages rather than to add them up.
            absent: who computes nothing, and leaves zeros in its position.

        Returns:
            What was found; the clients' memory in this engine does not change.
        """
        return self._run(call, stacked, absent, self.gate, 1)

    def layout(self, call: Call, always: bool = True) -> Layout | None:
        """Return how to compute a cohort in batches; None where it is computed in lanes.

        Args:
            call: what to compute.
            always: whether the cohort is the same in every round.
        """
        size, n = len(call.cohort.ids), self.data.n
        if self.strategy == "lanes":
            return None
        cost, cpu = self.trace(call).cost, jax.default_backend() == "cpu"
        large = cpu and cost.operations > _LARGE
        if self.strategy == "auto" and large and size > 1 and self.mesh is None:
            return None
        whole = always and is_everyone(call.cohort.ids, n)
        return _batches.layout_for(
            size, cost.numbers, whole, self.mesh, self.chunk or (1 if large else None)
        )

    def data_for(self, layout: Layout | None) -> Any:
        """Return the clients' data as a program of this layout takes it."""
        if layout is None or (layout.chunk == 1 and layout.mesh is None):
            return self.data.client(None)
        if self._stacked_data is not self.data:
            self._stacked_data, self._stacks = self.data, {}
        devices = 1 if layout.mesh is None else layout.mesh.size
        held = layout.chunks * layout.chunk if layout.whole else -(-self.data.n // devices)
        count = devices * held
        if count not in self._stacks:
            self._stacks[count] = _batches.stacks_of(self.data, count, layout.mesh)
        found = self._stacks[count]
        return self.data.client(None) if found is None else found

    def _run(
        self, call: Call, stacked: bool, absent: np.ndarray, rules: Gate, number: int
    ) -> Found:
        """Compute a cohort."""
        layout = self.layout(call)
        clients = np.asarray(call.cohort.ids, np.int32)  # one program, whatever the caller has
        inputs = Inputs(
            payload=call.payload,
            data=self.data_for(layout),
            places=clients,
            ids=self.data.ids[clients],
            repeats=occurrences(clients),
            weights=np.asarray(call.cohort.weights),
            plan=call.plan,
            numbers=call.parts.numbers,
            present=~absent,
            look=None,
            limit=number_of(limit_of(rules)),
            window=self._window(len(clients), number),
            weighed=weighed_positions(call.codecs, absent, number),
            key=call.key,
            memory=_rows_of(self.client_memory, clients),
        )
        sender = Sender(call.parts.structure, call.codecs)
        rest = form(
            (
                inputs.payload,
                inputs.data,
                inputs.weights,
                inputs.plan,
                inputs.memory,
                call.key,
            )
        )
        shape = (
            sender, layout, stacked, inputs.limit is None, inputs.window is None,
            jnp.result_type(float), rest,
        )  # fmt: skip

        def build() -> Any:
            if layout is None:
                return _lanes.build(sender, stacked, inputs)
            like = self.like(call)
            job = partial(_batches.compute, sender, like, stacked, layout)
            return jax.jit(job).lower(inputs).compile()

        program = PROGRAMS.get(call.client_step.__name__, shape, build)
        if layout is None:
            return _lanes.compute(program, inputs, call.plan.tau, ~absent)
        return program(inputs)

    def _window(self, clients: int, number: int) -> np.int32 | None:
        """Return the first position whose message is compared; None where none is."""
        return np.int32(anomalies.window_start(clients, number)) if self.detect_anomalies else None


def _mesh(devices: int | None) -> Mesh | None:
    """Return the devices to use; None for the default one alone."""
    there = jax.devices()
    if devices is not None and not 1 <= devices <= len(there):
        raise UserError(
            f"devices must lie between 1 and {len(there)}, which JAX has here, got {devices}."
        )
    count = devices or len(there)
    return None if count == 1 else Mesh(np.array(there[:count]), (AXIS,))


def is_everyone(ids: np.ndarray, n: int) -> bool:
    """Return whether a cohort is everyone, once."""
    return len(ids) == n and np.array_equal(ids, np.arange(n))


def exchange_of(request: Request, found: Found, absent: np.ndarray, rules: Gate) -> Exchange:
    """Return the outcome of an exchange."""
    squares = np.asarray(found.squares, float)
    admitted = ~absent if found.passed is None else np.asarray(found.passed) > 0
    refusals = _refusals(request, admitted, absent, squares, rules)
    probed = None
    if found.probes is not None and anomalies.looks_at(request.number):
        widths = anomalies.probe_of(request.like, len(absent)).widths
        probed = Probed(np.asarray(found.probes, float), widths)
    octets = None
    if found.octets is not None:
        octets = np.asarray(found.octets, float)
        octets = np.where((octets > 0) & ~absent, octets, np.nan)
    return Exchange(request, admitted, squares, refusals, probed, octets, found.memory)


def _refusals(
    request: Request, admitted: np.ndarray, absent: np.ndarray, squares: np.ndarray, gate: Gate
) -> list[Refusal]:
    """Return the replies that do not count, with the reasons that `admit` would give."""
    if admitted.all():
        return []
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


def weighed_positions(codecs: Codecs | None, absent: np.ndarray, number: int) -> np.ndarray | None:
    """Return the positions whose coded bytes are computed, others in every exchange; None: all."""
    if codecs is None or codecs.exact_size or len(absent) <= _WEIGHED:
        return None
    present = np.flatnonzero(~absent)
    if not len(present):
        return np.full(_WEIGHED, -1, np.int32)
    return present[(number * _WEIGHED + np.arange(_WEIGHED)) % len(present)].astype(np.int32)


_rows_of = jax.jit(memory.rows_of)


def number_of(limit: float | None) -> np.ndarray | None:
    """Return a limit as an input of a program."""
    return None if limit is None else np.asarray(limit, jnp.result_type(float))
