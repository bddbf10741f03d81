"""The engine for clients on other machines: one message to each node per exchange.

Cohorts, keys, weights, gate and ledger are the same as in simulation. A `Transport` carries the
messages; `simfbo.flower.app` has the one for Flower.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.codecs.messages import REQUEST_BYTES, deliver, down_key, up_key
from simfbo.core.data import checked_weights, from_clients
from simfbo.core.exchange import Exchange, Reason, Refusal, Request
from simfbo.core.gate import Reply, admit
from simfbo.core.local_work import LocalPlan
from simfbo.core.method import Parts as StepParts
from simfbo.core.problem import Point, PyTree
from simfbo.core.sampling import Cohort
from simfbo.engines.base import Call, Engine, estimated, scaled
from simfbo.errors import UserError
from simfbo.flower.deployment import Deployment, require_consistent, with_arrays
from simfbo.flower.discovery import Discovery, require_same_samples
from simfbo.flower.memory import Versions, lost
from simfbo.flower.node import (
    Code,
    NodeRequest,
    coded_replies,
    encode_request,
    part_of,
    replies,
    response_bytes,
)
from simfbo.flower.sums import Partial, combined_sums, partial_sum
from simfbo.flower.transport import Envelope, Failure, Package, Response, Transport
from simfbo.flower.wire import BadPackage
from simfbo.robust.anomalies import Suspicion, probed
from simfbo.runs.files import Json

Parts = dict[int, np.ndarray]  # positions in the cohort, by node
_AWAY = Reason.NODE_AWAY, Reason.NODE_AWAY.text


class NodeResponses(NamedTuple):
    """The responses of the nodes in one exchange.

    Attributes:
        parts: the positions in the cohort requested from each node.
        packages: the responses, by node.
        failures: the reasons why other nodes have no response.
    """

    parts: Parts
    packages: dict[int, Package]
    failures: dict[int, Failure]

    def refuse(self, node: int, error: BadPackage) -> None:
        """Replace a node's response by the reason for its rejection."""
        self.failures[node] = error.reason, f"sent {error}"


class DistributedFederation(Engine):
    """Clients on other machines.

    Attributes:
        timing: the seconds of the last exchange: to `send` the messages, for the last of them to
            `reach` its app, to `load` data there, to `compute`, and for its reply to come `back`.
            Its precision is that of the synchronisation of server and node clocks.
    """

    holds_memory = False

    def __init__(self, transport: Transport, plan: Deployment, poll: float = 0.05) -> None:
        """Take the transport and the deployment.

        Args:
            transport: carries the messages.
            plan: the deployment.
            poll: seconds between polls for replies, at least a tenth of the time waited so far.
        """
        require_consistent(plan)
        plan = with_arrays(plan)
        example_data = from_clients(*([part] for part in plan.example), batch_size=plan.batch_size)
        p = checked_weights([1.0] * plan.clients if plan.p is None else plan.p, plan.clients)
        data = replace(example_data, p=p, n=plan.clients)
        rules: Json = {"gate": plan.gate, "aggregators": plan.aggregators, "codecs": plan.codecs}
        super().__init__(data, plan.sampler, plan.local_work, **rules, detect_anomalies=True)
        self.secret = plan.secret
        self.start = Point(plan.x0, plan.y0)
        self.timing: dict[str, float] = {}
        self._saved = 0, 0  # the last exchanges before the two newest checkpoints
        self._transport, self._plan, self._poll = transport, plan, poll
        self._known = {"x": plan.x0, "y": plan.y0}
        self._discovery = Discovery(transport, plan.clients, plan.timeout)

    @property
    def data_digest(self) -> str | None:
        """None: nodes send no digests of data, with which a server could test guesses."""
        return None

    @property
    def sample_counts(self) -> dict[str, np.ndarray] | None:
        """The reported number of samples of each client; None if reports are missing."""
        counts = self._discovery.samples
        if any(i not in counts for i in range(self.n)):
            return None
        return {"lower plus upper": np.array([counts[i] for i in range(self.n)])}

    def connect(self, p: Sequence[float] | None = None) -> list[float]:
        """Wait for the nodes to report their clients and, unless given, the clients' weights.

        Args:
            p: the clients' weights if they are already known, as in a resumed run. The run can then
                start although nodes are missing.

        Returns:
            The weights as given or reported, to be passed in when the run is resumed.
        """
        deadline = time.monotonic() + self._plan.wait
        while (missing := self._discovery.missing) and time.monotonic() < deadline:
            self._discovery.ask(self._transport.nodes())
            self._fetch({})
            time.sleep(self._poll)
        if missing and (p is None or len(missing) == self.n):
            raise UserError(self._incomplete(missing))
        self._discovery.close()
        if p is not None and self._plan.p is None:
            require_same_samples(self._discovery.samples, p)
        weights = p if p is not None else self._plan.p
        weights = self._discovery.reported_weights() if weights is None else weights
        self.data = replace(self.data, p=checked_weights(weights, self.n))
        return list(map(float, weights))

    def _incomplete(self, missing: list[int]) -> str:
        """Return the reason why the run cannot start."""
        problem = self._discovery.problem
        advice = "start their SuperNodes ('simfbo flower status' lists those that are online)"
        return (
            f"{len(missing)} of {self.n} clients (the first is client {missing[0]}) have no node "
            f"after {self._plan.wait:g} s: {advice if problem is None else f'a node {problem}'}."
        )

    def collect(self, call: Call) -> tuple[PyTree, Exchange]:
        """Return the weighted sum, or the stack, of the valid replies."""
        codecs, code, down = self.codecs_for(call.step), None, 0.0
        if codecs is not None:
            payload, data, encoded_bytes = deliver(codecs, call.payload, self.start, call.key)
            code = Code(data, up_key(call.key), down_key(call.key))
            call, down = call._replace(payload=payload), encoded_bytes + REQUEST_BYTES
        like = self.message_of(call)
        request, stacked = self.request(call, like), self.stacks(call, like)
        adds = self._plan.partial_sums and not stacked
        parts, plan = self._parts(call.cohort.ids), self.plan(call.key, call.cohort.ids)
        responses = self._send_and_wait(
            parts,
            [
                self._envelope(call, request, plan, code, node, positions, adds)
                for node, positions in parts.items()
            ],
        )
        if self.memory_like is not None:
            self._note_losses(request, responses)
        if adds:
            total, exchange = self._combine_partial_sums(request, call.cohort, responses)
            exchange = exchange._replace(weights=call.cohort.weights, work=plan.norm)
            return total if exchange.factor == 1 else scaled(exchange.factor, total), exchange
        messages, exchange, encoded_bytes = self._check_replies(
            call, request, code is not None, responses
        )
        if encoded_bytes is not None:
            silent = sum(refusal.reason.silent for refusal in exchange.refusals)
            size = len(encoded_bytes)
            exchange = exchange._replace(
                coded=estimated(encoded_bytes, size - silent, size * down, False)
            )
        exchange = exchange._replace(weights=call.cohort.weights, work=plan.norm)
        return self.aggregated(call, messages, exchange), exchange

    def _envelope(
        self,
        call: Call,
        request: Request,
        plan: LocalPlan,
        code: Code | None,
        node: int,
        positions: np.ndarray,
        adds: bool,
    ) -> Envelope:
        """Build the request for one node."""
        ids = call.cohort.ids[positions]
        node_request = NodeRequest(
            request.number,
            part_of(call.payload, positions),
            ids,
            plan[positions],
            StepParts.of(call.step).numbers,
            call.cohort.weights[positions] if adds else None,
            self.rules(request.client_step),
            None if self.secret else call.key,
            code,
            self._versions(ids),
        )
        package = encode_request(node_request, self._known)
        largest = response_bytes(request.like, len(positions), adds)
        return Envelope(node, request.client_step, package, request.number, largest)

    def _versions(self, ids: np.ndarray) -> Versions | None:
        """Return the memory versions of the clients; None for stateless clients."""
        if self.memory_like is None:
            return None
        if "memory" not in self.observed:
            self.observed = {**self.observed, "memory": {"run": token_hex(8), "versions": {}}}
        memory = self.observed["memory"]
        numbers = [memory["versions"].get(str(i), 0) for i in ids.tolist()]
        return Versions(memory["run"], np.array(numbers, np.int64), self._saved[0])

    def saved(self) -> None:
        """Record a checkpoint: a resumed run may also start from the one before."""
        self._saved = self._saved[1], self.ledger.total.rounds

    def settle(self, exchange: Exchange) -> None:
        """Record the new memory versions of the clients whose replies count."""
        if self.memory_like is None:
            return
        ids, memory = exchange.request.ids, self.observed["memory"]
        ends = np.append(ids[1:] != ids[:-1], True)
        updates = {str(i): exchange.request.number for i in ids[ends & exchange.admitted].tolist()}
        versions = {**memory["versions"], **updates}
        self.observed = {**self.observed, "memory": {**memory, "versions": versions}}

    def _note_losses(self, request: Request, responses: NodeResponses) -> None:
        """Record the clients whose nodes lost their memory."""
        for node, package in responses.packages.items():
            memory = self.observed["memory"]
            lost_clients = lost(package.settings, request.ids[responses.parts[node]])
            if clients := [i for i in lost_clients if i not in memory.get("lost", [])]:
                updated = {**memory, "lost": [*memory.get("lost", []), *clients]}
                self.observed = {**self.observed, "memory": updated}
                listed = f"client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}"
                text = f"{listed} lost the saved memory: it is initialised again"
                self.suspicions.append(
                    Suspicion("forgot", request.number, request.client_step, clients, 0.0, text)
                )

    def _check_replies(
        self, call: Call, request: Request, coded: bool, responses: NodeResponses
    ) -> tuple[list[Any], Exchange, np.ndarray | None]:
        """Validate messages one by one; return the valid ones, and the sizes of coded messages."""
        all_replies: list[Reply] = []
        encoded_bytes = np.full(len(request.ids), np.nan) if coded else None
        for node, package in responses.packages.items():
            part = responses.parts[node]
            try:
                if encoded_bytes is None:
                    node_replies = replies(package, request.like, request.ids[part])
                else:
                    node_replies, encoded_bytes[part] = coded_replies(package, request.ids[part])
                all_replies += node_replies
            except BadPackage as error:
                responses.refuse(node, error)
        rules, decode = self.rules(request.client_step), self.decoder(call, request.like)
        messages, squares, refusals = admit(all_replies, request, rules, decode)
        admitted = np.array([message is not None for message in messages])
        explained = _explained(refusals, request, responses)
        compared = probed(messages, request) if self.detect_anomalies else None
        return messages, Exchange(request, admitted, squares, explained, compared), encoded_bytes

    def _combine_partial_sums(
        self, request: Request, cohort: Cohort, responses: NodeResponses
    ) -> tuple[PyTree, Exchange]:
        """Combine the nodes' partial sums, in the order of their clients."""
        parts = dict(sorted(responses.parts.items(), key=lambda pair: pair[1][0]))
        partial_sums = [self._partial(request, cohort, responses, node) for node in parts]
        aggregators = self._plan.node_aggregators or Point()
        total = combined_sums(partial_sums, aggregators, request.like)
        size = len(request.ids)
        admitted, answered = np.zeros(size, bool), np.zeros(size, bool)
        squares = np.zeros((size, len(jax.tree.leaves(request.like))))
        for positions, part in zip(parts.values(), partial_sums, strict=True):
            if part is not None:
                admitted[positions], squares[positions] = part.passed, part.squares
                answered[positions] = True
        refusals = [
            _refusal(request, j, Reason.REFUSED_BY_NODE if answered[j] else Reason.NO_REPLY)
            for j in np.flatnonzero(~admitted).tolist()
        ]
        return total, Exchange(request, admitted, squares, _explained(refusals, request, responses))

    def _partial(
        self, request: Request, cohort: Cohort, responses: NodeResponses, node: int
    ) -> Partial | None:
        """Return a node's sum; None if it has no valid one."""
        if node not in responses.packages:
            return None
        positions = responses.parts[node]
        part = Cohort(cohort.ids[positions], cohort.weights[positions])
        try:
            rules = self.rules(request.client_step)
            return partial_sum(responses.packages[node], request, part, rules)
        except BadPackage as error:
            responses.refuse(node, error)
            return None

    def _send_and_wait(self, parts: Parts, envelopes: list[Envelope]) -> NodeResponses:
        """Send a request to the nodes and wait for their responses."""
        begin, sent_at = time.perf_counter(), time.time()
        numbers = self._transport.send(envelopes, self._plan.timeout)
        sent = time.perf_counter()
        waiting = {n: envelope.node for n, envelope in zip(numbers, envelopes, strict=True) if n}
        responses = NodeResponses(parts, {}, {})
        while waiting:
            remaining = self._plan.timeout - (time.perf_counter() - begin)
            for node, response in self._fetch(waiting).items():
                self._receive(node, response, responses)
            if remaining <= 0:
                break
            if waiting:
                pause = max(self._poll, 0.1 * (time.perf_counter() - sent))
                time.sleep(min(pause, remaining))
        self._time_out({envelope.node for envelope in envelopes}, responses)
        self._time(responses.packages, begin, sent_at, sent)
        return responses

    def _receive(self, node: int, response: Response, responses: NodeResponses) -> None:
        """Record a node's response."""
        if response.package is not None:
            responses.packages[node] = response.package
        else:
            responses.failures[node] = response.reason, response.text
            self._discovery.ask_again(node)

    def _time_out(self, requested: set[int], responses: NodeResponses) -> None:
        """Record why requested nodes have not responded."""
        online = self._transport.nodes()
        late = Reason.TIMED_OUT, f"did not reply within {self._plan.timeout:g} s"
        for node in requested - responses.packages.keys() - responses.failures.keys():
            responses.failures[node] = late if node in online else _AWAY
            self._discovery.ask_again(node)

    def _time(
        self, packages: dict[int, Package], begin: float, sent_at: float, sent: float
    ) -> None:
        """Break down the time of an exchange."""
        send, total = sent - begin, time.perf_counter() - begin
        times = [_reported_times(package, sent_at, total) for package in packages.values()]
        began, load, compute = max(times, key=sum, default=(0.0, 0.0, 0.0))
        reach = max(0.0, began - sent_at - send) if packages else total - send
        self.timing = {"send": send, "reach": reach, "load": load, "compute": compute}
        self.timing["back"] = max(0.0, total - sum(self.timing.values()))

    def _parts(self, ids: np.ndarray) -> Parts:
        """Split a cohort's positions among the nodes that are online."""
        online = self._transport.nodes()
        self._discovery.ask(online)
        parts: dict[int, list[int]] = {}
        for position, client in enumerate(ids.tolist()):
            node = self._discovery.holders.get(client)
            if node is not None and node in online:
                parts.setdefault(node, []).append(position)
        return {node: np.array(positions) for node, positions in parts.items()}

    def _fetch(self, waiting: dict[str, int]) -> dict[int, Response]:
        """Return the responses that have arrived, by node, and remove them from `waiting`."""
        hellos, by_node = self._discovery.waiting, {}
        for response in self._transport.fetch([*waiting, *hellos]):
            if response.number in waiting:
                by_node[waiting.pop(response.number)] = response
            elif response.number in hellos:
                self._discovery.register(hellos[response.number], response)
        return by_node


def _refusal(request: Request, position: int, reason: Reason) -> Refusal:
    client = int(request.ids[position])
    return Refusal(request.number, request.client_step, client, reason, reason.text)


def _explained(
    refusals: list[Refusal], request: Request, responses: NodeResponses
) -> list[Refusal]:
    """Add the reason to refusals for missing replies, if it is known."""
    parts = responses.parts.items()
    nodes = {int(i): node for node, positions in parts for i in request.ids[positions]}
    unknown = Reason.NO_REPLY, Reason.NO_REPLY.text

    def explain(refusal: Refusal) -> Refusal:
        if refusal.reason is not Reason.NO_REPLY or refusal.client is None:
            return refusal
        node = nodes.get(refusal.client)
        reason, text = _AWAY if node is None else responses.failures.get(node, unknown)
        return refusal._replace(reason=reason, text=text)

    return list(map(explain, refusals))


def _reported_times(response: Package, sent: float, total: float) -> tuple[float, float, float]:
    """Return a node's start time, and its times to load and compute; 0 for impossible values.

    Args:
        response: from the node.
        sent: the time at which the request was sent.
        total: seconds until all responses had arrived.
    """
    reported = [response.settings.get(name) for name in ("began", "load", "compute")]
    limits = sent + total, total, total
    began, load, compute = (
        seconds if isinstance(seconds, float) and 0 <= seconds <= limit else 0.0
        for seconds, limit in zip(reported, limits, strict=True)
    )
    return began, load, compute
