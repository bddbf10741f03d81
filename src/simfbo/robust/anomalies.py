"""Anomaly detection: norms and directions of the messages in an exchange, compared over time.

Detection changes no result. Exchanges are checked in the order of their numbers; every check finds
the clients that stand out, and those that stand out in most checks become a `Suspicion`. Directions
are compared on a `Probe`: a fixed choice of a message's numbers, the same in every engine and run.
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

EVERY_ONE, THEN_EVERY = 32, 13  # the first 32 exchanges are checked, then every 13th
RARER = 1024  # from here on the interval doubles with every doubling of the number
ALARM = 8  # score at which a warning is issued: checks with findings less those without
AGAIN = 3  # the largest number of suspicions of one kind in a run

OUTLIER, MOST = 5.0, 0.8  # times the median norm; of the sum of norms
OPPOSED, AGAINST, AGREE = -0.8, -0.3, 0.1  # cosines
CANCEL = 0.25  # norm of the sum over the sum of norms
EQUAL = 1e-3  # relative distance
FEWEST, WIDE = 6, 64  # clients and numbers that cosines need
SMALL = 20  # the largest cohort in which contradicting pairs are evidence
NARROW = 8  # numbers that a test of equality needs
_COMPARED, _NUMBERS, _SEED = 64, 2**13, 16
_NOTHING: Memory = {"score": 0, "seen": {}, "said": []}


class Probe(NamedTuple):
    """The numbers of a message that are compared.

    Attributes:
        leaves: channel by channel, the index of a leaf and positions in the flat leaf.
        widths: the number of probed numbers of each channel.
    """

    leaves: tuple[tuple[int, np.ndarray], ...]
    widths: tuple[int, ...]


def probe_of(message: PyTree, clients: int) -> Probe:
    """Return the probe for messages of this structure in cohorts of this size.

    Args:
        message: an example; its leaves may be abstract. Numbers outside the channels are left out,
            unless there are no others.
        clients: the size of the cohort; larger cohorts compare fewer numbers of each message.
    """
    leaves = jax.tree.leaves_with_path(message)
    sizes = tuple((channel(path), math.prod(leaf.shape)) for path, leaf in leaves)
    return _probe(sizes, int(np.clip(_NUMBERS // max(1, clients), 64, 256)))


@lru_cache(maxsize=256)
def _probe(sizes: tuple[tuple[str | None, int], ...], most: int) -> Probe:
    """Return the probe for leaves of these channels and sizes, with `most` numbers per channel."""
    probed_leaves: list[tuple[int, np.ndarray]] = []
    widths: list[int] = []
    for name in CHANNELS if any(owner for owner, _ in sizes) else (None,):
        indices = [j for j, (owner, size) in enumerate(sizes) if owner == name and size]
        ends = np.cumsum([0, *(sizes[j][1] for j in indices)])
        positions = np.arange(ends[-1])
        if len(positions) > most:
            positions = np.sort(
                np.random.default_rng(_SEED).choice(len(positions), most, replace=False)
            )
        for j, (start, end) in zip(indices, pairwise(ends.tolist()), strict=True):
            probed_leaves.append((j, positions[(positions >= start) & (positions < end)] - start))
        widths += [len(positions)] if indices else []
    return Probe(tuple(probed_leaves), tuple(widths))


def take(probe: Probe, message: PyTree) -> jax.Array:
    """Return the probed numbers of a message, channel after channel."""
    leaves, wide = [jnp.ravel(leaf) for leaf in jax.tree.leaves(message)], jnp.result_type(float)
    chosen = [(leaves[j], at) for j, at in probe.leaves]
    parts = [(leaf if len(at) == leaf.size else leaf[at]).astype(wide) for leaf, at in chosen]
    return jnp.concatenate(parts) if parts else jnp.zeros(0, wide)


def probed(messages: Sequence[PyTree | None], request: Request) -> Probed | None:
    """Return the probed numbers of messages; None for an exchange that is not checked.

    Args:
        messages: by position in the cohort; None for a rejected reply, which gives zeros.
        request: of the exchange.
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
    """Return the number of messages of a cohort that are compared in one exchange."""
    return min(clients, _COMPARED)


def window(clients: int, number: Any) -> Any:
    """Return the positions in the cohort to compare; in a large cohort they rotate."""
    offsets = np.arange(compared(clients), dtype=np.int32)
    return (window_start(clients, number) + offsets) % max(1, clients)


def window_start(clients: int, number: Any) -> Any:
    """Return the first of the positions to compare in this exchange."""
    return _COMPARED * (number % clients) % clients if clients > _COMPARED else 0


def looks_at(number: Any) -> Any:
    """Check whether the exchange of this number, or each of these numbers, is checked.

    Example:
        >>> [number for number in range(30, 60) if looks_at(number)]
        [30, 31, 32, 39, 52]
    """
    doublings = np.frexp(np.maximum(number, RARER) / RARER)[1] - 1
    return (number <= EVERY_ONE) | (number % (THEN_EVERY * 2**doublings) == 0)


def observe(
    memory: Memory, exchange: Exchange, detect: bool = True
) -> tuple[Memory, list[Suspicion]]:
    """Check an exchange; return the new memory and the suspicions with sufficient evidence.

    Messages that are not finite are reported in any case.

    Args:
        memory: of earlier checks; it is not changed.
        exchange: a finished exchange, with weights and work if messages are compared.
        detect: whether messages are compared.
    """
    after, suspicions = _not_finite(memory, exchange)
    if not detect or not looks_at(exchange.request.number):
        return after, suspicions
    weights, work = exchange.weights, exchange.work
    assert weights is not None
    assert work is not None
    for kind, check in _checks(exchange, weights, work).items():
        after[kind], named = _update(memory.get(kind, _NOTHING), check)
        if after[kind] == _NOTHING:
            del after[kind]
        if named:
            suspicions.append(_suspicion(kind, named, exchange, weights))
    return after, suspicions


def _not_finite(memory: Memory, exchange: Exchange) -> tuple[Memory, list[Suspicion]]:
    """Report clients with non-finite messages once, if other clients' are finite."""
    request, reported = exchange.request, memory.get("not-finite", [])
    senders = {
        refusal.client for refusal in exchange.refusals if refusal.reason == Reason.NOT_FINITE
    }
    senders |= set(request.ids[~np.isfinite(exchange.squares).all(1)].tolist())  # a node refused it
    new = sorted(client for client in senders if client is not None and client not in reported)
    if not new or not exchange.admitted.any():
        return dict(memory), []
    text = text_of("not-finite", new, 0.0)
    suspicion = Suspicion("not-finite", request.number, request.client_step, new, 0.0, text)
    return {**memory, "not-finite": [*reported, *new]}, [suspicion]


class Check(NamedTuple):
    """The outliers of one check.

    Attributes:
        clients: the clients that stand out.
        among: the clients checked, if each has a score of its own; None for one score in common.
    """

    clients: np.ndarray
    among: np.ndarray | None


def _checks(exchange: Exchange, weights: np.ndarray, work: np.ndarray) -> dict[Kind, Check]:
    """Run all checks on an exchange, by kind."""
    counted = exchange.admitted & (exchange.squares.sum(1) > 0)
    norms, ids = np.sqrt(exchange.squares[counted].sum(1)), exchange.request.ids[counted]
    large, refused = few(norms, np.abs(weights[counted]) * norms, work[counted]), _refused(exchange)
    checks: dict[Kind, Check] = {
        "few": Check(ids[large], None),
        "refused": Check(refused, np.union1d(ids, refused)),
    }
    if exchange.probed is not None and exchange.probed.rows.shape[1] >= NARROW:
        rows, widths = exchange.probed
        positions = window(len(counted), exchange.request.number)
        rows, positions = rows[counted[positions]], positions[counted[positions]]
        among = exchange.request.ids[positions]
        if not (max(widths) >= WIDE or _close(rows)):
            none = among[:0]
            return {**checks, "opposed": Check(none, among), "same": Check(none, None)}
        grams = gram_matrices(rows, widths)
        # In every exchange noise makes some client stand out, but not the same ones.
        checks["opposed"] = Check(among[opposed(grams, widths, weights[positions])], among)
        checks["same"] = Check(among[same(grams, among)], None)
    return checks


def _suspicion(kind: Kind, named: list[int], exchange: Exchange, weights: np.ndarray) -> Suspicion:
    request, squares = exchange.request, np.where(exchange.admitted, exchange.squares.sum(1), 0)
    carried = np.abs(weights) * np.sqrt(squares)
    share = float(carried[np.isin(request.ids, named)].sum() / (carried.sum() or 1.0))
    text = text_of(kind, named, share)
    return Suspicion(kind, request.number, request.client_step, named, share, text)


def _refused(exchange: Exchange) -> np.ndarray:
    """Return the clients whose messages were rejected for their size."""
    reasons = (Reason.TOO_LARGE, Reason.REFUSED_BY_NODE)
    clients = {refusal.client for refusal in exchange.refusals if refusal.reason in reasons}
    return np.array(sorted(client for client in clients if client is not None), int)


def few(norms: np.ndarray, carried: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return the clients whose outlying norms carry most of the sum, if they are few; usually none.

    Args:
        norms: of the messages, all positive.
        carried: norms times weights.
        work: local work; norms that are large because of it are not outliers.
    """
    if len(norms) < 3 or norms.max() <= OUTLIER * _median(norms):
        return np.zeros(0, int)
    per_work = norms / np.where(work > 0, work, 1.0)
    ratio = np.minimum(norms / np.median(norms), per_work / np.median(per_work))
    large = np.flatnonzero(ratio > OUTLIER)
    enough = 3 * len(large) <= len(norms) and carried[large].sum() > MOST * carried.sum()
    return large if enough else large[:0]


def gram_matrices(rows: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Return the inner products of all pairs of rows, by channel, up to a common factor."""
    scaled = rows / (np.abs(rows).max(initial=0.0) or 1.0)  # squares of large numbers overflow
    parts = [scaled[:, start:end] for start, end in pairwise(np.cumsum([0, *widths]).tolist())]
    return np.array([part @ part.T for part in parts]).reshape(len(parts), *[len(rows)] * 2)


def opposed(grams: np.ndarray, widths: Sequence[int], weights: np.ndarray) -> np.ndarray:
    """Return clients that point against the rest where the rest agree, or against another client.

    Cosines are averaged over the channels with enough numbers; in few dimensions honest clients
    point anywhere. Near a solution messages cancel, and every client points against the rest.
    """
    wide = grams[np.asarray(widths, int) >= WIDE]
    if not len(wide) or grams.shape[1] < FEWEST:
        return np.zeros(0, int)
    norms = np.sqrt(np.einsum("cii->ci", wide))
    cosines = _ratio(wide, norms[:, :, None] * norms[:, None, :])
    pairs = _against_each_other(cosines.mean(0), np.abs(weights) * np.sqrt((norms**2).sum(0)))
    remaining = _ratio(np.sqrt(np.maximum(wide @ weights @ weights, 0)), norms @ np.abs(weights))
    if remaining.mean() < CANCEL:
        return pairs
    return np.union1d(pairs, _against_the_rest(cosines, weights))


def _against_each_other(cosines: np.ndarray, carried: np.ndarray) -> np.ndarray:
    """Return clients of a small cohort that point against another client.

    Not if two thirds of the clients do, as in two camps, nor for a pair that carries most of the
    sum and must balance near a solution. In large cohorts some honest pair always contradicts each
    other.
    """
    pair_norms = carried[:, None] + carried[None, :]
    count = ((cosines < OPPOSED) & (2 * pair_norms < carried.sum())).sum(1)
    often = np.flatnonzero((count > 0) & (2 * count >= count.max()))
    is_small_minority = len(count) <= SMALL and 3 * (count > 0).sum() <= 2 * len(count)
    return often if is_small_minority else often[:0]


def _against_the_rest(cosines: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return clients that point against the sum of the others while most clients agree with it.

    Messages are weighted but normalised: otherwise a single large message would dominate the sum of
    the others for every other client.
    """
    squares = np.einsum("cii->ci", cosines)
    products = cosines @ weights
    rest = products - weights * squares
    lengths = (products @ weights)[:, None] - 2 * weights * products + weights**2 * squares
    cosine_to_rest = _ratio(rest, np.sqrt(np.maximum(squares * lengths, 0))).mean(0)
    against = np.flatnonzero(cosine_to_rest < AGAINST)
    many = np.median(cosine_to_rest) <= AGREE or 3 * len(against) > len(cosine_to_rest)
    return against[:0] if many else against


def same(grams: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return clients with different data but equal messages, unless that holds for most clients."""
    squares = np.einsum("cii->ci", grams)
    distances = squares[:, :, None] + squares[:, None, :] - 2 * grams
    equal = (distances <= EQUAL**2 * squares[:, :, None]).all(0) & (ids[:, None] != ids[None, :])
    copies = np.flatnonzero(equal.any(1) & (squares.sum(0) > 0))
    return copies if 3 * len(copies) <= len(ids) else copies[:0]


def _median(values: np.ndarray) -> float:
    """Compute the median; NumPy's takes ten times as long for a few values."""
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _close(rows: np.ndarray) -> bool:
    """Check whether two norms are so close that the rows may be equal; a cheap first test."""
    norms = np.sort(np.sqrt(np.einsum("ij,ij->i", rows, rows)))
    return bool((np.diff(norms) <= 2 * EQUAL * norms[1:]).any())


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _update(count: Memory, check: Check) -> tuple[Memory, list[int]]:
    """Update the score with a check; return the new count, and the clients to report.

    A check with findings adds one to the score, one without subtracts one.
    """
    if not len(check.clients) and not count["score"] and not count["seen"]:
        return count, []
    if check.among is not None:
        return _update_each(count, check.clients, check.among)
    score = max(0, count["score"] + (1 if len(check.clients) else -1))
    seen = dict(count["seen"]) if score else {}
    for client in map(str, check.clients.tolist()):
        seen[client] = seen.get(client, 0) + 1
    if score < ALARM:
        return {**count, "score": score, "seen": seen}, []
    return _report(count, seen)


def _update_each(count: Memory, clients: np.ndarray, among: np.ndarray) -> tuple[Memory, list[int]]:
    """Update scores as `_update` does, with one score per client."""
    change = dict.fromkeys(map(str, among.tolist()), -1)
    change |= dict.fromkeys(map(str, clients.tolist()), 1)
    scores = {i: count["seen"].get(i, 0) + change.get(i, 0) for i in {**count["seen"], **change}}
    seen = {i: score for i, score in scores.items() if score > 0}
    if max(seen.values(), default=0) < ALARM:
        return {**count, "seen": seen}, []
    return _report(count, seen)


def _report(count: Memory, seen: dict[str, int]) -> tuple[Memory, list[int]]:
    """Reset the score and report the clients, unless a similar group was reported before."""
    most, reported = max(seen.values()), count["said"]
    named = sorted(int(client) for client, score in seen.items() if 2 * score >= most)
    if len(reported) >= AGAIN or any(_alike(named, earlier) for earlier in reported):
        return {**count, "score": 0, "seen": {}}, []
    return {"score": 0, "seen": {}, "said": [*reported, named]}, named


def _alike(a: Sequence[int], b: Sequence[int]) -> bool:
    """Check whether two lists of clients have at least half of their members in common."""
    return 2 * len({*a} & {*b}) >= len({*a} | {*b})
