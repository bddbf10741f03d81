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

# The client step of evaluations, whose exchanges are counted separately.
EVALUATION = "client_metrics"


@unique
class Reason(StrEnum):
    """The reason to reject a reply; histories store the value."""

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
        """Whether nothing was received."""
        return self in (self.NO_REPLY, self.TIMED_OUT, self.NODE_AWAY, self.NODE_FAILED)

    @property
    def text(self) -> str:
        """The reason in words, with the client as the subject of the sentence."""
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
    """The bytes of coded messages, added over all clients.

    Attributes:
        down: of the payloads.
        up: of the messages.
        estimated: the part that was estimated: from the entropy of a code, or from other clients'
            messages.
        variance: of the estimate, from the variance between clients.
    """

    down: float
    up: float
    estimated: float = 0.0
    variance: float = 0.0


class Request(NamedTuple):
    """The request of one exchange to its cohort.

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
    """A rejected reply.

    Attributes:
        exchange: its number.
        client_step: the name of the client step.
        client: the sender; None if unknown.
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
        rows: the numbers of the compared replies; zeros for rejected ones.
        widths: the count of numbers in each channel.
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
        """The pytree of abstract arrays."""
        return jax.tree.unflatten(self.structure, self.leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ExchangeReport:
    """The arrays that an exchange reports to the server, with a leading axis for several rounds.

    Attributes:
        ids: the cohort; None if all replies pass.
        weights: of the messages, if messages are compared.
        work: ||a_i||_1, if messages are compared.
        replied: a mask of the clients that replied; None for all.
        admitted: a mask of the admitted replies; None for all, as long as they are finite.
        squares: squared norms of the replies, by position and leaf; zero without a reply. None
            if all replies pass.
        finite: all replies are finite, if `admitted` is None.
        down: bytes of the coded payload; None without codecs.
        up: bytes of the coded messages, NaN if they were not computed; None without codecs.
        probes: numbers of the compared messages (`simfbo.robust.anomalies`).
        client_step: the name of the step.
        payload: shapes of the payload.
        message: shapes of a message.
        asked: the number of clients in the cohort.
        took_place: False for a conditional exchange that was skipped; None if unconditional.
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
        """The factor of the weights of admitted replies: asked / admitted."""
        return 1.0 if self.admitted is None else self.asked / self.admitted.sum(-1).clip(1)


class Exchange(NamedTuple):
    """The outcome of one exchange on the server.

    Attributes:
        request: sent to the cohort.
        admitted: a mask of the admitted replies, by position in the cohort.
        squares: squared norms of the replies, by position and leaf.
        refusals: the rejected replies.
        probed: the compared numbers of replies, if any.
        memory: the updated memory of the clients, by position; None for stateless clients, or if it
            is stored elsewhere.
        coded: bytes both ways, with codecs.
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
        """The factor of the weights of admitted replies: asked / admitted."""
        return len(self.admitted) / max(1, int(self.admitted.sum()))

    @property
    def mostly_oversized(self) -> bool:
        """Whether most rejected replies were too large or not finite."""
        rejected = ~self.admitted
        oversized = rejected & (self.squares.sum(1) != 0)
        return bool(2 * oversized.sum() > rejected.sum())

    @property
    def largest_sender(self) -> int:
        """The client with the largest message among those admitted, if there are any."""
        considered = self.admitted if self.admitted.any() else True
        totals = np.where(considered, np.nan_to_num(self.squares.sum(1), nan=np.inf), -1.0)
        return int(self.request.ids[np.argmax(totals)])
