"""The gate before aggregation: what a reply must be like to count.

Every engine applies the same rules. A reply that breaks one is left out and written down with its
client and the reason; those left are weighed again. A weight never comes from a client.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.config.messages import brief
from simfbo.core.problem import PyTree


class Gate(NamedTuple):
    """The rules that can be set.

    Attributes:
        max_norm: the largest norm of a message, all its arrays together; None for any finite one.
        min_replies: the fewest replies an exchange needs; with less the run ends.
        open: let everything pass, where another gate comes later.
    """

    max_norm: float | None = None
    min_replies: int = 1
    open: bool = False


class Asked(NamedTuple):
    """What was asked in one exchange.

    Attributes:
        number: of the exchange, counted from 1.
        work: the name of the work.
        ids: the clients asked, ascending; one that is drawn twice stands here twice.
        like: a message as it should be; its leaves may be abstract.
    """

    number: int
    work: str
    ids: np.ndarray
    like: PyTree


class Reply(NamedTuple):
    """What arrives from a client: nothing in it is trusted.

    Attributes:
        client: who sends it.
        exchange: the number of the exchange it answers.
        arrays: the message, an array per leaf, by `names`.
        repeat: which of the client's draws it answers, where a cohort holds it several times.
    """

    client: Any
    exchange: Any
    arrays: Any
    repeat: Any = 0


class Refusal(NamedTuple):
    """A reply that does not count: in which exchange, to which work, whose, and why."""

    exchange: int
    work: str
    client: int | None
    reason: str


class Admitted(NamedTuple):
    """What passed the gate.

    Attributes:
        messages: by place in the cohort; None where no reply counts.
        squares: squared norms, by place and leaf; zero where there was nothing to measure.
        refusals: what did not pass.
    """

    messages: list[Any]
    squares: np.ndarray
    refusals: list[Refusal]


NO_REPLY = "did not reply"
AT_THE_LIMIT = "sent a message of just the largest norm"  # compiled sums round in another way
Sender = tuple[int, int] | None  # client and repeat; None where they cannot be told


def admit(replies: Sequence[Any], asked: Asked, gate: Gate) -> Admitted:
    """Return the messages that count, in the order of the cohort whatever the order of arrival.

    Args:
        replies: whatever arrived.
        asked: what was asked, and of whom.
        gate: the rules.

    Returns:
        The messages by place, and the refusals.

    Example:
        >>> asked = Asked(1, "work", np.array([3, 8]), {"y": np.zeros(2, "float32")})
        >>> fine = {"['y']": np.ones(2, "float32")}
        >>> admitted = admit([Reply(8, 1, fine), Reply(9, 1, fine)], asked, Gate())
        >>> admitted.messages
        [None, {'y': array([1., 1.], dtype=float32)}]
        >>> [(refusal.client, refusal.reason) for refusal in admitted.refusals]
        [(9, 'was not asked'), (3, 'did not reply')]
    """
    places: dict[Sender, int] = {place: j for j, place in enumerate(_places(asked.ids))}
    senders = Counter(_sender(reply) for reply in replies if _is_timely(reply, asked))
    messages: list[Any] = [None] * len(asked.ids)
    squares = np.zeros((len(asked.ids), len(names(asked.like))))
    refused: list[tuple[int | None, str]] = []
    silent = dict(places)
    for reply in replies:
        place = places.get(_sender(reply))
        reason = _stray(reply, asked, place, senders)
        if reason is None and place is not None:
            reason = mismatch(reply.arrays, asked.like)
            if reason is None:
                message = _rebuilt(reply.arrays, asked.like)
                squares[place] = np.asarray(squared_norms(message))
                reason = too_large(squares[place], names(asked.like), gate)
                messages[place] = message if reason is None else None
        if place is not None and _is_timely(reply, asked):
            silent.pop(_sender(reply), None)
        if reason is not None:
            refused.append((_client(reply), reason))
    order = sorted(refused, key=lambda pair: (-1 if pair[0] is None else pair[0], pair[1]))
    order += [(sender[0], NO_REPLY) for sender in silent if sender is not None]
    return Admitted(messages, squares, [Refusal(asked.number, asked.work, *one) for one in order])


def names(message: PyTree) -> list[str]:
    """Return the names of a message's arrays on the wire.

    Example:
        >>> from simfbo.core.problem import Point
        >>> names(Point(x={"w": 1.0}, y=2.0))
        [".x['w']", '.y']
    """
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(message)]


def as_arrays(message: PyTree) -> dict[str, np.ndarray]:
    """Return a message as it travels: arrays by name."""
    return dict(zip(names(message), map(np.asarray, jax.tree.leaves(message)), strict=True))


def squared_norms(message: PyTree) -> jax.Array:
    """Return the squared norm of every leaf; not finite where the leaf is not, or overflows."""
    wide = jnp.result_type(float)
    flat = [jnp.ravel(leaf).astype(wide) for leaf in jax.tree.leaves(message)]
    return jnp.stack([jnp.vdot(leaf, leaf) for leaf in flat]) if flat else jnp.zeros(0)


def within(squares: jax.Array, gate: Gate) -> jax.Array:
    """Return whether a message of these squared norms passes; `too_large` says why not."""
    total = jnp.sum(squares)
    if gate.open:
        return jnp.ones((), bool)
    limit = np.inf if gate.max_norm is None else gate.max_norm
    return jnp.isfinite(total) & (jnp.sqrt(total) <= limit)


def too_large(squares: np.ndarray, leaves: Sequence[str], gate: Gate) -> str | None:
    """Return why a message of these squared norms does not pass; None where it does."""
    if bool(within(jnp.asarray(squares, float), gate)):
        return None
    for name, square in zip(leaves, squares, strict=True):
        if not np.isfinite(square):
            return f"sent {name or 'a message'} that is not finite, or too large to measure"
    return f"sent a message of norm {np.sqrt(squares.sum()):.3g}, the limit is {gate.max_norm:g}"


def mismatch(arrays: Any, like: PyTree) -> str | None:
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


def _stray(reply: Any, asked: Asked, place: int | None, senders: Counter[Sender]) -> str | None:
    """Return why a reply has no place in this exchange; None where it has."""
    if not isinstance(reply, Reply):
        return f"sent a {type(reply).__name__}, which is no reply"
    if place is None:
        return "was not asked"
    if not _is_timely(reply, asked):
        return f"answered exchange {brief(reply.exchange)}, not {asked.number}"
    # Which of them came first must not matter, so none counts.
    return "replied more than once" if senders[_sender(reply)] > 1 else None


def _is_timely(reply: Any, asked: Asked) -> bool:
    """Return whether a reply says that it answers this exchange."""
    return isinstance(reply, Reply) and _is_whole(reply.exchange) and reply.exchange == asked.number


def _client(reply: Any) -> int | None:
    """Return who sent a reply, as far as that can be told."""
    return int(reply.client) if isinstance(reply, Reply) and _is_whole(reply.client) else None


def _sender(reply: Any) -> Sender:
    """Return client and repeat of a reply, as far as they can be told."""
    client = _client(reply)
    return None if client is None or not _is_whole(reply.repeat) else (client, int(reply.repeat))


def _is_whole(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and abs(int(value)) < 2**63


def _places(ids: np.ndarray) -> list[Sender]:
    """Return client and repeat at every place of a cohort."""
    return list(zip(ids.tolist(), occurrences(ids).tolist(), strict=True))


def _rebuilt(arrays: dict[str, Any], like: PyTree) -> Any:
    """Return the message that the arrays make up."""
    leaves = [np.asarray(arrays[name]) for name in names(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
