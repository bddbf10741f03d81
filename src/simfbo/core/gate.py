"""The gate before aggregation: the rules that a reply must satisfy to count.

Every engine applies the same rules. A reply that breaks one is left out and recorded with its
client and the reason; the others are reweighted. A weight never comes from a client.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.exchange import Reason, Refusal, Request
from simfbo.core.problem import PyTree, Scalar
from simfbo.core.trees import names
from simfbo.errors import BadMessage, brief


class Gate(NamedTuple):
    """The rules that a reply must satisfy to count, as far as they can be set.

    Attributes:
        max_norm: the largest norm of a message, over all its arrays; None for any finite norm,
            "auto" for five times the median norm of recent exchanges with the same client step.
        min_replies: the fewest replies that an exchange needs; with fewer the run ends.
        open: let everything pass, because another gate follows.
    """

    max_norm: float | Literal["auto"] | None = None
    min_replies: int = 1
    open: bool = False


class Reply(NamedTuple):
    """What arrives from a client; nothing in it is trusted.

    Attributes:
        client: who sends it.
        exchange: the number of the exchange it answers.
        arrays: the message, an array per leaf, by `names`; or its bytes, if it is coded.
        repeat: which of the client's draws it answers, where a cohort holds the client twice.
    """

    client: object
    exchange: object
    arrays: object
    repeat: object = 0


class Admitted(NamedTuple):
    """What passed the gate.

    Attributes:
        messages: by position in the cohort; None where no reply counts.
        squares: squared norms, by position and leaf; zero where there was nothing to measure.
        refusals: what did not pass.
    """

    messages: list[Any]
    squares: np.ndarray
    refusals: list[Refusal]


Sender = tuple[int, int] | None  # client and repeat; None where they are unknown
_MARGIN, _RECENT = 5.0, 5
Finding = tuple[Reason, str]  # why a reply does not count, and the same in words
Decode = Callable[[int, bytes], dict[str, np.ndarray]]


def admit(
    replies: Sequence[Any], request: Request, gate: Gate, decode: Decode | None = None
) -> Admitted:
    """Return the messages that count, in the order of the cohort whatever the order of arrival.

    Args:
        replies: whatever arrived.
        request: what the cohort was sent.
        gate: the rules.
        decode: (position, bytes) -> the message's arrays by name, where messages are coded; raises
            `BadMessage`.

    Returns:
        The messages by position, and the refusals.

    Example:
        >>> request = Request(1, "step", np.array([3, 8]), {"y": np.zeros(2, "float32")})
        >>> fine = {"['y']": np.ones(2, "float32")}
        >>> admitted = admit([Reply(8, 1, fine), Reply(9, 1, fine)], request, Gate())
        >>> admitted.messages
        [None, {'y': array([1., 1.], dtype=float32)}]
        >>> [(refusal.client, refusal.text) for refusal in admitted.refusals]
        [(9, 'was not asked'), (3, 'did not reply')]
    """
    positions: dict[Sender, int] = {sender: j for j, sender in enumerate(_senders(request.ids))}
    counts = Counter(_sender(reply) for reply in replies if _is_timely(reply, request))
    messages: list[Any] = [None] * len(request.ids)
    squares = np.zeros((len(request.ids), len(names(request.like))))
    refused: list[tuple[int | None, Finding]] = []
    silent = dict(positions)
    for reply in replies:
        position = positions.get(_sender(reply))
        finding = _stray(reply, request, position, counts)
        if finding is None and position is not None:
            arrays, wrong = _opened(reply.arrays, position, decode)
            if wrong := wrong or mismatch(arrays, request.like):
                finding = Reason.MALFORMED, wrong
            else:
                message = _rebuilt(arrays, request.like)
                squares[position] = np.asarray(squared_norms(message))
                finding = too_large(squares[position], names(request.like), gate)
                messages[position] = message if finding is None else None
        if position is not None and _is_timely(reply, request):
            silent.pop(_sender(reply), None)
        if finding is not None:
            refused.append((_client(reply), finding))
    order = sorted(refused, key=lambda pair: (-1 if pair[0] is None else pair[0], pair[1][1]))
    missing = Reason.NO_REPLY, Reason.NO_REPLY.text
    order += [(sender[0], missing) for sender in silent if sender is not None]
    refusals = [
        Refusal(request.number, request.client_step, client, *finding) for client, finding in order
    ]
    return Admitted(messages, squares, refusals)


def _opened(arrays: Any, position: int, decode: Decode | None) -> tuple[Any, str | None]:
    """Return the arrays of a reply and, if they cannot be decoded, why not."""
    if decode is None:
        return arrays, None
    if not isinstance(arrays, bytes):
        return arrays, f"sent a {type(arrays).__name__} in place of a coded message"
    try:
        return decode(position, arrays), None
    except BadMessage as error:
        return arrays, f"sent {error}"


def squared_norms(message: PyTree) -> jax.Array:
    """Return the squared norm of every leaf; not finite where the leaf is not, or overflows."""
    wide = jnp.result_type(float)
    flat = [jnp.ravel(leaf).astype(wide) for leaf in jax.tree.leaves(message)]
    return jnp.stack([jnp.vdot(leaf, leaf) for leaf in flat]) if flat else jnp.zeros(0)


def within(squares: jax.Array, limit: Scalar | None) -> jax.Array:
    """Return whether a message of these squared norms passes; `too_large` says why not.

    Args:
        squares: by leaf.
        limit: the largest norm, which may be infinite; None lets everything pass.
    """
    total = jnp.sum(squares)
    if limit is None:
        return jnp.ones((), bool)
    return jnp.isfinite(total) & (jnp.sqrt(total) <= limit)


def limit_of(gate: Gate) -> float | None:
    """Return the largest norm that passes a gate whose limit is a number; None if it is open."""
    if gate.open:
        return None
    assert gate.max_norm != "auto", "a limit of its own for every exchange"
    return np.inf if gate.max_norm is None else gate.max_norm


def median_norm(squares: np.ndarray) -> float:
    """Return the median norm of all finite replies, admitted or not; 0 if there is none."""
    totals = squares.sum(1)
    norms = np.sqrt(totals[np.isfinite(totals) & (totals > 0)])
    return float(np.median(norms)) if len(norms) else 0.0


def auto_limit(medians: Sequence[float]) -> float | None:
    """Return five times the largest of recent median norms; None if there is none yet.

    A median, so that less than half of the clients cannot raise it; the largest, so that messages
    may shrink and grow again.
    """
    return _MARGIN * max(medians) if medians else None


def with_median(medians: Sequence[float], median: float) -> list[float]:
    """Return the recent median norms with another one; messages that are all zero say nothing."""
    return [*medians, *([median] if median > 0 else [])][-_RECENT:]


def too_large(squares: np.ndarray, leaves: Sequence[str], gate: Gate) -> Finding | None:
    """Return why a message of these squared norms does not pass; None where it does."""
    if bool(within(jnp.asarray(squares, float), limit_of(gate))):
        return None
    for name, square in zip(leaves, squares, strict=True):
        if not np.isfinite(square):
            text = f"sent {name or 'a message'} that is not finite, or too large to measure"
            return Reason.NOT_FINITE, text
    norm = f"sent a message of norm {np.sqrt(squares.sum()):.3g}"
    return Reason.TOO_LARGE, f"{norm}, the limit is {gate.max_norm:g}"


def mismatch(arrays: object, like: PyTree) -> str | None:
    """Return how a reply's arrays differ in kind from what was asked for; None where not."""
    expected = dict(zip(names(like), jax.tree.leaves(like), strict=True))
    if not isinstance(arrays, dict):
        return f"sent a {type(arrays).__name__} in place of named arrays"
    if missing := [name for name in expected if name not in arrays]:
        return f"left out {missing[0] or 'its array'}"
    if extra := [name for name in arrays if name not in expected]:
        return f"sent {brief(extra[0])}, which was not asked for"
    for name, leaf in expected.items():
        found = arrays[name]
        if not isinstance(found, np.ndarray | jax.Array):
            return f"sent a {type(found).__name__} for {name or 'its array'}"
        if found.dtype != leaf.dtype:
            return f"sent {found.dtype} numbers for {name or 'its array'}, not {leaf.dtype}"
        if found.shape != leaf.shape:
            return f"sent shape {found.shape} for {name or 'its array'}, not {leaf.shape}"
    return None


def occurrences(ids: np.ndarray) -> np.ndarray:
    """Return how often each id of the sorted array stood before it, so that repeats differ.

    Example:
        >>> occurrences(np.array([2, 5, 5, 5, 7])).tolist()
        [0, 0, 1, 2, 0]
    """
    return (np.arange(len(ids)) - np.searchsorted(ids, ids)).astype(np.int32)


def _stray(
    reply: object, request: Request, position: int | None, counts: Counter[Sender]
) -> Finding | None:
    """Return why a reply does not belong to this exchange; None where it does."""
    if not isinstance(reply, Reply):
        return Reason.MALFORMED, f"sent a {type(reply).__name__}, which is no reply"
    if position is None:
        return Reason.NOT_REQUESTED, Reason.NOT_REQUESTED.text
    if not _is_timely(reply, request):
        number = f"answered exchange {brief(reply.exchange)}, not {request.number}"
        return Reason.WRONG_EXCHANGE, number
    # Which of them arrived first must not matter, so all are discarded.
    return (Reason.DUPLICATE, Reason.DUPLICATE.text) if counts[_sender(reply)] > 1 else None


def _is_timely(reply: object, request: Request) -> bool:
    """Return whether a reply says that it answers this exchange."""
    return isinstance(reply, Reply) and _whole(reply.exchange) == request.number


def _client(reply: object) -> int | None:
    """Return who sent a reply, as far as it says."""
    return _whole(reply.client) if isinstance(reply, Reply) else None


def _sender(reply: object) -> Sender:
    """Return client and repeat of a reply, as far as it says."""
    if not isinstance(reply, Reply):
        return None
    client, repeat = _whole(reply.client), _whole(reply.repeat)
    return None if client is None or repeat is None else (client, repeat)


def _whole(value: object) -> int | None:
    """Return an untrusted value as a whole number; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return int(value) if abs(int(value)) < 2**63 else None


def _senders(ids: np.ndarray) -> list[Sender]:
    """Return client and repeat at every position of a cohort."""
    return list(zip(ids.tolist(), occurrences(ids).tolist(), strict=True))


def _rebuilt(arrays: dict[str, Any], like: PyTree) -> PyTree:
    """Return the message that the arrays make up."""
    leaves = [np.asarray(arrays[name]) for name in names(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
