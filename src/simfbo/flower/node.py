"""What a node is asked and how it answers, whatever carries the messages.

A node holds one or many clients. It is asked for a part of a cohort, computes it with the simulated
engine in one compiled call, and answers with each client's message or with their weighted sum.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.data import FederatedData
from simfbo.core.federation import Algorithm, ClientWork, Dealt
from simfbo.core.gate import Asked, Gate, Reply, as_arrays, mismatch, names, occurrences
from simfbo.core.keys import secret_key
from simfbo.core.local_work import Coefs, LocalRule
from simfbo.core.problem import PyTree
from simfbo.engines.simulated import SimulatedFederation
from simfbo.errors import UserError
from simfbo.flower.wire import BadPackage, decode, encode

_PAYLOAD, _MESSAGE = "payload", "message"


class Package(NamedTuple):
    """What travels.

    Attributes:
        settings: whatever fits into JSON.
        arrays: by name.
        common: arrays that every node receives alike, so that they need to be sent but once.
    """

    settings: dict[str, Any]
    arrays: dict[str, np.ndarray]
    common: Mapping[str, np.ndarray] = MappingProxyType({})


class Question(NamedTuple):
    """What one node is asked in one exchange.

    Attributes:
        exchange: its number.
        payload: what the clients receive.
        ids: the clients asked, ascending; one that is drawn twice stands here twice.
        coefs: their local work.
        weights: of their messages, for a node that adds them up; None where each is wanted.
        gate: for a node that adds them up.
        key: of the exchange; None where clients draw their own.
    """

    exchange: int
    payload: PyTree
    ids: np.ndarray
    coefs: Coefs
    weights: np.ndarray | None
    gate: Gate
    key: jax.Array | None


class Partial(NamedTuple):
    """A node's weighted sum: which clients' messages are in it, and their squared norms."""

    sums: PyTree
    passed: np.ndarray
    squares: np.ndarray


def ask(question: Question, known: Mapping[str, PyTree]) -> Package:
    """Return a question as it travels; `known` are trees that both sides have."""
    coefs, key = question.coefs, question.key
    arrays = {"ids": question.ids, "tau": coefs.tau, "steps": coefs.steps, "norm": coefs.norm}
    if question.weights is not None:
        arrays["weights"] = question.weights
    if key is not None:
        arrays["key"] = jax.random.key_data(key)
    leaves = {f"{_PAYLOAD}{k}": leaf for k, leaf in enumerate(jax.tree.leaves(question.payload))}
    dealt = any(map(_is_dealt, jax.tree.leaves(question.payload, is_leaf=_is_dealt)))
    settings = {
        "exchange": question.exchange,
        "shape": encode(question.payload, known),
        "leaves": len(leaves),
        "rule": list(coefs.rule),
        "max_norm": question.gate.max_norm,
        "generator": None if key is None else str(jax.random.key_impl(key)),
        "wide": bool(jnp.result_type(float) == jnp.float64),
    }
    own, common = (arrays | leaves, {}) if dealt else (arrays, leaves)
    return Package(settings, _on_host(own), _on_host(common))


def understand(package: Package, known: Mapping[str, PyTree]) -> Question:
    """Return the question that a package holds; the inverse of `ask`."""
    settings, arrays = package.settings, {**package.arrays, **package.common}
    leaves = [arrays[f"{_PAYLOAD}{number}"] for number in range(settings["leaves"])]
    keep, momentum, steps = settings["rule"]
    rule = LocalRule(keep, momentum, tuple(steps))
    key = None
    if settings["generator"] is not None:
        key = jax.random.wrap_key_data(jnp.asarray(arrays["key"]), impl=settings["generator"])
    return Question(
        settings["exchange"],
        decode(settings["shape"], leaves, known),
        arrays["ids"],
        Coefs(arrays["tau"], arrays["steps"], arrays["norm"], rule),
        arrays.get("weights"),
        Gate(settings["max_norm"]),
        key,
    )


class Node:
    """One node: its clients' data and the programs compiled so far."""

    def __init__(self, algorithm: Algorithm, known: Mapping[str, PyTree], data: FederatedData):
        """Take the algorithm whose works it runs, the trees both sides know, and the data."""
        self._works = {work.__name__: work for work in algorithm.works}
        self._known, self._data = known, data
        self._engines: dict[Gate, SimulatedFederation] = {}

    def answer(self, work: str, package: Package) -> Package:
        """Return the answer to a question."""
        with jax.enable_x64(package.settings["wide"]):
            question = understand(package, self._known)
            return self._compute(self._works[work], question)

    def _places(self, ids: np.ndarray) -> np.ndarray:
        """Return where the data of some clients are; raise unless they are here."""
        if not np.isin(ids, self._data.ids).all():
            missing = ids[~np.isin(ids, self._data.ids)]
            raise UserError(f"This node does not hold client {missing[0]}.")
        return np.searchsorted(self._data.ids, ids)

    def _compute(self, work: ClientWork, question: Question) -> Package:
        each = question.weights is None
        gate = Gate(open=True) if each else question.gate
        engine = self._engines.setdefault(gate, SimulatedFederation(self._data, gate=gate))
        size, room = len(question.ids), _room(len(question.ids))
        # Filled up to a power of two, so that few sizes have to be compiled.
        fill = np.minimum(np.arange(room), size - 1)
        places, payload = self._places(question.ids)[fill], part_of(question.payload, fill)
        weights = np.ones(room) if question.weights is None else question.weights[fill]
        coefs, absent = question.coefs[fill], np.arange(room) >= size
        key = secret_key() if question.key is None else question.key
        found = engine.compute(work, payload, places, (weights, each), absent, coefs, key)
        sums, squares, passed = found
        arrays = {"ids": question.ids, "repeats": occurrences(question.ids)}
        if each:
            sums = jax.tree.map(lambda a: np.asarray(a)[:size], sums)
        else:
            arrays |= {"squares": np.asarray(squares, np.float64)[:size]}
            arrays |= {"passed": np.asarray(passed)[:size] > 0}
        arrays |= {_MESSAGE + name: array for name, array in as_arrays(sums).items()}
        return Package({"exchange": question.exchange}, arrays)


def replies(package: Package, asked: np.ndarray) -> list[Reply]:
    """Return the replies in a node's answer, one per client; nothing in it is trusted.

    Args:
        package: what the node sent.
        asked: the clients it was asked for. It may not answer for others.
    """
    ids, repeats = (_integers(package.arrays, name) for name in ("ids", "repeats"))
    if ids.tolist() != asked.tolist() or repeats.tolist() != occurrences(asked).tolist():
        raise BadPackage("an answer for other clients than it was asked for")
    stacks = _messages(package)
    if any(stack.ndim < 1 or len(stack) != len(ids) for stack in stacks.values()):
        raise BadPackage("another number of messages than of clients")
    exchange = package.settings.get("exchange")

    def message(j: int) -> dict[str, np.ndarray]:
        return {name: np.asarray(stack[j]) for name, stack in stacks.items()}

    return [Reply(int(i), exchange, message(j), int(repeats[j])) for j, i in enumerate(ids)]


def partial_sum(package: Package, asked: Asked, part: np.ndarray, weights: np.ndarray) -> Partial:
    """Return the sum in a node's answer, after a check that it can be one.

    Args:
        package: what the node sent.
        asked: what was asked of the whole cohort.
        part: the clients that this node was asked for.
        weights: of their messages.
    """
    ids, exchange = _integers(package.arrays, "ids"), package.settings.get("exchange")
    if ids.tolist() != part.tolist():
        raise BadPackage("an answer for other clients than it was asked for")
    if exchange != asked.number:
        raise BadPackage("an answer to another exchange")
    like = jax.eval_shape(lambda m: jax.tree.map(lambda a: _stacked(a, weights), m), asked.like)
    sums = _messages(package)
    if reason := mismatch(sums, like):
        raise BadPackage(f"a sum that does not fit: it {reason}")
    if not all(np.isfinite(np.asarray(array, np.float64)).all() for array in sums.values()):
        raise BadPackage("a sum that is not finite")
    passed, squares = package.arrays.get("passed"), package.arrays.get("squares")
    shape = len(part), len(names(like))
    if passed is None or passed.dtype != bool or passed.shape != shape[:1]:
        raise BadPackage("no word on whose messages its sum holds")
    if squares is None or squares.dtype != np.float64 or squares.shape != shape:
        raise BadPackage("no norms of the messages in its sum")
    leaves = [sums[name] for name in names(like)]
    if not passed.any() and any(leaf.any() for leaf in leaves):
        raise BadPackage("a sum of nobody's messages")
    return Partial(jax.tree.unflatten(jax.tree.structure(like), leaves), passed, squares)


def part_of(payload: PyTree, places: np.ndarray) -> Any:
    """Return what a node receives of a payload: of `Dealt` parts, its clients' slices."""
    return jax.tree.map(lambda part: _filled(part, places), payload, is_leaf=_is_dealt)


def _filled(part: Any, places: np.ndarray) -> Any:
    if not _is_dealt(part):
        return part
    return Dealt(jax.tree.map(lambda a: np.asarray(a)[places], part.slices))


def _stacked(leaf: Any, weights: np.ndarray) -> Any:
    return jnp.zeros(weights.shape[1:] + leaf.shape, leaf.dtype)


def _is_dealt(part: Any) -> bool:
    return isinstance(part, Dealt)


def _on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}


def _room(size: int) -> int:
    """Return the power of two that holds so many."""
    return 1 << (size - 1).bit_length()


def _integers(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return a list of whole numbers from untrusted arrays."""
    found = arrays.get(name)
    if found is None or found.ndim != 1 or found.dtype.kind not in "iu":
        raise BadPackage(f"no list of {name}")
    return found


def _messages(package: Package) -> dict[str, np.ndarray]:
    """Return the arrays of messages by their own names."""
    start = len(_MESSAGE)
    return {name[start:]: a for name, a in package.arrays.items() if name.startswith(_MESSAGE)}
