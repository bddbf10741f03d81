"""The federation: one verb, a weighted sum over a cohort; each use is one communication round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.aggregation import Aggregators
from simfbo.core.data import ClientData, FederatedData
from simfbo.core.gate import NO_REPLY, Asked, Gate, Refusal
from simfbo.core.keys import secret_key
from simfbo.core.local_work import Coefs, LocalWork, constant
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Absence, Cohort, Sampler, everyone
from simfbo.errors import TooFewReplies, UserError


class Client(NamedTuple):
    """All that a client's work may see besides the payload.

    Attributes:
        data: the client's lower and upper data.
        coefs: how many local steps it takes and how they count.
        key: its random key for this exchange.
    """

    data: ClientData
    coefs: Coefs
    key: jax.Array


ClientWork = Callable[[PyTree, Client], PyTree]


class Dealt(NamedTuple):
    """A part of a payload that differs from client to client.

    Slice j of every leaf goes to the cohort's j-th client, who finds it in this part's place.
    """

    slices: PyTree


class Algorithm(NamedTuple):
    """An algorithm: pure functions of a state and a federation.

    Attributes:
        name: as people call it.
        init: (x0, y0) -> state; a state has at least the fields x and y.
        round: (state, federation, key) -> state, one iteration.
        works: every client work that `round` hands to the federation.
        biases: laws of `simfbo.checks` that it breaks by construction, each with a sentence.
    """

    name: str
    init: Callable[[PyTree, PyTree], Any]
    round: Callable[[Any, "Federation", jax.Array], Any]
    works: tuple[ClientWork, ...]
    biases: Mapping[str, str] = {}


class Traffic(NamedTuple):
    """What was sent: exchanges, floats and bytes, added over clients."""

    rounds: int = 0
    floats_down: int = 0
    floats_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        """Return both together."""
        return Traffic(*map(add, self, other))


@dataclass
class Ledger:
    """What the federation sent, counted from the messages themselves: in all and by work."""

    total: Traffic = field(default_factory=Traffic)
    by_work: dict[str, Traffic] = field(default_factory=dict)

    def record(self, work: str, asked: int, replied: int, down: PyTree, up: PyTree) -> None:
        """Count one exchange: the payload `down`, and one client's message `up`."""
        (floats_down, bytes_down), (floats_up, bytes_up) = _size(down, asked), _size(up, replied)
        exchange = Traffic(1, floats_down, floats_up, bytes_down, bytes_up)
        self.total = self.total.plus(exchange)
        self.by_work[work] = self.by_work.get(work, Traffic()).plus(exchange)


class Exchange(NamedTuple):
    """What came of one exchange.

    Attributes:
        asked: what was asked, and of whom.
        admitted: whether a reply counts, by place in the cohort.
        squares: squared norms of the replies, by place and leaf.
        refusals: the replies that do not count.
    """

    asked: Asked
    admitted: np.ndarray
    squares: np.ndarray
    refusals: list[Refusal]

    @property
    def factor(self) -> float:
        """Return what the weights of those who count are multiplied by: asked / admitted."""
        return len(self.admitted) / max(1, int(self.admitted.sum()))

    @property
    def wild(self) -> bool:
        """Return whether most replies that do not count came, and were too large or not finite."""
        left_out = ~self.admitted
        measured = left_out & (self.squares.sum(1) != 0)
        return bool(2 * measured.sum() > left_out.sum())

    @property
    def loudest(self) -> int:
        """Return the client whose message was the largest of those that count, if any does."""
        counted = self.admitted if self.admitted.any() else True
        totals = np.where(counted, np.nan_to_num(self.squares.sum(1), nan=np.inf), -1.0)
        return int(self.asked.ids[np.argmax(totals)])


class Federation(Protocol):
    """What an algorithm may ask of the world."""

    ledger: Ledger
    refusals: list[Refusal]
    secret: bool  # whether cohorts and noise come from randomness that nobody can draw again

    @property
    def latest(self) -> Exchange | None:
        """Return what came of the last exchange; None before the first."""
        ...

    @property
    def n(self) -> int:
        """Return the number of clients there are."""
        ...

    @property
    def p(self) -> np.ndarray:
        """Return the clients' weights p_i."""
        ...

    def cohort(self, key: jax.Array) -> Cohort:
        """Return the clients that take part."""
        ...

    def aggregate(self, work: ClientWork, payload: PyTree, cohort: Cohort, key: jax.Array) -> Any:
        """Return sum over the cohort of w_i work(payload, client_i): one communication round.

        Weights with a second axis ask for several sums of the same messages, a column each, and
        stack them along a new first axis; with a diagonal, the messages come back one by one. Where
        replies do not count, these are zero and all others are multiplied by asked over admitted.
        """
        ...

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho = sum_j p_j ||a_j||_1 of the exchange with this key; None where unknown."""
        ...


class Engine(ABC):
    """What all engines share: cohorts, local work, the gate, aggregators and the ledger."""

    def __init__(
        self,
        data: FederatedData,
        sampler: Sampler | None = None,
        local_work: LocalWork | None = None,
        *,
        gate: Gate | None = None,
        aggregators: Aggregators | None = None,
        absence: Absence | None = None,
    ) -> None:
        """Hold the data; by default everyone takes part, with one local step.

        Args:
            data: the clients' data.
            sampler: who is asked.
            local_work: how much each does.
            gate: what a reply must be like; finite, by default.
            aggregators: how replies are combined; weighted sums by default.
            absence: who does not reply though asked, to rehearse drop-outs; nobody by default.
        """
        self.data = data
        self.sampler = sampler or everyone()
        self.local_work = local_work or constant(1)
        self.gate = gate or Gate()
        self.aggregators = aggregators or Aggregators()
        self.absence = absence
        self.ledger = Ledger()
        self.latest: Exchange | None = None
        self.refusals: list[Refusal] = []
        self.secret = False
        self._likes: dict[Any, PyTree] = {}

    @property
    def n(self) -> int:
        """Return the number of clients there are."""
        return self.data.n

    @property
    def p(self) -> np.ndarray:
        """Return the clients' weights p_i."""
        return self.data.p

    def cohort(self, key: jax.Array) -> Cohort:
        """Return the clients that take part."""
        key = secret_key() if self.secret else key
        ids, weights = map(np.asarray, self.sampler(key, self.data.p))
        if not len(ids):
            raise UserError("The sampler drew nobody: a cohort needs at least one client.")
        order = np.argsort(ids, kind="stable")
        return Cohort(ids[order].astype(np.int32), weights[order])

    def mean_norm(self, key: jax.Array) -> float | None:
        """Return rho where the server assigns the local work; None otherwise."""
        if not self.local_work.assigned:
            return None
        return float(self.data.p @ self.local_work(key, self.data.n).norm)

    def absent(self, key: jax.Array, ids: np.ndarray) -> np.ndarray:
        """Return whether each client asked fails to reply."""
        return np.zeros(len(ids), bool) if self.absence is None else self.absence(key, ids)

    def aggregate(self, work: ClientWork, payload: PyTree, cohort: Cohort, key: jax.Array) -> Any:
        """Return sum over the cohort of w_i work(payload, client_i): one communication round.

        Replies that do not pass the gate are left out and the rest weighed again, by asked over
        admitted; with too few of them, `TooFewReplies` is raised.
        """
        coefs = self.local_work(key, self.data.n, cohort.ids)
        sums, exchange = self.collect(work, payload, cohort, coefs, key)
        self._write_down(exchange, payload)
        if self.stacks(cohort, exchange.asked.like):
            # Zeros in place of the missing: another shape would have to be compiled.
            weights = exchange.factor * cohort.weights * exchange.admitted
            return self.aggregators.combine(sums, weights)
        return sums if exchange.factor == 1 else _scaled(exchange.factor, sums)

    def _write_down(self, exchange: Exchange, payload: PyTree) -> None:
        """Enter an exchange into the books; raise where too few replies are left."""
        asked, refusals = exchange.asked, exchange.refusals
        silent = sum(refusal.reason.startswith(NO_REPLY) for refusal in refusals)
        size = len(asked.ids)
        self.ledger.record(asked.work, size, size - silent, payload, asked.like)
        self.refusals += refusals
        self.latest = exchange
        left = int(exchange.admitted.sum())
        if left < max(1, self.gate.min_replies):
            raise TooFewReplies(left, exchange)

    def like(self, work: ClientWork, payload: PyTree, coefs: Coefs, key: jax.Array) -> PyTree:
        """Return the shape of one message."""
        form = signature(work, (payload, coefs))
        if form not in self._likes:
            client = Client(self.data.client(0), coefs[0], key)
            reply = jax.eval_shape(work, part_for(payload, 0), client)
            self._likes[form] = jax.eval_shape(partial(as_message, work), reply)
        return self._likes[form]

    def ask(self, work: ClientWork, cohort: Cohort, like: PyTree) -> Asked:
        """Return the exchange that comes next."""
        return Asked(self.ledger.total.rounds + 1, work.__name__, cohort.ids, like)

    def stacks(self, cohort: Cohort, like: PyTree) -> bool:
        """Return whether messages like this are wanted one by one, for an aggregator.

        An algorithm that asks for several sums or for single messages gets what it asks for.
        """
        return cohort.weights.ndim == 1 and self.aggregators.need_stack(like)

    def weights(self, cohort: Cohort, like: PyTree) -> tuple[np.ndarray, bool]:
        """Return the weights of messages like this, and whether they stay apart or are added."""
        if self.stacks(cohort, like):
            return np.ones(len(cohort.ids)), True
        if cohort.weights.shape == (len(cohort.ids),) * 2:
            own = np.diagonal(cohort.weights)
            if np.count_nonzero(cohort.weights) == np.count_nonzero(own):
                return own.copy(), True
        return cohort.weights, False

    @abstractmethod
    def collect(
        self, work: ClientWork, payload: PyTree, cohort: Cohort, coefs: Coefs, key: jax.Array
    ) -> tuple[Any, Exchange]:
        """Return the sums of the messages that pass the gate by `weights`, and what came of it.

        Args:
            work: what each client does.
            payload: what each client receives.
            cohort: who is asked.
            coefs: local work, by place in the cohort.
            key: of the exchange.
        """


def as_message(work: ClientWork, reply: PyTree) -> Any:
    """Return a client's reply as arrays, after a check that it can be weighed and added."""
    message = jax.tree.map(jnp.asarray, reply)
    for leaf in jax.tree.leaves(message):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"'{work.__name__}' returns {leaf.dtype} numbers: return floats, which can be "
                "weighed and added."
            )
    return message


def signature(work: ClientWork, inputs: PyTree) -> Any:
    """Return what a program for this work and inputs like these depends on."""
    leaves, structure = jax.tree.flatten(inputs)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return work, jnp.result_type(float), structure, shapes


def client_key(key: jax.Array, client: Any, occurrence: Any) -> jax.Array:
    """Return a client's key: it depends on the exchange and the client, never on who else came."""
    return jax.random.fold_in(jax.random.fold_in(key, client), occurrence)


def part_for(payload: PyTree, place: Any) -> Any:
    """Return what the client at a place of the cohort receives: its own slices of `Dealt` parts.

    Example:
        >>> part_for({"all": 1.0, "own": Dealt(np.array([5, 6, 7]))}, 1)
        {'all': 1.0, 'own': np.int64(6)}
    """

    def part(given: Any) -> Any:
        if not isinstance(given, Dealt):
            return given
        return jax.tree.map(lambda a: a[place], given.slices)

    return jax.tree.map(part, payload, is_leaf=_is_dealt)


def sums_of_nothing(weights: Any, apart: bool, message: PyTree) -> Any:
    """Return zeros shaped like the weighted sums of messages such as this (it may be abstract)."""
    first = weights.shape if apart else weights.shape[1:]
    return jax.tree.map(lambda a: jnp.zeros(first + a.shape, a.dtype), message)


def sums_of(messages: Sequence[Any], weights: np.ndarray, apart: bool, like: PyTree) -> Any:
    """Return the weighted sums of the messages there are, or each by itself; None is left out."""
    total = sums_of_nothing(weights, apart, like)
    for j, message in enumerate(messages):
        if message is None:
            continue
        if apart:
            row = trees.scale(weights[j], message)
            total = jax.tree.map(lambda rows, own, j=j: rows.at[j].set(own), total, row)
        else:
            total = trees.add_weighed(total, weights[j], message)
    return total


def _is_dealt(part: Any) -> bool:
    return isinstance(part, Dealt)


@jax.jit
def _scaled(factor: Any, tree: PyTree) -> Any:
    return trees.scale(factor, tree)


def _size(message: PyTree, clients: int) -> tuple[int, int]:
    """Return how many numbers and bytes all clients together send or receive."""
    numbers = octets = 0
    for part in jax.tree.leaves(message, is_leaf=_is_dealt):
        times = 1 if _is_dealt(part) else clients
        for leaf in jax.tree.leaves(part):
            numbers += times * leaf.size
            octets += times * leaf.size * leaf.dtype.itemsize
    return numbers, octets
