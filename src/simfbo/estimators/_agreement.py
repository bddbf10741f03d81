"""The exchanges of `FederatedTabular`: clients agree on kinds, categories, medians and scales.

All clients take part in all of them. Numbers are summed over the clients. What their columns hold
and their categories are gathered, so the server sees whose these are.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.data import federate
from simfbo.core.federation import Client, ClientStep
from simfbo.core.gate import Gate
from simfbo.core.ledger import Ledger
from simfbo.core.partition import Rows
from simfbo.core.problem import PyTree, Weighted
from simfbo.engines.simulated import SimulatedFederation
from simfbo.errors import TooFewReplies, UserError
from simfbo.estimators._columns import TEXT, Column
from simfbo.estimators._scaling import Units, units_of

Counts = Counter[str | None]  # rows by category; None: missing
_BITS, _DIGITS = 8, 8  # a double is eight digits of eight bits


class Kinds(NamedTuple):
    """What columns hold; in a message, what one client's columns hold.

    Attributes:
        kinds: [d], the union of the values' kinds.
        categories: [d], the most categories a client has.
        longest: [d], the bytes of the longest category.
    """

    kinds: Any
    categories: Any
    longest: Any


class Categories(NamedTuple):
    """A client's categories, padded to the size of the largest client's.

    Attributes:
        texts: [k, m, bytes], in UTF-8, by column; a message holds floats, which take two bytes.
        counts: [k, m], how many rows have each; 0 for padding.
        missing: [k], how many rows have none.
    """

    texts: Any
    counts: Any
    missing: Any


def local_counts(column: Column, parts: Rows) -> list[Counts]:
    """Count every client's own categories of a column; nothing is sent."""
    if not (column.kinds & TEXT).any():
        return [Counter() for _ in parts]
    texts = np.array(column.texts, object)
    return [Counter(texts[rows].tolist()) for rows in parts]


def agree_on_kinds(
    columns: Sequence[Column], counts: Sequence[Sequence[Counts]], parts: Rows, ledger: Ledger
) -> Kinds:
    """Find out what all clients' columns hold, in one exchange.

    Args:
        columns: of all clients.
        counts: the categories by column and client.
        parts: each client's rows.
        ledger: of what is sent.
    """
    flags = [[np.bitwise_or.reduce(column.kinds[rows]) for rows in parts] for column in columns]
    sizes = [[len(own.keys() - {None}) for own in column] for column in counts]
    longest = [[max(map(len, _encoded(own)), default=0) for own in column] for column in counts]
    sent = Kinds(*(np.array(part, np.float32).T for part in (flags, sizes, longest)))
    found = Kinds(*(part.astype(int) for part in _gathered(kinds, sent, ledger)))
    return Kinds(np.bitwise_or.reduce(found.kinds, 0), *(part.max(0) for part in found[1:]))


def agree_on_categories(
    counts: Sequence[Sequence[Counts]], size: int, longest: int, ledger: Ledger
) -> list[Counts]:
    """Count all clients' categories, in one exchange.

    Args:
        counts: the categories by column and client.
        size: the most categories of a client.
        longest: the bytes of the longest category.
        ledger: of what is sent.

    Returns:
        The counts over all clients, by column.
    """
    own = [_padded(column, size, longest) for column in zip(*counts, strict=True)]
    found = _gathered(categories, Categories(*map(np.stack, zip(*own, strict=True))), ledger)
    return [_union(Categories(*(part[:, k] for part in found))) for k in range(len(counts))]


def federated_numbers(numbers: np.ndarray, parts: Rows, ledger: Ledger) -> SimulatedFederation:
    """Return clients that hold rows of numbers.

    Args:
        numbers: [N, d]; NaN is missing.
        parts: each client's rows.
        ledger: of what they will send.
    """
    with jax.enable_x64(True):
        everyone = Gate(min_replies=len(parts))
        federation = SimulatedFederation(federate(numbers, parts, parts), gate=everyone)
    federation.ledger = ledger
    return federation


def agree_on_medians(federation: SimulatedFederation) -> np.ndarray:
    """Find the medians of the numbers that are not missing, exactly, in eight exchanges.

    The bits of doubles, read as integers, have the order of the numbers. In every exchange the
    clients count the next digit of their numbers that agree with the median so far.
    """
    width = federation.data.lower.samples.shape[1]
    found, rank = np.zeros((2, width), np.uint64), np.zeros((2, width))
    for digit in range(_DIGITS):
        shift = np.uint64(_BITS * (_DIGITS - 1 - digit))
        below = np.cumsum(_summed(federation, digits, {"found": found, "shift": shift}, False), 2)
        if not digit:  # of an even number of values, the median is the mean of two
            rank = np.stack([(below[0, :, -1] - 1) // 2, below[1, :, -1] // 2])
        own = (below <= rank[..., None]).sum(2)
        before = np.concatenate([np.zeros((2, width, 1)), below], 2)
        rank = rank - np.take_along_axis(before, own[..., None], 2)[..., 0]
        found = (found << np.uint64(_BITS)) | own.astype(np.uint64)
    return _doubles(found).mean(0)


def agree_on_means(federation: SimulatedFederation) -> np.ndarray:
    """Find the means of the numbers that are not missing, in one exchange."""
    share, total = _summed(federation, present_moments, ())
    return total / share


def agree_on_units(federation: SimulatedFederation, fill: np.ndarray) -> Units:
    """Find means and deviations of columns whose gaps are filled, in one exchange."""
    shift, square = _summed(federation, filled_moments, fill)
    return units_of(fill, shift, square, len(federation.data.lower.samples))


# What clients do in an exchange


def kinds(payload: PyTree, client: Client) -> PyTree:
    """Return what the client's columns hold."""
    return _only(client)


def categories(payload: PyTree, client: Client) -> PyTree:
    """Return the client's categories and their counts."""
    return _only(client)


def digits(payload: PyTree, client: Client) -> jax.Array:
    """Count the next digit of the numbers that begin with given ones.

    Args:
        payload: "found", the digits so far, of two numbers per column; "shift", the bits behind
            the next one.
        client: who counts.

    Returns:
        [2, d, 256], how many numbers have which digit.
    """
    rows, weights = _rows(client)
    keys = _keys(rows) >> payload["shift"]
    counted = ~jnp.isnan(rows) & (weights > 0)[:, None]
    digit = (keys & jnp.uint64(2**_BITS - 1)).astype(jnp.int32)

    def count(start: jax.Array) -> jax.Array:
        same = counted & (keys >> jnp.uint64(_BITS) == start)
        return jax.vmap(_histogram, 1)(digit, same.astype(rows.dtype))

    return jax.vmap(count)(payload["found"])


def present_moments(payload: PyTree, client: Client) -> tuple[jax.Array, jax.Array]:
    """Return the share of rows that are not missing, and the mean with zeros for the others."""
    rows, weights = _rows(client)
    missing = jnp.isnan(rows)
    return weights @ (~missing).astype(rows.dtype), weights @ jnp.where(missing, 0.0, rows)


def filled_moments(payload: PyTree, client: Client) -> tuple[jax.Array, jax.Array]:
    """Return means and mean squares of the columns minus what fills their gaps."""
    rows, weights = _rows(client)
    centred = jnp.where(jnp.isnan(rows), 0.0, rows - payload)
    return weights @ centred, weights @ centred**2


def _only(client: Client) -> PyTree:
    """Return the only sample of a client."""
    return jax.tree.map(lambda a: a[0], client.data.lower.full(client.data.client))


def _rows(client: Client) -> tuple[jax.Array, jax.Array]:
    """Return a client's rows and their weights, 0 for padding."""
    batch = client.data.lower.full(client.data.client)
    if isinstance(batch, Weighted):
        return batch.samples, batch.weights
    return batch, jnp.full(len(batch), 1 / len(batch))


def _histogram(digit: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.zeros(2**_BITS, weights.dtype).at[digit].add(weights)


_SIGN = np.uint64(2**63)


def _keys(numbers: jax.Array) -> jax.Array:
    """Return integers in the order of the numbers: all bits flipped, or only that of the sign."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint64)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _doubles(keys: np.ndarray) -> np.ndarray:
    """Return the numbers of `_keys`."""
    return np.where(keys >= _SIGN, keys ^ _SIGN, ~keys).view(float)


# What the server does


def _gathered(step: ClientStep, sent: Any, ledger: Ledger) -> Any:
    """Return what each client sends, along the first axis; it holds that and nothing else."""
    rows = list(np.arange(len(sent[0]))[:, None])
    with jax.enable_x64(True):
        federation = SimulatedFederation(federate(sent, rows, rows))
        federation.ledger = ledger
        found = federation.gather(step, (), federation.cohort(_key()), _key())
        return jax.tree.map(np.asarray, found)


def _summed(
    federation: SimulatedFederation, step: ClientStep, payload: PyTree, average: bool = True
) -> Any:
    """Return the mean over all rows, or the sum, of what clients send."""
    with jax.enable_x64(True):
        cohort = federation.cohort(_key())
        if not average:
            cohort = cohort._replace(weights=np.ones(federation.n))
        try:
            found = federation.sum(step, payload, cohort, _key())
        except TooFewReplies:  # a message was not finite
            raise UserError("X holds numbers too large to be squared: rescale them.") from None
        return jax.tree.map(np.asarray, found)


def _key() -> jax.Array:
    """Return any key: nothing is drawn, all clients reply."""
    return jax.random.key(0)


def _padded(counts: Sequence[Counts], size: int, longest: int) -> Categories:
    """Return a client's categories of some columns as arrays."""
    texts, rows = np.zeros((len(counts), size, longest)), np.zeros((len(counts), size))
    for k, own in enumerate(counts):
        for m, (text, count) in enumerate(_encoded(own).items()):
            texts[k, m, : len(text)], rows[k, m] = np.frombuffer(text, np.uint8), count
    return Categories(
        texts.astype(np.float16), rows, np.array([own[None] for own in counts], float)
    )


def _encoded(counts: Counts) -> dict[bytes, int]:
    """Return categories as bytes, sorted, so that their order tells nothing of the rows."""
    known = ((text, count) for text, count in counts.items() if text is not None)
    return {text.encode("utf-8", "surrogatepass"): count for text, count in sorted(known)}


def _union(sent: Categories) -> Counts:
    """Return the counts of a column's categories over all clients."""
    total: Counts = Counter({None: int(sent.missing.sum())})
    for client, m in np.argwhere(sent.counts):
        text = sent.texts[client, m].astype(np.uint8).tobytes().rstrip(b"\0")
        total[text.decode("utf-8", "surrogatepass")] += int(sent.counts[client, m])
    return +total
