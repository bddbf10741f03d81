"""The part that all federations share: gate, ledger, anomaly detection, and compiled programs."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import is_not
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.messages import REQUEST_BYTES, Codecs, decode_message, require_consistent, up_key
from simfbo.core import gate, keys, memory, trees
from simfbo.core.data import FederatedData
from simfbo.core.exchange import (
    EVALUATION,
    EncodedBytes,
    Exchange,
    ExchangeReport,
    Probed,
    Reason,
    Refusal,
    Request,
)
from simfbo.core.federation import Client, ClientStep
from simfbo.core.gate import Decode, Finding, Gate, too_large
from simfbo.core.ledger import Ledger
from simfbo.core.local_work import LocalPlan, LocalWork, Work, constant
from simfbo.core.method import Method, Parts, as_module, is_uncoded, require_unmodified_sums
from simfbo.core.problem import Point, PyTree
from simfbo.core.sampling import (
    Absence,
    AnySampler,
    Cohort,
    HostSampler,
    Sampler,
    as_absence,
    as_sampler,
    everyone,
)
from simfbo.engines.exchange import combined, form, run_client_step, slice_for
from simfbo.errors import TooFewReplies, UserError, brief
from simfbo.privacy import clipped_again
from simfbo.robust import anomalies
from simfbo.robust.aggregation import Aggregator, combine, needs_stack
from simfbo.robust.anomalies import Memory, Suspicion

_MAPPINGS = Path("/proc/self/maps")  # Linux allows 65,530; a program takes up to 1,000
_MOST_MAPPINGS = 40_000


class ProgramCache:
    """The programs used last, by the structure of a method or client step and all else they need.

    Its numbers are no part of the structure: they are inputs.

    Attributes:
        compiled: names of what was compiled so far, one entry per compilation.
    """

    def __init__(self, most: int) -> None:
        """Begin empty; hold at most so many programs."""
        self.compiled: list[str] = []
        self._most, self._programs = most, OrderedDict[Hashable, Any]()

    def get(self, name: str, key: Hashable, build: Callable[[], Any]) -> Any:
        """Look a program up, and build it if need be.

        Args:
            name: of the method or client step.
            key: its structure, and all else that the program depends on.
            build: () -> the program.
        """
        if key in self._programs:
            self._programs.move_to_end(key)
        else:
            built = self._programs[key] = build()
            if built is not None and not isinstance(built, bool):
                self.compiled.append(name)
            excess = len(self._programs) - self._most
            if _MAPPINGS.is_file() and _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS:
                excess = len(self._programs) // 2
            for _ in range(excess):
                self._programs.popitem(last=False)
        return self._programs[key]

    def clear(self) -> None:
        """Forget all programs."""
        self._programs.clear()


PROGRAMS = ProgramCache(256)
TRACES = ProgramCache(1024)  # abstract messages of client steps


class Call(NamedTuple):
    """One use of `sum` or `gather`.

    Attributes:
        step: the client step, as a pytree.
        payload: the message to each client.
        cohort: the clients asked.
        key: of the exchange.
        stack: whether the messages are wanted one by one.
    """

    step: Any
    payload: PyTree
    cohort: Cohort
    key: jax.Array
    stack: bool

    @property
    def name(self) -> str:
        """The name of the client step."""
        return self.step.__name__


class Engine(ABC):
    """A federation; a subclass computes or fetches the messages (`collect`).

    Attributes:
        start: x0 and y0 of the run, for codecs that are relative to it; the runner sets it.
        suspicions: clients that stood out since the runner last took them.
        observed: facts of earlier exchanges for later ones, as JSON values; replaced, never
            changed. The runner stores it with the checkpoints.
        client_memory: the memory of stateful clients, which are the first axis of every leaf; None
            if there is none, or elsewhere. Replaced, never changed, stored likewise.
        memory_like: the memory of one client, abstract; None for stateless clients.
        holds_memory: whether `client_memory` is here.
    """

    holds_memory = True

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
    ) -> None:
        """Hold the data and the rules; see `SimulatedFederation` for the arguments."""
        _require_kinds(data, sampler, local_work, gate, codecs)
        if codecs is not None:
            require_consistent(codecs)
        self.data = data
        self.sampler: Any = sampler or everyone()
        self.local_work = local_work or constant(1)
        self.gate = gate or Gate()
        self.aggregators = aggregators or Point()
        self.absence = absence
        self.codecs = codecs
        self.detect_anomalies = detect_anomalies
        self.start: Point[PyTree] | None = None
        self.ledger = Ledger()
        self.latest: Exchange | None = None
        self.refusals: list[Refusal] = []
        self.suspicions: list[Suspicion] = []
        self.observed: Memory = {}
        self.client_memory: PyTree = None
        self.memory_like: PyTree = None
        self._distinct: Method | None = None  # which needs clients to be sampled once
        self.secret = False
        self._draws: tuple[Any, ...] = ()

    @property
    def n(self) -> int:
        """The number of clients."""
        return self.data.n

    @property
    def p(self) -> np.ndarray:
        """The clients' weights p_i."""
        return self.data.p

    @property
    def draws(self) -> tuple[Sampler, Work, Absence | None]:
        """Sampler, local work and absence, in JAX where they can be."""
        given = self.sampler, self.local_work, self.absence, self.data.p
        if len(self._draws) != 2 or any(map(is_not, self._draws[0], given)):
            sampler = as_sampler(self.sampler, self.data.p)
            work = self.local_work.resolved(self.n)
            self._draws = given, (sampler, work, as_absence(self.absence))
        return self._draws[1]

    def remember(self, method: Method, x0: PyTree, y0: PyTree) -> None:
        """Initialise the clients' memory for a method, and check that it allows the rules."""
        if any(rule is not None and rule.combine is not None for rule in self.aggregators):
            require_unmodified_sums(method, "an aggregator")
        up = () if self.codecs is None else self.codecs.up
        if any(codec is not None and codec.name != "float32" for codec in up):
            require_unmodified_sums(method, "a codec that loses digits")
        self._distinct = method if method.needs_unmodified_sums else None
        initial = method.client_memory(x0, y0)
        initial = None if initial is None else trees.on_device(initial)
        self.memory_like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), initial)
        here = self.holds_memory and initial is not None
        self.client_memory = memory.fresh(initial, self.n) if here else None

    @property
    def requires_distinct(self) -> bool:
        """Whether no client may be sampled twice in a round."""
        return self._distinct is not None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory of each client; they are never sent."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self.memory_like))

    @property
    def data_digest(self) -> str | None:
        """A digest of the clients' data; None where the data is elsewhere."""
        return self.data.digest

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run besides data and algorithm, by name.

        Without drop-outs and the fewest replies: a run that was starved goes on with others.
        """
        gate = self.gate._replace(min_replies=1)
        found = {
            "sampler": self.sampler,
            "local_work": self.local_work,
            "gate": gate,
            "aggregators": self.aggregators,
        }
        return found if self.codecs is None else found | {"codecs": self.codecs.names}

    def cohort(self, key: jax.Array) -> Cohort:
        """Sample the clients that take part."""
        key, sampler = keys.secret_key() if self.secret else key, self.draws[0]
        if isinstance(sampler, HostSampler):
            found = sampler.draw(key, self.data.p)
        elif sampler.static:
            found = sampler(key, self.data.p)
        else:
            found = Cohort(*map(np.asarray, _drawn(sampler, key, self.data.p)))
        if self._distinct is not None and len(np.unique(found.ids)) < len(found.ids):
            require_unmodified_sums(self._distinct, "a client that is sampled twice")
        return found

    def mean_norm(self, key: jax.Array) -> float | None:
        """Rho where the server assigns the local work; None otherwise."""
        work = self.draws[1]
        if not work.assigned:
            return None
        everyone = np.arange(self.n, dtype=np.int32)
        return float(_mean_norm(keys.draw_on_host(work, key, everyone), key, self.data.p))

    def plan(self, key: jax.Array, ids: np.ndarray) -> LocalPlan:
        """Draw the local work of a cohort, by position."""
        plan = _planned(keys.draw_on_host(self.draws[1], key, ids), key, ids)
        return jax.tree.map(np.asarray, plan)

    def absent(self, key: jax.Array, ids: np.ndarray) -> np.ndarray:
        """Draw the clients of a cohort that fail to reply."""
        absence = keys.draw_on_host(self.draws[2], key, ids)
        return np.zeros(len(ids), bool) if absence is None else np.asarray(absence(key, ids))

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Sum w_i client_step(payload, client_i) over the cohort; see `Federation`."""
        return self._exchange(Call(as_module(client_step), payload, _on_host(cohort), key, False))

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Stack the cohort's messages; see `Federation`."""
        return self._exchange(Call(as_module(client_step), payload, _on_host(cohort), key, True))

    def when(self, condition: Any, branch: Callable[[], PyTree], otherwise: PyTree) -> PyTree:
        """Run a branch if a condition holds."""
        return branch() if condition else otherwise

    def _exchange(self, call: Call) -> PyTree:
        """Collect messages; ask again if the automatic limit turns out not to fit.

        An evaluation changes nothing that training depends on, and no number of replies is too few.
        """
        if call.name == EVALUATION:
            found, exchange = self._counted(call)
            self.refusals += exchange.refusals
            return found
        limit = self.rules(call.name).max_norm
        found, exchange = self._counted(call)
        if self.gate.max_norm == "auto" and _misfits(limit, exchange):
            found, exchange = self._counted(call)
        self.refusals += exchange.refusals
        left = int(exchange.admitted.sum())
        if left < max(1, self.gate.min_replies):
            raise TooFewReplies(left, exchange)
        self.settle(exchange)
        self.observe(exchange)
        return found

    def settle(self, exchange: Exchange) -> None:
        """Update the memory of the clients whose replies count."""
        if exchange.memory is not None:
            given = self.client_memory, exchange.memory, exchange.request.ids, exchange.admitted
            self.client_memory = _kept(*given)

    def observe(self, exchange: Exchange) -> None:
        """Report the clients that stand out in an exchange."""
        before = self.observed.get("watch", {})
        after, found_out = anomalies.observe(before, exchange, self.detect_anomalies)
        self.suspicions += found_out
        if after != before:
            self.observed = {**self.observed, "watch": after}

    def _counted(self, call: Call) -> tuple[PyTree, Exchange]:
        """Collect messages, count their traffic, and keep the median norm for automatic limits."""
        found, exchange = self.collect(call)
        request, size = exchange.request, len(call.cohort.ids)
        silent = sum(refusal.reason.silent for refusal in exchange.refusals)
        self.ledger.record(
            call.name, size, size - silent, call.payload, request.like, coded=exchange.coded
        )
        self.latest = exchange
        if self.gate.max_norm == "auto" and call.name != EVALUATION:
            norms = self.observed.get("norms", {})
            recent = gate.with_median(norms.get(call.name, []), gate.median_norm(exchange.squares))
            self.observed = {**self.observed, "norms": {**norms, call.name: recent}}
        return found, exchange

    def rules(self, client_step: str) -> Gate:
        """The gate of the next exchange with a client step; its limit is a number.

        The numbers of an evaluation need only be finite: a limit is for messages that are added.
        """
        if client_step == EVALUATION:
            return Gate()
        if self.gate.max_norm != "auto":
            return self.gate
        recent = self.observed.get("norms", {}).get(client_step, [])
        return self.gate._replace(max_norm=gate.auto_limit(recent))

    def codecs_for(self, step: ClientStep) -> Codecs | None:
        """The codecs of a client step; steps that only measure have none."""
        return None if is_uncoded(step) else self.codecs

    def decoder(self, call: Call, like: PyTree) -> Decode | None:
        """Make a function that decodes replies; None where they are not coded."""
        if (codecs := self.codecs_for(call.step)) is None:
            return None

        def decode(position: int, data: bytes) -> dict[str, np.ndarray]:
            found = decode_message(
                codecs, data, code_key(call.key, call.cohort.ids, position), like
            )
            return trees.as_arrays(clipped_again(call.step, found))

        return decode

    def stacks(self, call: Call, like: PyTree) -> bool:
        """Whether messages are kept one by one, for the algorithm or for an aggregator."""
        return call.stack or needs_stack(self.aggregators, like)

    def message_of(self, call: Call) -> PyTree:
        """Trace a client step for the shapes of its message."""

        def reply(step: ClientStep, payload: PyTree, client: Client) -> PyTree:
            return run_client_step(step, slice_for(payload, 0), client)[0]

        parts, plan = Parts.of(call.step), self.plan(call.key, call.cohort.ids)[0]
        client = Client(self.data.client(0), plan, call.key, self.memory_like)
        given = parts.numbers, call.payload, client
        return TRACES.get(
            call.name,
            (parts.structure, form(given)),
            lambda: jax.eval_shape(reply, parts.joined(), *given[1:]),
        )

    def aggregated(self, call: Call, messages: list[Any], exchange: Exchange) -> PyTree:
        """Combine messages by position, of which those that do not count are None.

        The weights of those that count are multiplied by asked / admitted.
        """
        like, weights = exchange.request.like, np.asarray(call.cohort.weights)
        stacked = self.stacks(call, like)
        found = combined(messages, weights, stacked, like)
        if stacked and not call.stack:
            return combine(self.aggregators, found, exchange.factor * weights * exchange.admitted)
        return found if exchange.factor == 1 else scaled(exchange.factor, found)

    def request(self, call: Call, like: PyTree) -> Request:
        """Describe the next request."""
        return Request(self.ledger.total.rounds + 1, call.name, np.asarray(call.cohort.ids), like)

    @abstractmethod
    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Run one exchange: combine the messages that pass the gate."""


def exchange_of(
    report: ExchangeReport, number: int, rules: Gate, codecs: Codecs | None, memory: PyTree = None
) -> Exchange:
    """Convert the report of an exchange with clients on this machine."""
    request = Request(number, report.client_step, np.asarray(report.ids), report.message.tree)
    admitted, squares = np.asarray(report.admitted), np.asarray(report.squares, float)
    replied = np.ones_like(admitted) if report.replied is None else np.asarray(report.replied)
    refusals: list[Refusal] = []
    leaves = () if admitted.all() else trees.names(request.like)

    def finding(j: int) -> Finding:
        if not replied[j]:
            return Reason.NO_REPLY, Reason.NO_REPLY.text
        # Compiled sums round differently, so a norm may be just at the limit here.
        at_limit = Reason.TOO_LARGE, "sent a message of just the largest norm"
        return too_large(squares[j], leaves, rules) or at_limit

    for j in np.flatnonzero(~admitted).tolist():
        refusals.append(Refusal(number, request.client_step, int(request.ids[j]), *finding(j)))
    probed = coded = None
    if report.probes is not None and anomalies.looks_at(number):
        widths = anomalies.probe_of(request.like, len(admitted)).widths
        probed = Probed(np.asarray(report.probes, float), widths)
    if codecs is not None and report.up is not None:
        encoded_bytes = np.where(replied, np.asarray(report.up, float), np.nan)
        down = len(replied) * (float(np.asarray(report.down)) + REQUEST_BYTES)
        coded = estimated(encoded_bytes, int(replied.sum()), down, not codecs.exact_size)
    weights, work = (
        None if a is None else np.asarray(a, float) for a in (report.weights, report.work)
    )
    return Exchange(request, admitted, squares, refusals, probed, memory, coded, weights, work)


def code_key(key: jax.Array, ids: np.ndarray, position: int) -> jax.Array:
    """Derive the key that codes the message at a position of a cohort."""
    repeat = int(np.count_nonzero(ids[:position] == ids[position]))
    return keys.client_key(up_key(key), int(ids[position]), repeat)


def estimated(encoded_bytes: np.ndarray, replied: int, down: float, computed: bool) -> EncodedBytes:
    """Estimate the bytes of an exchange, of which some clients' messages were measured.

    Args:
        encoded_bytes: by position; not a number where they are unknown.
        replied: clients that replied.
        down: bytes of the payloads.
        computed: whether bytes are lengths of codes rather than counted.
    """
    known = encoded_bytes[np.isfinite(encoded_bytes)]
    up = replied * float(known.mean()) if len(known) else 0.0
    variance = 0.0
    if 1 < len(known) < replied:  # of a sample without replacement
        variance = replied**2 * (1 - len(known) / replied) * float(known.var(ddof=1)) / len(known)
    some = computed or len(known) < replied
    return EncodedBytes(down, up, down * computed + up * some, variance)


def _require_kinds(data: Any, sampler: Any, local_work: Any, gate: Any, codecs: Any) -> None:
    """Raise if a federation is given something of another kind."""
    known: list[Any] = [
        (FederatedData, data, "its data come from simfbo.from_clients or simfbo.federate"),
        (Callable, sampler, "a sampler is such as sampling.without_replacement(10)"),
        (LocalWork, local_work, "local work is such as local_work.constant(5)"),
        (Gate, gate, "a gate is such as Gate(max_norm=10.0)"),
        (Codecs, codecs, "codecs are a codecs.Codecs"),
    ]
    for kind, given, advice in known:
        if given is not None and not isinstance(given, kind):
            raise UserError(f"A federation cannot take {brief(given)}: {advice}.")


def _misfits(limit: float | Literal["auto"] | None, exchange: Exchange) -> bool:
    """Whether a limit was missing, or much too small, judged by the cohort's own median."""
    median = gate.median_norm(exchange.squares)
    if isinstance(limit, float):
        return median > limit
    norms = np.sqrt(exchange.squares[exchange.admitted].sum(1))
    return median > 0 and bool((norms > gate.auto_limit([median])).any())


def _on_host(cohort: Cohort) -> Cohort:
    return Cohort(*map(np.asarray, cohort))


_kept = jax.jit(memory.kept)
scaled = jax.jit(trees.scale)


@jax.jit
def _drawn(sampler: Sampler, key: jax.Array, p: jax.Array) -> Cohort:
    return sampler(key, p)


@jax.jit
def _mean_norm(work: Work, key: jax.Array, p: jax.Array) -> jax.Array:
    return jnp.asarray(work.mean_norm(key, p))


@jax.jit
def _planned(work: Work, key: jax.Array, ids: jax.Array) -> LocalPlan:
    """Draw the local work, with a row for each client."""
    plan = work.plan(key, ids)
    if jnp.ndim(plan.tau):
        return plan
    return jax.tree.map(lambda a: jnp.broadcast_to(jnp.asarray(a), (len(ids), *jnp.shape(a))), plan)
