"""The validation of replies before aggregation.

Every engine applies the same rules. A reply that violates one is rejected and recorded with its
client and the reason; the others are reweighted. Clients never send weights.
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
    """The settings of reply validation.

    Attributes:
        max_norm: the largest norm of a message, over all its arrays; None for any finite norm,
            "auto" for five times the median norm of recent exchanges with the same client step.
        min_replies: the minimum number of replies of an exchange; with fewer the run ends.
        open: admit all replies, because they are validated elsewhere.
    """

    max_norm: float | Literal["auto"] | None = None
    min_replies: int = 1
    open: bool = False


class Reply(NamedTuple):
    """A client's reply, before validation.

    Attributes:
        client: the client's number.
        exchange: the number of the exchange.
        arrays: the message, an array per leaf, by `names`; or its bytes, if it is coded.
        repeat: the number of earlier occurrences of the client in the cohort.
    """

    client: object
    exchange: object
    arrays: object
    repeat: object = 0


class Admitted(NamedTuple):
    """The admitted replies, and the refusals of all others.

    Attributes:
        messages: by position in the cohort; None without an admitted reply.
        squares: squared norms, by position and leaf; zero without a valid message.
        refusals: in the order of clients, missing replies last.
    """

    messages: list[Any]
    squares: np.ndarray
    refusals: list[Refusal]


Sender = tuple[int, int] | None  # client and repeat; None if unknown
Finding = tuple[Reason, str]  # the kind of refusal, and the reason in words
Decode = Callable[[int, bytes], dict[str, np.ndarray]]
_MARGIN, _RECENT = 5.0, 5


def admit(
    replies: Sequence[Any], request: Request, gate: Gate, decode: Decode | None = None
) -> Admitted:
    """Validate replies, independently of their order of arrival.

    Args:
        replies: arbitrary objects, in any order.
        request: sent to the cohort.
        gate: the settings.
        decode: (position, bytes) -> the message's arrays by name, for coded messages; raises
            `BadMessage`.

    Example:
        >>> request = Request(1, "step", np.array([3, 8]), {"y": np.zeros(2, "float32")})
        >>> fine = {"['y']": np.ones(2, "float32")}
        >>> admitted = admit([Reply(8, 1, fine), Reply(9, 1, fine)], request, Gate())
        >>> admitted.messages
        [None, {'y': array([1., 1.], dtype=float32)}]
        >>> [(refusal.client, refusal.text) for refusal in admitted.refusals]
        [(9, 'was not asked'), (3, 'did not reply')]
    """
    repeats, leaves = occurrences(request.ids).tolist(), names(request.like)
    senders = list(zip(request.ids.tolist(), repeats, strict=True))
    positions: dict[Sender, int] = {sender: j for j, sender in enumerate(senders)}
    messages: list[Any] = [None] * len(senders)
    squares = np.zeros((len(senders), len(leaves)))

    def is_timely(reply: object) -> bool:
        return isinstance(reply, Reply) and _whole(reply.exchange) == request.number

    counts = Counter(_sender(reply) for reply in replies if is_timely(reply))
    refused: list[tuple[int | None, Finding]] = []
    for reply in replies:
        sender, finding = _sender(reply), None
        position = positions.get(sender)
        if not isinstance(reply, Reply):
            finding = Reason.MALFORMED, f"sent a {type(reply).__name__}, which is no reply"
        elif position is None:
            finding = Reason.NOT_REQUESTED, Reason.NOT_REQUESTED.text
        elif not is_timely(reply):
            number = f"answered exchange {brief(reply.exchange)}, not {request.number}"
            finding = Reason.WRONG_EXCHANGE, number
        elif counts[sender] > 1:  # all duplicates are rejected, regardless of their order
            finding = Reason.DUPLICATE, Reason.DUPLICATE.text
        else:
            arrays, wrong = _decoded(reply.arrays, position, decode)
            if wrong := wrong or mismatch(arrays, request.like):
                finding = Reason.MALFORMED, wrong
            else:
                flat = [np.asarray(arrays[name]) for name in leaves]
                message = jax.tree.unflatten(jax.tree.structure(request.like), flat)
                squares[position] = np.asarray(squared_norms(message))
                finding = too_large(squares[position], leaves, gate)
                messages[position] = message if finding is None else None
        if finding is not None:
            client = _whole(reply.client) if isinstance(reply, Reply) else None
            refused.append((client, finding))
    refused.sort(key=lambda pair: (-1 if pair[0] is None else pair[0], pair[1][1]))
    missing = Reason.NO_REPLY, Reason.NO_REPLY.text
    refused += [(client, missing) for client, repeat in senders if (client, repeat) not in counts]
    refusals = [
        Refusal(request.number, request.client_step, client, *finding)
        for client, finding in refused
    ]
    return Admitted(messages, squares, refusals)


def _decoded(arrays: Any, position: int, decode: Decode | None) -> tuple[Any, str | None]:
    """Decode the arrays of a reply; return the error if that fails."""
    if decode is None:
        return arrays, None
    if not isinstance(arrays, bytes):
        return arrays, f"sent a {type(arrays).__name__} in place of a coded message"
    try:
        return decode(position, arrays), None
    except BadMessage as error:
        return arrays, f"sent {error}"


def squared_norms(message: PyTree) -> jax.Array:
    """Compute the squared norm of every leaf; not finite if the leaf is not, or on overflow."""
    wide = jnp.result_type(float)
    flat = [jnp.ravel(leaf).astype(wide) for leaf in jax.tree.leaves(message)]
    return jnp.stack([jnp.vdot(leaf, leaf) for leaf in flat]) if flat else jnp.zeros(0)


def within(squares: jax.Array, limit: Scalar | None) -> jax.Array:
    """Compare squared norms by leaf with the limit of the norm, which may be infinite.

    With a limit of None all messages pass. `too_large` returns the reason for a rejection.
    """
    total = jnp.sum(squares)
    if limit is None:
        return jnp.ones((), bool)
    return jnp.isfinite(total) & (jnp.sqrt(total) <= limit)


def limit_of(gate: Gate) -> float | None:
    """Return the limit of a gate without an automatic one; None if it is open."""
    if gate.open:
        return None
    assert gate.max_norm != "auto", "the automatic limit differs between exchanges"
    return np.inf if gate.max_norm is None else gate.max_norm


def median_norm(squares: np.ndarray) -> float:
    """Compute the median norm of all finite replies, admitted or not; 0 if there are none."""
    totals = squares.sum(1)
    norms = np.sqrt(totals[np.isfinite(totals) & (totals > 0)])
    return float(np.median(norms)) if len(norms) else 0.0


def auto_limit(medians: Sequence[float]) -> float | None:
    """Return five times the largest of recent median norms; None if there are none yet.

    A minority of the clients cannot raise a median. With the largest median, messages can shrink
    and grow again.
    """
    return _MARGIN * max(medians) if medians else None


def with_median(medians: Sequence[float], median: float) -> list[float]:
    """Append a median norm to the recent ones, unless all messages were zero."""
    return [*medians, *([median] if median > 0 else [])][-_RECENT:]


def too_large(squares: np.ndarray, leaves: Sequence[str], gate: Gate) -> Finding | None:
    """Return the reason to reject a message with these squared norms; None if it passes."""
    if bool(within(jnp.asarray(squares, float), limit_of(gate))):
        return None
    for name, square in zip(leaves, squares, strict=True):
        if not np.isfinite(square):
            text = f"sent {name or 'a message'} that is not finite, or too large to measure"
            return Reason.NOT_FINITE, text
    norm = f"sent a message of norm {np.sqrt(squares.sum()):.3g}"
    return Reason.TOO_LARGE, f"{norm}, the limit is {gate.max_norm:g}"


def mismatch(arrays: object, like: PyTree) -> str | None:
    """Describe a mismatch of a reply's names, dtypes or shapes; None if they are as requested."""
    expected = dict(zip(names(like), jax.tree.leaves(like), strict=True))
    if not isinstance(arrays, dict):
        return f"sent a {type(arrays).__name__} in place of named arrays"
    if missing := [name for name in expected if name not in arrays]:
        return f"left out {missing[0] or 'its array'}"
    if extra := [name for name in arrays if name not in expected]:
        return f"sent {brief(extra[0])}, which was not asked for"
    for name, leaf in expected.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray | jax.Array):
            return f"sent a {type(array).__name__} for {name or 'its array'}"
        if array.dtype != leaf.dtype:
            return f"sent {array.dtype} numbers for {name or 'its array'}, not {leaf.dtype}"
        if array.shape != leaf.shape:
            return f"sent shape {array.shape} for {name or 'its array'}, not {leaf.shape}"
    return None


def occurrences(ids: np.ndarray) -> np.ndarray:
    """Number the occurrences of each id in a sorted array, from 0.

    Example:
        >>> occurrences(np.array([2, 5, 5, 5, 7])).tolist()
        [0, 0, 1, 2, 0]
    """
    return (np.arange(len(ids)) - np.searchsorted(ids, ids)).astype(np.int32)


def _sender(reply: object) -> Sender:
    if not isinstance(reply, Reply):
        return None
    client, repeat = _whole(reply.client), _whole(reply.repeat)
    return None if client is None or repeat is None else (client, repeat)


def _whole(value: object) -> int | None:
    """Convert an untrusted value to an int; None if it is not a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return int(value) if abs(int(value)) < 2**63 else None
