"""One exchange with a cohort: the request, the replies, and the refusals."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from simfbo.core.problem import PyTree

# The client step that evaluates rather than trains: its exchanges are counted by themselves.
EVALUATION = "client_metrics"


@unique
class Reason(StrEnum):
    """Why a reply does not count. The value is what histories store."""

    NO_REPLY = "no-reply"
    TIMED_OUT = "timed-out"
    NODE_AWAY = "node-away"
    NODE_FAILED = "node-failed"
    NOT_REQUESTED = "not-requested"
    WRONG_EXCHANGE = "wrong-exchange"
    DUPLICATE = "duplicate"
    MALFORMED = "malformed"
    NOT_FINITE = "not-finite"
    TOO_LARGE = "too-large"
    REFUSED_BY_NODE = "refused-by-node"

    @property
    def silent(self) -> bool:
        """Return whether nothing was received."""
        return self in (self.NO_REPLY, self.TIMED_OUT, self.NODE_AWAY, self.NODE_FAILED)

    @property
    def text(self) -> str:
        """Return what the client did, to be continued after its name."""
        return _TEXTS[self]


_TEXTS = {
    Reason.NO_REPLY: "did not reply",
    Reason.TIMED_OUT: "did not reply in time",
    Reason.NODE_AWAY: "did not reply: its node is away",
    Reason.NODE_FAILED: "did not reply: its node failed",
    Reason.NOT_REQUESTED: "was not asked",
    Reason.WRONG_EXCHANGE: "answered another exchange",
    Reason.DUPLICATE: "replied more than once",
    Reason.MALFORMED: "sent a malformed message",
    Reason.NOT_FINITE: "sent a message that is not finite",
    Reason.TOO_LARGE: "sent a message above the norm limit",
    Reason.REFUSED_BY_NODE: "sent a message that its node refused",
}


class EncodedBytes(NamedTuple):
    """How many bytes coded messages have, added over all clients.

    Attributes:
        down: of the payloads.
        up: of the messages.
        estimated: those of them that were not counted but computed: the length of an entropy code,
            or that of other clients' messages.
        variance: of their sum, from the differences between clients.
    """

    down: float
    up: float
    estimated: float = 0.0
    variance: float = 0.0


class Request(NamedTuple):
    """What a cohort was asked in one exchange.

    Attributes:
        number: of the exchange, counted from 1.
        client_step: the name of the client step.
        ids: the clients sampled, ascending; a client that was sampled twice appears twice.
        like: an example message; its leaves may be abstract.
    """

    number: int
    client_step: str
    ids: Int[np.ndarray, " cohort"]
    like: PyTree


class Refusal(NamedTuple):
    """A reply that does not count.

    Attributes:
        exchange: its number.
        client_step: the name of the client step.
        client: whose reply; None where that is unknown.
        reason: the kind of refusal.
        text: the reason in words, with details.
    """

    exchange: int
    client_step: str
    client: int | None
    reason: Reason
    text: str


class Probed(NamedTuple):
    """A few numbers of each reply, to compare directions; see `simfbo.robust.anomalies`.

    Attributes:
        rows: the numbers of the replies that are compared; zeros where a reply does not count.
        widths: how many of them belong to each channel.
    """

    rows: Float[np.ndarray, "compared numbers"]
    widths: tuple[int, ...]


class Shapes(NamedTuple):
    """Structure, shapes and dtypes of a pytree, as a hashable value."""

    structure: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, tree: PyTree) -> Shapes:
        """Return the shapes of a pytree of arrays."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves))

    @property
    def tree(self) -> PyTree:
        """Return the pytree, of abstract arrays."""
        return jax.tree.unflatten(self.structure, self.leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ExchangeReport:
    """What the server learns from an exchange; reports of several rounds have one axis more.

    Attributes:
        ids: the clients asked; None where all replies pass.
        weights: of their messages, where messages are compared; else None.
        work: ||a_i||_1, where messages are compared; else None.
        replied: which clients replied; None for all.
        admitted: which replies passed the gate; None for all, as long as they are finite.
        squares: squared norms of the replies, by position and leaf; zero without a reply. None
            where all replies pass.
        finite: where `admitted` is None, whether all replies are finite; else None.
        down: bytes of the coded payload; None without codecs.
        up: bytes of the coded messages, not a number where they were not computed; None without
            codecs.
        probes: numbers of the messages that are compared (`simfbo.robust.anomalies`), else None.
        client_step: the name of the step.
        payload: shapes of what each client receives.
        message: shapes of what each client sends.
        asked: the number of clients in the cohort.
        took_place: whether the exchange took place, where it is conditional; None for always.
    """

    ids: Int[Any, "*rounds cohort"] | None
    weights: Float[Any, "*rounds cohort"] | None
    work: Float[Any, "*rounds cohort"] | None
    replied: Bool[Any, "*rounds cohort"] | None
    admitted: Bool[Any, "*rounds cohort"] | None
    squares: Float[Any, "*rounds cohort leaves"] | None
    finite: Bool[Any, "*rounds"] | None
    down: Float[Any, "*rounds"] | None
    up: Float[Any, "*rounds cohort"] | None
    probes: Float[Any, "*rounds compared numbers"] | None
    took_place: Bool[Any, "*rounds"] | None
    client_step: str = eqx.field(static=True)
    payload: Shapes = eqx.field(static=True)
    message: Shapes = eqx.field(static=True)
    asked: int = eqx.field(static=True)

    @property
    def factor(self) -> Any:
        """Return what the weights of the admitted are multiplied by: asked / admitted."""
        return 1.0 if self.admitted is None else self.asked / self.admitted.sum(-1).clip(1)


class Exchange(NamedTuple):
    """The outcome of one exchange, as the server keeps it.

    Attributes:
        request: what the cohort was sent.
        admitted: whether a reply counts, by position in the cohort.
        squares: squared norms of the replies, by position and leaf.
        refusals: the replies that do not count.
        probed: what is compared between replies; None where nothing is.
        memory: what clients remember if their replies count, by position; None where they remember
            nothing, or it is elsewhere.
        coded: bytes both ways, where messages are coded.
        weights: of the messages.
        work: ||a_i||_1 of the clients.
    """

    request: Request
    admitted: Bool[np.ndarray, " cohort"]
    squares: Float[np.ndarray, "cohort leaves"]
    refusals: list[Refusal]
    probed: Probed | None = None
    memory: PyTree = None
    coded: EncodedBytes | None = None
    weights: Float[np.ndarray, " cohort"] | None = None
    work: Float[np.ndarray, " cohort"] | None = None

    @property
    def factor(self) -> float:
        """Return what the weights of the admitted are multiplied by: asked / admitted."""
        return len(self.admitted) / max(1, int(self.admitted.sum()))

    @property
    def mostly_oversized(self) -> bool:
        """Return whether most replies left out arrived, but were too large or not finite."""
        left_out = ~self.admitted
        measured = left_out & (self.squares.sum(1) != 0)
        return bool(2 * measured.sum() > left_out.sum())

    @property
    def largest_sender(self) -> int:
        """Return the client with the largest message, of those admitted if there are any."""
        counted = self.admitted if self.admitted.any() else True
        totals = np.where(counted, np.nan_to_num(self.squares.sum(1), nan=np.inf), -1.0)
        return int(self.request.ids[np.argmax(totals)])
