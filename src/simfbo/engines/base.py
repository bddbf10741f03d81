"""What all engines share: cohorts, local work, the gate, aggregation and the ledger."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.messages import REQUEST_BYTES, Codecs, require_consistent
from simfbo.core import gate, memory, trees
from simfbo.core.data import FederatedData
from simfbo.core.exchange import EVALUATION, Exchange, Refusal, Request
from simfbo.core.federation import Client, ClientStep
from simfbo.core.gate import Decode, Gate
from simfbo.core.keys import secret_key
from simfbo.core.ledger import Ledger, Octets
from simfbo.core.local_work import LocalPlan, LocalWork, constant
from simfbo.core.method import Method, Parts, as_module, is_uncoded, require_unmodified_sums
from simfbo.core.problem import Point, PyTree, Scalar
from simfbo.core.sampling import Absence, Cohort, Sampler, everyone
from simfbo.engines._coding import Sent, decoder, delivered, weighed
from simfbo.engines._cost import Cost, cost_of
from simfbo.engines._messages import answer, form, slice_for
from simfbo.engines.compile_cache import TRACES
from simfbo.errors import TooFewReplies, UserError, brief
from simfbo.robust import aggregation, anomalies
from simfbo.robust.aggregation import Aggregator
from simfbo.robust.anomalies import Memory, Suspicion


class Call(NamedTuple):
    """One use of the verb.

    Attributes:
        client_step: what each client does.
        parts: its structure, and its numbers.
        payload: what each client receives, after decoding.
        cohort: who is asked.
        plan: local work, by position in the cohort.
        key: of the exchange.
        single: whether the algorithm wants messages one by one rather than their weighted sum.
        codecs: how messages are coded; None for not at all.
        sent: the payload as it was coded.
    """

    client_step: ClientStep
    parts: Parts
    payload: PyTree
    cohort: Cohort
    plan: LocalPlan
    key: jax.Array
    single: bool
    codecs: Codecs | None = None
    sent: Sent | None = None


class Trace(NamedTuple):
    """What is known of a client step before it runs: an abstract message, and its cost."""

    like: PyTree
    cost: Cost


class Engine(ABC):
    """A federation, except for how messages are computed or fetched.

    Attributes:
        start: x0 and y0 of the run, for codecs that are relative to it; the runner sets it.
        suspicions: what stood out in messages since the runner last took them.
        observed: what later exchanges need to know of earlier ones, as JSON values; replaced, never
            changed. The runner stores it with the checkpoints.
        client_memory: what the clients remember, with the clients as the first axis of every leaf;
            None if they remember nothing, or elsewhere. Replaced, never changed, stored likewise.
        memory_like: what one client remembers, abstract; None if nothing.
        holds_memory: whether `client_memory` is here.
    """

    holds_memory = True

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
    ) -> None:
        """Hold the data; by default every client takes part, with one local step.

        Args:
            data: the clients' data.
            sampler: which clients take part in a round.
            local_work: how much each client does.
            gate: the rules that a reply must satisfy; by default it must be finite.
            aggregators: how replies are combined, by channel; weighted sums by default.
            absence: which clients fail to reply, to simulate drop-outs; none by default.
            codecs: how messages are coded, by direction and channel; not at all by default.
            detect_anomalies: whether clients' messages are compared, and those that stand out are
                reported.
        """
        _require_kinds(data, sampler, local_work, gate, codecs)
        if codecs is not None:
            require_consistent(codecs)
        self.data = data
        self.sampler = sampler or everyone()
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
        self._formed: tuple[FederatedData, PyTree] | None = None

    @property
    def n(self) -> int:
        """Return the number of clients."""
        return self.data.n

    @property
    def p(self) -> np.ndarray:
        """Return the clients' weights p_i."""
        return self.data.p

    def remember(self, method: Method, x0: PyTree, y0: PyTree) -> None:
        """Give the clients the memory that they have before they first take part in a method."""
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
    def memory_bytes(self) -> int:
        """Return how many bytes every client keeps for itself; they are never sent."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self.memory_like))

    @property
    def data_digest(self) -> str | None:
        """Return a digest of the clients' data; None where the data is elsewhere."""
        return self.data.digest

    @property
    def settings(self) -> dict[str, Any]:
        """Return what a run depends on besides data and algorithm, by name.

        Not who is absent and how many must reply: a run that was starved goes on with others.
        """
        gate = self.gate._replace(min_replies=1)
        found = {"sampler": self.sampler, "local_work": self.local_work, "gate": gate,
                 "aggregators": self.aggregators}  # fmt: skip
        return found if self.codecs is None else found | {"codecs": self.codecs.names}

    def cohort(self, key: jax.Array) -> Cohort:
        """Sample the clients that take part."""
        key = secret_key() if self.secret else key
        ids, weights = map(np.asarray, self.sampler(key, self.data.p))
        if not len(ids):
            raise UserError("The sampler returned no clients: a cohort needs at least one.")
        if weights.shape != ids.shape:
            raise UserError("The sampler must return one weight per client.")
        if self._distinct is not None and len(np.unique(ids)) < len(ids):
            require_unmodified_sums(self._distinct, "a client that is sampled twice")
        order = np.argsort(ids, kind="stable")
        return Cohort(ids[order].astype(np.int32), weights[order])

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho where the server assigns the local work; None otherwise."""
        if not self.local_work.assigned:
            return None
        return float(self.data.p @ self.local_work(key, self.data.n).norm)

    def absent(self, key: jax.Array, ids: np.ndarray) -> np.ndarray:
        """Return which clients of a cohort fail to reply."""
        return np.zeros(len(ids), bool) if self.absence is None else self.absence(key, ids)

    def sum(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Return sum over the cohort of w_i client_step(payload, client_i); see `Federation`."""
        call = self._call(client_step, payload, cohort, key, single=False)
        found, exchange = self._exchange(call)
        if self.stacks(call, exchange.request.like):
            # Zeros in place of the missing: another shape would have to be compiled.
            weights = exchange.factor * cohort.weights * exchange.admitted
            return aggregation.combine(self.aggregators, found, weights)
        return found if exchange.factor == 1 else _scaled(exchange.factor, found)

    def gather(
        self, client_step: ClientStep, payload: PyTree, cohort: Cohort, key: jax.Array
    ) -> PyTree:
        """Return the cohort's messages, stacked; see `Federation`."""
        call = self._call(client_step, payload, cohort, key, single=True)
        found, exchange = self._exchange(call)
        return found if exchange.factor == 1 else _scaled(exchange.factor, found)

    def _call(
        self,
        client_step: ClientStep,
        payload: PyTree,
        cohort: Cohort,
        key: jax.Array,
        single: bool,
    ) -> Call:
        plan, step = self.local_work(key, self.data.n, cohort.ids), as_module(client_step)
        codecs, sent = self.codecs_of(step), None
        if codecs is not None:
            payload, sent = self.deliver(codecs, payload, key)
        return Call(step, Parts.of(step), payload, cohort, plan, key, single, codecs, sent)

    def codecs_of(self, client_step: ClientStep) -> Codecs | None:
        """Return how the messages of a client step are coded; some measure, and are not."""
        return None if is_uncoded(client_step) else self.codecs

    def deliver(self, codecs: Codecs, payload: PyTree, key: jax.Array) -> tuple[PyTree, Sent]:
        """Return what clients receive of a payload: by default in JAX, without any bytes."""
        return delivered(codecs, payload, self.start, key)

    def _exchange(self, call: Call) -> tuple[PyTree, Exchange]:
        """Collect messages; ask again if the automatic limit turns out not to fit.

        An evaluation changes nothing that training depends on, and no number of replies is too few.
        """
        if call.client_step.__name__ == EVALUATION:
            found, exchange = self._counted(call)
            self.refusals += exchange.refusals
            return found, exchange
        limit = self.rules(call.client_step.__name__).max_norm
        found, exchange = self._counted(call)
        if self.gate.max_norm == "auto" and _misfits(limit, exchange):
            found, exchange = self._counted(call)
        self.refusals += exchange.refusals
        left = int(exchange.admitted.sum())
        if left < max(1, self.gate.min_replies):
            raise TooFewReplies(left, exchange)
        self.settle(exchange)
        self.observe(exchange, call.cohort.weights, call.plan.norm)
        return found, exchange

    def settle(self, exchange: Exchange) -> None:
        """Let the clients whose replies count remember what these left behind."""
        if exchange.memory is not None:
            given = self.client_memory, exchange.memory, exchange.request.ids, exchange.admitted
            self.client_memory = _kept(*given)

    def observe(self, exchange: Exchange, weights: np.ndarray, norm: np.ndarray) -> None:
        """Look at an exchange: who stands out, by weights and by work, is a suspicion."""
        before = self.observed.get("watch", {})
        after, found_out = anomalies.observe(before, exchange, weights, norm, self.detect_anomalies)
        self.suspicions += found_out
        if after != before:
            self.observed = {**self.observed, "watch": after}

    def _counted(self, call: Call) -> tuple[PyTree, Exchange]:
        """Collect messages, count what was sent, and remember how large they were."""
        found, exchange = self.collect(call)
        request, size = exchange.request, len(call.cohort.ids)
        silent = sum(refusal.reason.silent for refusal in exchange.refusals)
        self.ledger.record(
            request.client_step, size, size - silent, call.payload, request.like,
            coded=self._octets(call, exchange, size - silent),
        )  # fmt: skip
        self.latest = exchange
        if self.gate.max_norm == "auto" and request.client_step != EVALUATION:
            norms, step = self.observed.get("norms", {}), request.client_step
            recent = gate.with_median(norms.get(step, []), gate.median_norm(exchange.squares))
            self.observed = {**self.observed, "norms": {**norms, step: recent}}
        return found, exchange

    def _octets(self, call: Call, exchange: Exchange, replied: int) -> Octets | None:
        """Return the bytes of an exchange whose messages are coded."""
        if call.codecs is None or call.sent is None or exchange.octets is None:
            return None
        down = len(call.cohort.ids) * (call.sent.octets + REQUEST_BYTES)
        computed = call.sent.data is None and not call.codecs.exact_size
        return weighed(exchange.octets, replied, down, computed)

    def rules(self, client_step: str) -> Gate:
        """Return the gate of the next exchange with a client step; its limit is a number.

        The numbers of an evaluation need only be finite: a limit is for messages that are added.
        """
        if client_step == EVALUATION:
            return Gate()
        if self.gate.max_norm != "auto":
            return self.gate
        recent = self.observed.get("norms", {}).get(client_step, [])
        return self.gate._replace(max_norm=gate.auto_limit(recent))

    def stacks(self, call: Call, like: PyTree) -> bool:
        """Return whether messages are kept one by one, for the algorithm or for an aggregator."""
        return call.single or aggregation.needs_stack(self.aggregators, like)

    def like(self, call: Call) -> PyTree:
        """Return an abstract message of a client step."""
        return self.trace(call).like

    def trace(self, call: Call) -> Trace:
        """Return what is known of a client step before it runs."""

        def build() -> Trace:
            def run(step: ClientStep, payload: PyTree, client: Client) -> tuple[PyTree, PyTree]:
                return answer(step, slice_for(payload, 0), client)

            client = Client(self.data.client(0), call.plan[0], call.key, self.memory_like)
            given = call.parts.joined(), call.payload, client
            jaxpr, (like, _) = jax.make_jaxpr(run, return_shape=True)(*given)
            return Trace(like, cost_of(jaxpr.jaxpr))

        if self._formed is None or self._formed[0] is not self.data:
            self._formed = self.data, form(self.data.client(None))
        rest = form((call.payload, call.plan, self.memory_like))
        key = jnp.result_type(float), self._formed[1], rest
        return TRACES.get(call.client_step.__name__, (call.parts.structure, *key), build)

    def decoder(self, call: Call, like: PyTree) -> Decode | None:
        """Return what decodes the replies of a call; None where they are not coded."""
        return decoder(call.codecs, call.client_step, call.key, call.cohort.ids, like)

    def request(self, call: Call, like: PyTree) -> Request:
        """Return the next request."""
        number = self.ledger.total.rounds + 1
        return Request(number, call.client_step.__name__, call.cohort.ids, like)

    @abstractmethod
    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Return the weighted sum, or the stack, of the messages that pass the gate."""


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
    """Return whether the cohort's own median says that a limit was missing, or much too small."""
    median = gate.median_norm(exchange.squares)
    if isinstance(limit, float):
        return median > limit
    norms = np.sqrt(exchange.squares[exchange.admitted].sum(1))
    return median > 0 and bool((norms > gate.auto_limit([median])).any())


_kept = jax.jit(memory.kept)


@jax.jit
def _scaled(factor: Scalar, tree: PyTree) -> PyTree:
    return trees.scale(factor, tree)
