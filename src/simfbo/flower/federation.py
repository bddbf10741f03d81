"""The engine for clients on other machines: one message to each node per exchange.

Cohorts, keys, weights, gate and ledger are those of simulation. What carries the messages is a
`Post`; `simfbo.flower.app` has one.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from simfbo.core import trees
from simfbo.core.data import checked_weights, from_clients
from simfbo.core.federation import ClientWork, Engine, Exchange, sums_of, sums_of_nothing
from simfbo.core.gate import NO_REPLY, Asked, Refusal, admit
from simfbo.core.local_work import Coefs
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError
from simfbo.flower.deployment import Deployment
from simfbo.flower.node import Package, Question, ask, part_of, partial_sum, replies
from simfbo.flower.wire import BadPackage

LOG = logging.getLogger("simfbo")
AWAY = f"{NO_REPLY}: its node is away"
HELLO = "hello"
_REST = 5.0  # seconds

Parts = dict[int, np.ndarray]  # places in the cohort, by node


class Letter(NamedTuple):
    """A message to a node: for which work, and in which exchange."""

    node: int
    work: str
    package: Package
    exchange: int = 0


class Answer(NamedTuple):
    """What came back: to which letter, and either a package or the reason why there is none."""

    letter: str
    package: Package | None
    reason: str = ""


class Post(Protocol):
    """What carries the messages."""

    def nodes(self) -> set[int]:
        """Return the nodes that are there now."""
        ...

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str | None]:
        """Return the numbers of letters sent, which expire after so many seconds; None if not."""
        ...

    def fetch(self, letters: Iterable[str]) -> list[Answer]:
        """Return the answers that have come to letters of these numbers; each only once."""
        ...


class DistributedFederation(Engine):
    """Clients on other machines.

    Attributes:
        timing: of the last exchange, in seconds: to `send` the messages, for the last of them to
            `reach` its app, there to `load` data and to `compute`, and for its reply to come
            `back`. As far as the clocks of server and node agree.
    """

    def __init__(self, post: Post, plan: Deployment, poll: float = 0.05) -> None:
        """Take what carries the messages and what server and clients agreed upon.

        Args:
            post: the carrier.
            plan: the deployment.
            poll: seconds between looks for replies, and a tenth of the time waited so far.
        """
        one = from_clients(*([part] for part in plan.example), batch_size=plan.batch_size)
        p = checked_weights([1.0] * plan.clients if plan.p is None else plan.p, plan.clients)
        data = replace(one, p=p, n=plan.clients)
        rules: dict[str, Any] = {"gate": plan.gate, "aggregators": plan.aggregators}
        super().__init__(data, plan.sampler, plan.local_work, **rules)
        self.secret = plan.secret
        self.timing: dict[str, float] = {}
        self._post, self._plan, self._poll = post, plan, poll
        self._known = {"x": plan.x0, "y": plan.y0}
        self._holders: dict[int, int] = {}
        self._samples: dict[int, int] = {}
        self._greetings: dict[int, str | None] = {}  # by node; None once it has answered
        self._troubles: dict[int, str] = {}  # nodes that could not be used, and why
        self._rests: dict[int, float] = {}  # until when such a node is left alone
        self._connected = False

    def connect(self, p: Sequence[float] | None = None) -> list[float]:
        """Wait for the nodes; learn who holds which clients and, unless given, their weights.

        Args:
            p: the clients' weights, where they are known from before: then the run may go on
                although nodes are missing.

        Returns:
            The weights as they were given or stated, to be given again when the run is resumed.
        """
        deadline = time.monotonic() + self._plan.wait
        while (missing := self._missing()) and time.monotonic() < deadline:
            self._greet(self._post.nodes())
            self._look({})
            time.sleep(self._poll)
        if missing and (p is None or len(missing) == self.n):
            raise UserError(self._alone(missing))
        self._connected = True
        stated = [self._samples.get(i, 0) for i in range(self.n)]
        weights = next(one for one in (p, self._plan.p, stated) if one is not None)
        self.data = replace(self.data, p=checked_weights(weights, self.n))
        return list(map(float, weights))

    def _alone(self, missing: list[int]) -> str:
        """Return why the run cannot begin."""
        last = next(reversed(self._troubles.values()), None)
        advice = "start their SuperNodes; 'simfbo flower status' shows those there are"
        return (
            f"{len(missing)} of {self.n} clients (the first is client {missing[0]}) have no node "
            f"after {self._plan.wait:g} s: {advice if last is None else f'a node {last}'}."
        )

    def collect(
        self, work: ClientWork, payload: PyTree, cohort: Cohort, coefs: Coefs, key: jax.Array
    ) -> tuple[Any, Exchange]:
        """Return the weighted sums of the replies that pass the gate."""
        like = self.like(work, payload, coefs, key)
        asked = self.ask(work, cohort, like)
        weights, apart = self.weights(cohort, like)
        adds = self._plan.partial_sums and not apart
        parts = self._parts(cohort.ids)
        letters = []
        for node, places in parts.items():
            question = Question(
                asked.number,
                part_of(payload, places),
                cohort.ids[places],
                coefs[places],
                weights[places] if adds else None,
                self.gate,
                None if self.secret else key,
            )
            package = ask(question, self._known)
            letters.append(Letter(node, work.__name__, package, asked.number))
        answers, why = self._exchange(letters)
        if adds:
            return self._added(asked, weights, parts, answers, why)
        return self._gated(asked, weights, apart, parts, answers, why)

    def _gated(
        self,
        asked: Asked,
        weights: np.ndarray,
        apart: bool,
        parts: Parts,
        answers: dict[int, Package],
        why: dict[int, str],
    ) -> tuple[Any, Exchange]:
        """Return the sums of messages that the gate sees one by one."""
        found = []
        for node, answer in answers.items():
            try:
                found += replies(answer, asked.ids[parts[node]])
            except BadPackage as error:
                why[node] = f"sent {error}"
        messages, squares, refusals = admit(found, asked, self.gate)
        admitted = np.array([message is not None for message in messages])
        sums = sums_of(messages, weights, apart, asked.like)
        return sums, Exchange(asked, admitted, squares, _explained(refusals, asked, parts, why))

    def _added(
        self,
        asked: Asked,
        weights: np.ndarray,
        parts: Parts,
        answers: dict[int, Package],
        why: dict[int, str],
    ) -> tuple[Any, Exchange]:
        """Return the sum of the nodes' partial sums, in the order of their clients."""
        total, size = sums_of_nothing(weights, False, asked.like), len(asked.ids)
        admitted, reasons = np.zeros(size, bool), np.full(size, NO_REPLY, object)
        squares = np.zeros((size, len(jax.tree.leaves(asked.like))))
        for node, places in sorted(parts.items(), key=lambda pair: pair[1][0]):
            if node not in answers:
                continue
            try:
                part = partial_sum(answers[node], asked, asked.ids[places], weights[places])
            except BadPackage as error:
                why[node] = f"sent {error}"
                continue
            total = trees.add(total, part.sums)
            admitted[places], squares[places] = part.passed, part.squares
            reasons[places[~part.passed]] = "sent a message that its node left out"
        refusals = [
            Refusal(asked.number, asked.work, int(asked.ids[j]), reasons[j])
            for j in np.flatnonzero(~admitted)
        ]
        return total, Exchange(asked, admitted, squares, _explained(refusals, asked, parts, why))

    def _exchange(self, letters: list[Letter]) -> tuple[dict[int, Package], dict[int, str]]:
        """Return the answers by node, and why others have none."""
        begin, sent_at = time.perf_counter(), time.time()
        numbers = self._post.send(letters, self._plan.timeout)
        sent = time.perf_counter()
        waiting = {n: letter.node for n, letter in zip(numbers, letters, strict=True) if n}
        answers: dict[int, Package] = {}
        why: dict[int, str] = {}
        while waiting:
            left = self._plan.timeout - (time.perf_counter() - begin)
            for node, answer in self._look(waiting).items():
                if answer.package is not None:
                    answers[node] = answer.package
                else:
                    why[node] = answer.reason
                    self._greetings.pop(node, None)  # it may have changed: greet it again
            if left <= 0:
                break
            if waiting:
                pause = max(self._poll, 0.1 * (time.perf_counter() - sent))
                time.sleep(min(pause, max(0.0, left)))
        online, late = self._post.nodes(), f"{NO_REPLY} within {self._plan.timeout:g} s"
        for node in {letter.node for letter in letters} - answers.keys() - why.keys():
            why[node] = late if node in online else AWAY
            self._greetings.pop(node, None)
        began, load, compute = max(map(_times, answers.values()), key=sum, default=(0.0, 0.0, 0.0))
        send, total = sent - begin, time.perf_counter() - begin
        reach = max(0.0, began - sent_at - send) if answers else total - send
        self.timing = {"send": send, "reach": reach, "load": load, "compute": compute}
        self.timing["back"] = max(0.0, total - sum(self.timing.values()))
        return answers, why

    def _parts(self, ids: np.ndarray) -> Parts:
        """Return the places of a cohort that each node is asked for."""
        online = self._post.nodes()
        self._greet(online)
        parts: dict[int, list[int]] = {}
        for place, client in enumerate(ids.tolist()):
            node = self._holders.get(client)
            if node is not None and node in online:
                parts.setdefault(node, []).append(place)
        return {node: np.array(places) for node, places in parts.items()}

    def _missing(self) -> list[int]:
        """Return the clients that no node holds."""
        return [i for i in range(self.n) if i not in self._holders]

    def _greet(self, online: set[int]) -> None:
        """Ask nodes that are new, or back, which clients they hold."""
        self._greetings = {n: letter for n, letter in self._greetings.items() if n in online}
        now = time.monotonic()
        new = [n for n in sorted(online - self._greetings.keys()) if self._rests.get(n, now) <= now]
        if new:
            hello = [Letter(node, HELLO, Package({}, {})) for node in new]
            sent = zip(new, self._post.send(hello, self._plan.timeout), strict=True)
            self._greetings |= {node: number for node, number in sent if number}

    def _look(self, waiting: dict[str, int]) -> dict[int, Answer]:
        """Return the answers that are there, by node, and take them from those waited for."""
        greetings = {number: node for node, number in self._greetings.items() if number}
        found = {}
        for answer in self._post.fetch([*waiting, *greetings]):
            if answer.letter in waiting:
                found[waiting.pop(answer.letter)] = answer
            elif answer.letter in greetings:
                self._seat(greetings[answer.letter], answer)
        return found

    def _seat(self, node: int, answer: Answer) -> None:
        """Write down which clients a node holds, by its own word."""
        try:
            held = _introduction(answer, self.n)
            self._require_free(node, held)
        except BadPackage as error:
            LOG.warning("Node %s cannot be used yet: it %s.", node, error)
            self._troubles[node] = str(error)
            self._rests[node] = time.monotonic() + _REST
            del self._greetings[node]  # it is greeted again
            return
        self._greetings[node] = None
        self._holders = {i: holder for i, holder in self._holders.items() if holder != node}
        self._holders |= dict.fromkeys(held, node)
        self._samples |= held

    def _require_free(self, node: int, held: Iterable[int]) -> None:
        """Raise if another node that is there holds one of the clients."""
        others = self._post.nodes() - {node}
        for client in held:
            if self._holders.get(client) not in others:
                continue
            if not self._connected:
                raise UserError(
                    f"Two nodes hold client {client}: give every node clients of its own "
                    "(--node-config)."
                )
            raise BadPackage(f"holds client {client}, as another node does")


def _explained(
    refusals: list[Refusal], asked: Asked, parts: Parts, why: dict[int, str]
) -> list[Refusal]:
    """Return refusals that say why there was no reply, as far as that is known."""
    nodes = {int(i): node for node, places in parts.items() for i in asked.ids[places]}

    def reason(refusal: Refusal) -> str:
        if refusal.reason != NO_REPLY or refusal.client is None:
            return refusal.reason
        node = nodes.get(refusal.client)
        return AWAY if node is None else why.get(node, NO_REPLY)

    return [refusal._replace(reason=reason(refusal)) for refusal in refusals]


def _introduction(answer: Answer, n: int) -> dict[int, int]:
    """Return the clients that a node says it holds, with their numbers of samples."""
    if answer.package is None:
        raise BadPackage(answer.reason)
    clients, samples = (_whole(answer.package, name) for name in ("clients", "samples"))
    if len(clients) != len(samples) or not all(0 <= i < n for i in clients):
        raise BadPackage("holds clients that there are not")
    if not all(0 < count < 2**53 for count in samples):
        raise BadPackage("has clients without samples")
    return dict(zip(clients, samples, strict=True))


def _whole(package: Package, name: str) -> list[int]:
    """Return a list of whole numbers from untrusted settings."""
    numbers = package.settings.get(name)
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise BadPackage("does not say which clients it holds")
    return numbers


def _times(answer: Package) -> tuple[float, float, float]:
    """Return when a node began, how long it loaded and computed, by its own word; 0 if unsaid."""
    found = [answer.settings.get(name) for name in ("began", "load", "compute")]
    began, load, compute = (s if isinstance(s, float) and 0 <= s < 1e12 else 0.0 for s in found)
    return began, load, compute
