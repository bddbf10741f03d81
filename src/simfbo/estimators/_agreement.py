"""The exchanges of `FederatedTabular`: clients agree on kinds, categories, medians and scales.

All clients take part in all of them. Numbers are summed over the clients. Kinds and categories are
gathered, so that the server learns those of each client.
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
    """The kinds of columns, over all clients or, in a message, of one client.

    Attributes:
        kinds: [d], the union of the values' kinds.
        categories: [d], the largest number of categories of a client.
        longest: [d], the bytes of the longest category.
    """

    kinds: Any
    categories: Any
    longest: Any


class Categories(NamedTuple):
    """A client's categories, padded to the size of the largest client's.

    Attributes:
        texts: [k, m, bytes], in UTF-8, by column; in a message as floats of two bytes.
        counts: [k, m], the number of rows by category; 0 for padding.
        missing: [k], the number of rows with a missing value.
    """

    texts: Any
    counts: Any
    missing: Any


def local_counts(column: Column, parts: Rows) -> list[Counts]:
    """Count the categories of a column on every client, without an exchange."""
    if not (column.kinds & TEXT).any():
        return [Counter() for _ in parts]
    texts = np.array(column.texts, object)
    return [Counter(texts[rows].tolist()) for rows in parts]


def agree_on_kinds(
    columns: Sequence[Column], counts: Sequence[Sequence[Counts]], parts: Rows, ledger: Ledger
) -> Kinds:
    """Agree on the kinds of columns in one exchange.

    Args:
        columns: of all clients.
        counts: the categories by column and client.
        parts: each client's rows.
        ledger: records the exchange.
    """
    flags = [[np.bitwise_or.reduce(column.kinds[rows]) for rows in parts] for column in columns]
    sizes = [[len(client.keys() - {None}) for client in column] for column in counts]
    longest = [
        [max(map(len, _encoded(client)), default=0) for client in column] for column in counts
    ]
    sent = Kinds(*(np.array(field, np.float32).T for field in (flags, sizes, longest)))
    received = Kinds(*(field.astype(int) for field in _gathered(kinds, sent, ledger)))
    return Kinds(np.bitwise_or.reduce(received.kinds, 0), *(f.max(0) for f in received[1:]))


def agree_on_categories(
    counts: Sequence[Sequence[Counts]], size: int, longest: int, ledger: Ledger
) -> list[Counts]:
    """Count all clients' categories, in one exchange.

    Args:
        counts: the categories by column and client.
        size: the largest number of categories of a client.
        longest: the bytes of the longest category.
        ledger: records the exchange.

    Returns:
        The counts over all clients, by column.
    """
    messages = [_padded(client, size, longest) for client in zip(*counts, strict=True)]
    sent = Categories(*map(np.stack, zip(*messages, strict=True)))
    received = _gathered(categories, sent, ledger)
    return [_union(Categories(*(field[:, k] for field in received))) for k in range(len(counts))]


def federated_numbers(numbers: np.ndarray, parts: Rows, ledger: Ledger) -> SimulatedFederation:
    """Create a federation of clients with rows of numbers.

    Args:
        numbers: [N, d]; NaN is missing.
        parts: each client's rows.
        ledger: records the exchanges.
    """
    with jax.enable_x64(True):
        everyone = Gate(min_replies=len(parts))
        federation = SimulatedFederation(federate(numbers, parts, parts), gate=everyone)
    federation.ledger = ledger
    return federation


def agree_on_medians(federation: SimulatedFederation) -> np.ndarray:
    """Compute the exact medians, without missing values, in eight exchanges.

    The bits of doubles, read as integers, have the order of the numbers. The medians are found by
    radix selection: in every exchange the clients count the next digits of their numbers with the
    digits found so far.
    """
    width = federation.data.lower.samples.shape[1]
    prefix, rank = np.zeros((2, width), np.uint64), np.zeros((2, width))
    for place in range(_DIGITS):
        shift = np.uint64(_BITS * (_DIGITS - 1 - place))
        counts = _summed(federation, digits, {"found": prefix, "shift": shift}, False)
        cumulative = np.cumsum(counts, 2)
        if not place:  # the median of an even number of values is the mean of two
            total = cumulative[..., -1]
            rank = np.stack([(total[0] - 1) // 2, total[1] // 2])
        digit = (cumulative <= rank[..., None]).sum(2)
        smaller = np.concatenate([np.zeros((2, width, 1)), cumulative], 2)
        rank = rank - np.take_along_axis(smaller, digit[..., None], 2)[..., 0]
        prefix = (prefix << np.uint64(_BITS)) | digit.astype(np.uint64)
    return _doubles(prefix).mean(0)


def agree_on_means(federation: SimulatedFederation) -> np.ndarray:
    """Compute the means, without missing values, in one exchange."""
    share, total = _summed(federation, present_moments, ())
    return total / share


def agree_on_units(federation: SimulatedFederation, fill: np.ndarray) -> Units:
    """Compute means and deviations of imputed columns in one exchange."""
    shift, square = _summed(federation, filled_moments, fill)
    return units_of(fill, shift, square, len(federation.data.lower.samples))


# Client steps


def kinds(payload: PyTree, client: Client) -> PyTree:
    """Return the kinds of the client's columns."""
    return _only_sample(client)


def categories(payload: PyTree, client: Client) -> PyTree:
    """Return the client's categories and their counts."""
    return _only_sample(client)


def digits(payload: PyTree, client: Client) -> jax.Array:
    """Count the next digits of the numbers with a prefix.

    Args:
        payload: "found", the prefixes of two numbers per column; "shift", the number of bits after
            the next digit.
        client: its data.

    Returns:
        [2, d, 256], the counts by digit.
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
    """Return the share of rows with a value, and the mean with zeros for missing values."""
    rows, weights = _rows(client)
    missing = jnp.isnan(rows)
    return weights @ (~missing).astype(rows.dtype), weights @ jnp.where(missing, 0.0, rows)


def filled_moments(payload: PyTree, client: Client) -> tuple[jax.Array, jax.Array]:
    """Return means and mean squares of the imputed columns relative to the imputed values."""
    rows, weights = _rows(client)
    centred = jnp.where(jnp.isnan(rows), 0.0, rows - payload)
    return weights @ centred, weights @ centred**2


def _only_sample(client: Client) -> PyTree:
    return jax.tree.map(lambda a: a[0], client.data.lower.full(client.data.client))


def _rows(client: Client) -> tuple[jax.Array, jax.Array]:
    """Return a client's rows and their weights, which are 0 for padding."""
    batch = client.data.lower.full(client.data.client)
    if isinstance(batch, Weighted):
        return batch.samples, batch.weights
    return batch, jnp.full(len(batch), 1 / len(batch))


def _histogram(digit: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.zeros(2**_BITS, weights.dtype).at[digit].add(weights)


_SIGN = np.uint64(2**63)


def _keys(numbers: jax.Array) -> jax.Array:
    """Map doubles to integers of the same order: flip all bits, or that of the sign only."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint64)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _doubles(keys: np.ndarray) -> np.ndarray:
    """Invert `_keys`."""
    return np.where(keys >= _SIGN, keys ^ _SIGN, ~keys).view(float)


# Exchanges


def _gathered(step: ClientStep, sent: Any, ledger: Ledger) -> Any:
    """Gather one message per client, stacked along the first axis."""
    rows = list(np.arange(len(sent[0]))[:, None])
    with jax.enable_x64(True):
        federation = SimulatedFederation(federate(sent, rows, rows))
        federation.ledger = ledger
        received = federation.gather(step, (), federation.cohort(_key()), _key())
        return jax.tree.map(np.asarray, received)


def _summed(
    federation: SimulatedFederation, step: ClientStep, payload: PyTree, average: bool = True
) -> Any:
    """Return the mean over all rows, or the sum over clients, of the replies."""
    with jax.enable_x64(True):
        cohort = federation.cohort(_key())
        if not average:
            cohort = cohort._replace(weights=np.ones(federation.n))
        try:
            result = federation.sum(step, payload, cohort, _key())
        except TooFewReplies:  # a message was not finite
            raise UserError("X holds numbers too large to be squared: rescale them.") from None
        return jax.tree.map(np.asarray, result)


def _key() -> jax.Array:
    """Return an unused key: these exchanges have no random draws."""
    return jax.random.key(0)


def _padded(counts: Sequence[Counts], size: int, longest: int) -> Categories:
    """Encode a client's categories of some columns as arrays."""
    texts, rows = np.zeros((len(counts), size, longest)), np.zeros((len(counts), size))
    for k, column in enumerate(counts):
        for m, (text, count) in enumerate(_encoded(column).items()):
            texts[k, m, : len(text)], rows[k, m] = np.frombuffer(text, np.uint8), count
    missing = np.array([column[None] for column in counts], float)
    return Categories(texts.astype(np.float16), rows, missing)


def _encoded(counts: Counts) -> dict[bytes, int]:
    """Encode categories as bytes, sorted, so that their order does not reveal that of the rows."""
    present = ((text, count) for text, count in counts.items() if text is not None)
    return {text.encode("utf-8", "surrogatepass"): count for text, count in sorted(present)}


def _union(received: Categories) -> Counts:
    """Add up the counts of a column's categories over all clients."""
    total: Counts = Counter({None: int(received.missing.sum())})
    for client, m in np.argwhere(received.counts):
        text = received.texts[client, m].astype(np.uint8).tobytes().rstrip(b"\0")
        total[text.decode("utf-8", "surrogatepass")] += int(received.counts[client, m])
    return +total
