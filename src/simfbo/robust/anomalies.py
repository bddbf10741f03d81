"""What stands out among the messages of an exchange: their norms and directions, watched over time.

Nothing here changes a result. An exchange is looked at in the order of its number, each look finds
the clients that stand out, and what stands out in most looks becomes a `Suspicion`. Directions are
compared on a `Probe`: a fixed choice of a message's numbers, the same in every engine and run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.exchange import Exchange, Probed, Reason, Request
from simfbo.core.problem import CHANNELS, PyTree, channel
from simfbo.robust._suspicion import Kind, Suspicion, text_of

Memory = dict[str, Any]  # JSON values

EVERY_ONE, THEN_EVERY = 32, 13  # exchanges: all of the first, then one in thirteen
RARER = 1024  # from which on it is one in twice as many, with every doubling
ALARM = 8  # looks that found something, less those that did not
AGAIN = 3  # suspicions of one kind in a run, at most

OUTLIER, MOST = 5.0, 0.8  # times the median norm; of the sum of norms
OPPOSED, AGAINST, AGREE = -0.8, -0.3, 0.1  # cosines
CANCEL = 0.25  # norm of the sum over the sum of norms
EQUAL = 1e-3  # relative distance
FEWEST, WIDE = 6, 64  # clients and numbers below which cosines say nothing
SMALL = 20  # clients in a cohort whose pairs are compared
NARROW = 8  # numbers below which equality says nothing
_COMPARED, _NUMBERS, _SEED = 64, 2**13, 16
_NOTHING: Memory = {"score": 0, "seen": {}, "said": []}


class Probe(NamedTuple):
    """Which numbers of a message are compared.

    Attributes:
        leaves: channel after channel: the number of a leaf, and positions in it when it is flat.
        widths: how many numbers of each channel that are.
    """

    leaves: tuple[tuple[int, np.ndarray], ...]
    widths: tuple[int, ...]


def probe_of(message: PyTree, clients: int) -> Probe:
    """Return the probe for messages like this in cohorts of this size.

    Args:
        message: an example; its leaves may be abstract. Numbers outside of the channels are left
            out, unless there are no others.
        clients: the size of the cohort: the more there are, the fewer numbers of each are kept.
    """
    leaves = jax.tree.leaves_with_path(message)
    sizes = tuple((channel(path), math.prod(leaf.shape)) for path, leaf in leaves)
    return _probe(sizes, int(np.clip(_NUMBERS // max(1, clients), 64, 256)))


@lru_cache(maxsize=256)
def _probe(sizes: tuple[tuple[str | None, int], ...], most: int) -> Probe:
    """Return the probe for leaves of these channels and sizes, with `most` numbers per channel."""
    found: list[tuple[int, np.ndarray]] = []
    widths: list[int] = []
    for name in CHANNELS if any(of for of, _ in sizes) else (None,):
        own = [j for j, (of, size) in enumerate(sizes) if of == name and size]
        ends = np.cumsum([0, *(sizes[j][1] for j in own)])
        chosen = np.arange(ends[-1])
        if len(chosen) > most:
            chosen = np.sort(np.random.default_rng(_SEED).choice(len(chosen), most, replace=False))
        for j, (start, end) in zip(own, pairwise(ends.tolist()), strict=True):
            found.append((j, chosen[(chosen >= start) & (chosen < end)] - start))
        widths += [len(chosen)] if own else []
    return Probe(tuple(found), tuple(widths))


def take(probe: Probe, message: PyTree) -> jax.Array:
    """Return the probed numbers of a message, channel after channel."""
    leaves, wide = [jnp.ravel(leaf) for leaf in jax.tree.leaves(message)], jnp.result_type(float)
    chosen = [(leaves[j], at) for j, at in probe.leaves]
    parts = [(leaf if len(at) == leaf.size else leaf[at]).astype(wide) for leaf, at in chosen]
    return jnp.concatenate(parts) if parts else jnp.zeros(0, wide)


def probed(messages: Sequence[PyTree | None], request: Request) -> Probed | None:
    """Return the probed numbers of messages; None where nobody looks at them.

    Args:
        messages: by position in the cohort; None, which gives zeros, where no reply counts.
        request: what they answer.
    """
    if not looks_at(request.number):
        return None
    probe = probe_of(request.like, len(messages))
    positions = window(len(messages), request.number)
    rows = np.zeros((len(positions), sum(probe.widths)))
    for row, j in zip(rows, positions.tolist(), strict=True):
        if (message := messages[j]) is not None:
            row[:] = np.asarray(take(probe, message))
    return Probed(rows, probe.widths)


def compared(clients: int) -> int:
    """Return how many messages of a cohort are compared in one exchange."""
    return min(clients, _COMPARED)


def window(clients: int, number: Any) -> Any:
    """Return the positions to compare pair by pair; in a large cohort, other ones every time."""
    places = np.arange(compared(clients), dtype=np.int32)
    return (window_start(clients, number) + places) % max(1, clients)


def window_start(clients: int, number: Any) -> Any:
    """Return the first of the positions to compare in the exchange of this number."""
    return _COMPARED * (number % clients) % clients if clients > _COMPARED else 0


def looks_at(number: Any) -> Any:
    """Return whether the exchange of this number, or each of these numbers, is looked at.

    Example:
        >>> [number for number in range(30, 60) if looks_at(number)]
        [30, 31, 32, 39, 52]
    """
    doublings = np.frexp(np.maximum(number, RARER) / RARER)[1] - 1
    return (number <= EVERY_ONE) | (number % (THEN_EVERY * 2**doublings) == 0)


def observe(
    memory: Memory, exchange: Exchange, detect: bool = True
) -> tuple[Memory, list[Suspicion]]:
    """Look at an exchange; return the new memory and the suspicions with enough evidence now.

    Messages that are not finite are reported in any case: no honest client sends them on purpose.

    Args:
        memory: what earlier exchanges left behind; it is not changed.
        exchange: the outcome of an exchange, with weights and work if messages are compared.
        detect: whether messages are compared.
    """
    after, told = _not_finite(memory, exchange)
    if not detect or not looks_at(exchange.request.number):
        return after, told
    weights, work = exchange.weights, exchange.work
    assert weights is not None
    assert work is not None
    for kind, look in _looks(exchange, weights, work).items():
        after[kind], named = _counted(memory.get(kind, _NOTHING), look)
        if after[kind] == _NOTHING:
            del after[kind]
        if named:
            told.append(_suspicion(kind, named, exchange, weights))
    return after, told


def _not_finite(memory: Memory, exchange: Exchange) -> tuple[Memory, list[Suspicion]]:
    """Name at once, and once, who sends what is not finite though others do not."""
    request, said = exchange.request, memory.get("not-finite", [])
    found = {one.client for one in exchange.refusals if one.reason == Reason.NOT_FINITE}
    found |= set(request.ids[~np.isfinite(exchange.squares).all(1)].tolist())  # a node refused it
    new = sorted(client for client in found if client is not None and client not in said)
    if not new or not exchange.admitted.any():
        return dict(memory), []
    text = text_of("not-finite", new, 0.0)
    told = Suspicion("not-finite", request.number, request.client_step, new, 0.0, text)
    return {**memory, "not-finite": [*said, *new]}, [told]


class Look(NamedTuple):
    """Who stands out in an exchange, and who takes part if each client is counted on its own."""

    clients: np.ndarray
    among: np.ndarray | None


def _looks(exchange: Exchange, weights: np.ndarray, work: np.ndarray) -> dict[Kind, Look]:
    """Return who stands out in an exchange, by kind."""
    here = exchange.admitted & (exchange.squares.sum(1) > 0)
    norms, ids = np.sqrt(exchange.squares[here].sum(1)), exchange.request.ids[here]
    large, refused = few(norms, np.abs(weights[here]) * norms, work[here]), _refused(exchange)
    found: dict[Kind, Look] = {
        "few": Look(ids[large], None),
        "refused": Look(refused, np.union1d(ids, refused)),
    }
    if exchange.probed is not None and exchange.probed.rows.shape[1] >= NARROW:
        rows, widths = exchange.probed
        some = window(len(here), exchange.request.number)
        rows, some = rows[here[some]], some[here[some]]
        among = exchange.request.ids[some]
        if not (max(widths) >= WIDE or _close(rows)):
            none = among[:0]
            return {**found, "opposed": Look(none, among), "same": Look(none, None)}
        grams = gram_matrices(rows, widths)
        # Noise opposes somebody in every exchange, but not the same clients.
        found["opposed"] = Look(among[opposed(grams, widths, weights[some])], among)
        found["same"] = Look(among[same(grams, among)], None)
    return found


def _suspicion(kind: Kind, named: list[int], exchange: Exchange, weights: np.ndarray) -> Suspicion:
    """Return what is said of clients in an exchange."""
    request, squares = exchange.request, np.where(exchange.admitted, exchange.squares.sum(1), 0)
    carried = np.abs(weights) * np.sqrt(squares)
    share = float(carried[np.isin(request.ids, named)].sum() / (carried.sum() or 1.0))
    text = text_of(kind, named, share)
    return Suspicion(kind, request.number, request.client_step, named, share, text)


def _refused(exchange: Exchange) -> np.ndarray:
    """Return whose messages the gate refused for their size."""
    why = (Reason.TOO_LARGE, Reason.REFUSED_BY_NODE)
    found = {one.client for one in exchange.refusals if one.reason in why}
    return np.array(sorted(client for client in found if client is not None), int)


def few(norms: np.ndarray, carried: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return who carries most of the sum though they are few and stand out; nobody as a rule.

    Args:
        norms: of the messages, all positive.
        carried: norms times weights.
        work: local work; who only did more of it does not stand out.
    """
    if len(norms) < 3 or norms.max() <= OUTLIER * _median(norms):
        return np.zeros(0, int)
    per_work = norms / np.where(work > 0, work, 1.0)
    ratio = np.minimum(norms / np.median(norms), per_work / np.median(per_work))
    large = np.flatnonzero(ratio > OUTLIER)
    enough = 3 * len(large) <= len(norms) and carried[large].sum() > MOST * carried.sum()
    return large if enough else large[:0]


def gram_matrices(rows: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Return the inner products of all pairs of rows, for each channel, up to a common factor."""
    scaled = rows / (np.abs(rows).max(initial=0.0) or 1.0)  # squares of large numbers overflow
    parts = [scaled[:, start:end] for start, end in pairwise(np.cumsum([0, *widths]).tolist())]
    return np.array([part @ part.T for part in parts]).reshape(len(parts), *[len(rows)] * 2)


def opposed(grams: np.ndarray, widths: Sequence[int], weights: np.ndarray) -> np.ndarray:
    """Return who points against the rest where the rest agree, or against some other client.

    Cosines are averaged over the channels; those of few numbers are left out, since there honest
    clients point anywhere. Near a solution messages cancel, and everybody points against the rest.
    """
    used = grams[np.asarray(widths, int) >= WIDE]
    if not len(used) or grams.shape[1] < FEWEST:
        return np.zeros(0, int)
    norms = np.sqrt(np.einsum("cii->ci", used))
    cosines = _ratio(used, norms[:, :, None] * norms[:, None, :])
    pairs = _against_each_other(cosines.mean(0), np.abs(weights) * np.sqrt((norms**2).sum(0)))
    left = _ratio(np.sqrt(np.maximum(used @ weights @ weights, 0)), norms @ np.abs(weights))
    if left.mean() < CANCEL:
        return pairs
    return np.union1d(pairs, _against_the_rest(cosines, weights))


def _against_each_other(cosines: np.ndarray, carried: np.ndarray) -> np.ndarray:
    """Return who points against another client, in small cohorts.

    Not where two thirds do, as in two camps, nor two who carry most of the sum and so must balance
    each other near a solution. In large cohorts some honest pair always contradicts each other.
    """
    both = carried[:, None] + carried[None, :]
    count = ((cosines < OPPOSED) & (2 * both < carried.sum())).sum(1)
    often = np.flatnonzero((count > 0) & (2 * count >= count.max()))
    usual = len(count) <= SMALL and 3 * (count > 0).sum() <= 2 * len(count)
    return often if usual else often[:0]


def _against_the_rest(cosines: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return who points against the sum of the others while most point along.

    Messages count with their weights but not with their norms, or one large message would be the
    sum of the others for everybody else.
    """
    own = np.einsum("cii->ci", cosines)
    along = cosines @ weights
    rest = along - weights * own
    lengths = (along @ weights)[:, None] - 2 * weights * along + weights**2 * own
    found = _ratio(rest, np.sqrt(np.maximum(own * lengths, 0))).mean(0)
    against = np.flatnonzero(found < AGAINST)
    many = np.median(found) <= AGREE or 3 * len(against) > len(found)
    return against[:0] if many else against


def same(grams: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return different clients whose messages are equal in all channels, if others' are not."""
    squares = np.einsum("cii->ci", grams)
    apart = squares[:, :, None] + squares[:, None, :] - 2 * grams
    equal = (apart <= EQUAL**2 * squares[:, :, None]).all(0) & (ids[:, None] != ids[None, :])
    found = np.flatnonzero(equal.any(1) & (squares.sum(0) > 0))
    return found if 3 * len(found) <= len(ids) else found[:0]


def _median(values: np.ndarray) -> float:
    """Return the median; NumPy's own takes ten times as long for a few values."""
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _close(rows: np.ndarray) -> bool:
    """Return whether two rows are of so similar norms that they may be equal; it is quick."""
    norms = np.sort(np.sqrt(np.einsum("ij,ij->i", rows, rows)))
    return bool((np.diff(norms) <= 2 * EQUAL * norms[1:]).any())


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a / b, and 0 where b is."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _counted(kept: Memory, look: Look) -> tuple[Memory, list[int]]:
    """Count a look; return the new count, and whom to name if that is due and news.

    The score rises with a look that found somebody, and falls with one that did not.
    """
    if not len(look.clients) and not kept["score"] and not kept["seen"]:
        return kept, []
    if look.among is not None:
        return _counted_each(kept, look.clients, look.among)
    score = max(0, kept["score"] + (1 if len(look.clients) else -1))
    seen = dict(kept["seen"]) if score else {}
    for client in map(str, look.clients.tolist()):
        seen[client] = seen.get(client, 0) + 1
    if score < ALARM:
        return {**kept, "score": score, "seen": seen}, []
    return _said(kept, seen)


def _counted_each(kept: Memory, clients: np.ndarray, among: np.ndarray) -> tuple[Memory, list[int]]:
    """Count a look as `_counted` does, but with a score for each client that takes part."""
    change = dict.fromkeys(map(str, among.tolist()), -1)
    change |= dict.fromkeys(map(str, clients.tolist()), 1)
    scores = {i: kept["seen"].get(i, 0) + change.get(i, 0) for i in {**kept["seen"], **change}}
    seen = {i: score for i, score in scores.items() if score > 0}
    if max(seen.values(), default=0) < ALARM:
        return {**kept, "seen": seen}, []
    return _said(kept, seen)


def _said(kept: Memory, seen: dict[str, int]) -> tuple[Memory, list[int]]:
    """Return a new count, and who was seen often, unless much the same was said before."""
    often, said = max(seen.values()), kept["said"]
    named = sorted(int(client) for client, count in seen.items() if 2 * count >= often)
    if len(said) >= AGAIN or any(_alike(named, old) for old in said):
        return {**kept, "score": 0, "seen": {}}, []
    return {"score": 0, "seen": {}, "said": [*said, named]}, named


def _alike(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether two lists of clients have at least half of their members in common."""
    return 2 * len({*a} & {*b}) >= len({*a} | {*b})
