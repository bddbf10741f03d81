"""A node's requests and responses, independent of the transport.

A node holds one or many clients. It receives a request for its part of a cohort, computes it with
the simulated engine, and responds with each client's message or with their weighted sum.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.messages import Codecs, decode_payload, encode_message, start_of
from simfbo.core.data import FederatedData
from simfbo.core.exchange import EVALUATION
from simfbo.core.federation import ClientStep
from simfbo.core.gate import Gate, Reply, limit_of, occurrences
from simfbo.core.keys import client_key, secret_key
from simfbo.core.ledger import PerClient, is_per_client
from simfbo.core.local_work import LocalPlan
from simfbo.core.memory import fresh, rows_of
from simfbo.core.method import Method, Parts, as_module
from simfbo.core.problem import Point, PyTree
from simfbo.core.trees import as_arrays, names
from simfbo.engines.exchange import Job, Rows
from simfbo.engines.simulated import run_in_threads
from simfbo.errors import UserError
from simfbo.flower.memory import Store, Versions, keep_all, recalled
from simfbo.flower.transport import Package
from simfbo.flower.wire import BadPackage, decode, encode
from simfbo.runs.files import Json

_MESSAGE = "message"
_WORK = ("tau", "steps", "norm", "keep", "momentum")  # the arrays of a plan


class Code(NamedTuple):
    """The coding of a request.

    Attributes:
        payload: the bytes of the payload.
        up: the key for the clients' messages.
        down: the key for the payload.
    """

    payload: bytes | None
    up: jax.Array
    down: jax.Array


class NodeRequest(NamedTuple):
    """A request to one node in one exchange.

    Attributes:
        exchange: its number.
        payload: for the clients.
        ids: the clients, ascending; one that was sampled twice is listed twice.
        plan: their local work.
        numbers: those of the client step, in the order of its leaves.
        weights: of their messages, for a node that sums them; None if it sends each of them.
        gate: for a node that sums them.
        key: of the exchange; None if clients draw their own.
        code: the coding of payload and messages; None for none.
        versions: of the clients' memory; None for stateless clients.
    """

    exchange: int
    payload: PyTree
    ids: np.ndarray
    plan: LocalPlan
    numbers: Sequence[float]
    weights: np.ndarray | None
    gate: Gate
    key: jax.Array | None
    code: Code | None = None
    versions: Versions | None = None


def encode_request(request: NodeRequest, known: Mapping[str, PyTree]) -> Package:
    """Encode a request; `known` are trees that both sides have."""
    plan, key = request.plan, request.key
    work = {name: getattr(plan, name) for name in _WORK}
    arrays = {"ids": request.ids} | {name: part for name, part in work.items() if part is not None}
    arrays["numbers"] = np.asarray(request.numbers, np.float64)
    if request.weights is not None:
        arrays["weights"] = request.weights
    if key is not None:
        arrays["key"] = jax.random.key_data(key)
    if request.versions is not None:
        arrays["versions"] = request.versions.numbers
    payload = _leaves("payload", request.payload)
    sliced = any(map(is_per_client, jax.tree.leaves(request.payload, is_leaf=is_per_client)))
    settings: Json = {
        "exchange": request.exchange,
        "payload": [encode(request.payload, known), len(payload)],
        "shapes": None,
        "plain": plan.plain,
        "max_norm": request.gate.max_norm,
        "generator": None if key is None else str(jax.random.key_impl(key)),
        "wide": bool(jnp.result_type(float) == jnp.float64),
        "memory": None if request.versions is None else [*request.versions[::2]],
    }
    if request.code is not None:
        settings["shapes"] = [[list(leaf.shape), leaf.dtype.name] for leaf in payload.values()]
        settings["code"] = str(jax.random.key_impl(request.code.up))
        arrays |= {
            f"code {way}": jax.random.key_data(getattr(request.code, way)) for way in ("up", "down")
        }
        arrays |= _sliced(request.payload)
        payload = {"coded": np.frombuffer(request.code.payload or b"", np.uint8)}
    individual, common = (arrays | payload, {}) if sliced else (arrays, payload)
    return Package(settings, _on_host(individual), _on_host(common))


def _sliced(payload: PyTree) -> Json:
    """Return the leaves of a payload that differ between clients, which are not coded."""
    flags = [
        is_per_client(part)
        for part in jax.tree.leaves(payload, is_leaf=is_per_client)
        for _ in jax.tree.leaves(part)
    ]
    named = _leaves("payload", payload).items()
    return {name: leaf for (name, leaf), per_client in zip(named, flags, strict=True) if per_client}


def decode_request(
    package: Package, known: Mapping[str, PyTree], codecs: Codecs | None = None
) -> NodeRequest:
    """Decode a request; the inverse of `encode_request`."""
    settings, arrays = package.settings, {**package.arrays, **package.common}
    code, shapes = None, settings["shapes"]
    if shapes is not None:
        keys = (
            jax.random.wrap_key_data(jnp.asarray(arrays[f"code {way}"]), impl=settings["code"])
            for way in ("up", "down")
        )
        code = Code(arrays["coded"].tobytes(), *keys)

    def leaf(k: int) -> Any:
        if shapes is not None and f"payload{k}" not in arrays:
            return jax.ShapeDtypeStruct(tuple(shapes[k][0]), jnp.dtype(shapes[k][1]))
        return arrays[f"payload{k}"]

    shape, count = settings["payload"]
    payload = decode(shape, [leaf(k) for k in range(count)], known)
    if code is not None:
        if codecs is None:
            raise UserError("The server codes its messages, and this node's deployment does not.")
        start = start_of(codecs, payload, Point(known["x"], known["y"]))
        payload = decode_payload(codecs, code.payload or b"", start, code.down, payload)

    work: Json = {name: arrays.get(name) for name in _WORK}
    key = None
    if settings["generator"] is not None:
        key = jax.random.wrap_key_data(jnp.asarray(arrays["key"]), impl=settings["generator"])
    return NodeRequest(
        settings["exchange"],
        payload,
        arrays["ids"],
        LocalPlan(**work, plain=settings["plain"]),
        arrays["numbers"].tolist(),
        arrays.get("weights"),
        Gate(settings["max_norm"]),
        key,
        code,
        _versions(settings["memory"], arrays),
    )


def _versions(settings: list[Any] | None, arrays: Mapping[str, np.ndarray]) -> Versions | None:
    """Read the memory versions of a request; None for stateless clients."""
    if settings is None:
        return None
    run, oldest = settings
    return Versions(run, arrays["versions"], oldest)


class Node:
    """One node: its clients' data and the client steps it can run."""

    def __init__(
        self,
        algorithm: Method,
        known: Mapping[str, PyTree],
        data: FederatedData,
        codecs: Codecs | None = None,
        client_steps: Mapping[str, ClientStep] | None = None,
    ):
        """Take algorithm, trees known to both sides, data, codecs, and client steps.

        The client steps are the algorithm's own by default. A request names one and contains its
        numbers.
        """
        self._algorithm = algorithm
        self._client_steps = client_steps or algorithm.client_steps
        self._known, self._data, self._codecs = known, data, codecs

    def respond(
        self, client_step: str, package: Package, store: Callable[[str], Store] | None = None
    ) -> Package:
        """Respond to a request.

        Args:
            client_step: the name of the client step.
            package: the request.
            store: (the name of a run) -> the store of client memory.
        """
        with jax.enable_x64(package.settings["wide"]):
            request, memory = decode_request(package, self._known, self._codecs), None
            if request.versions is not None and store is not None:
                memory = store(request.versions.run)
            settings: Json = {"exchange": request.exchange}
            step = with_numbers(self._client_steps[client_step], request.numbers)
            arrays = self._compute(step, request, memory, settings)
            return Package(settings, arrays)

    def _compute(
        self, client_step: ClientStep, request: NodeRequest, store: Store | None, settings: Json
    ) -> dict[str, np.ndarray]:
        """Return the messages of a request's clients, or their sum with norms and admissions.

        Clients whose memory is lost are listed in `settings`.
        """
        each, size = request.weights is None, len(request.ids)
        places = self._positions(request.ids)
        # Padded to a power of two, so that few sizes are compiled.
        pad = np.minimum(np.arange(1 << (size - 1).bit_length()), size - 1)
        memory = None
        if store is not None and request.versions is not None:
            initial = self._algorithm.client_memory(self._known["x"], self._known["y"])
            everyone = fresh(initial, self._data.n)
            recalled_memory, lost_clients = recalled(
                store, request.versions, request.ids, places, everyone
            )
            memory = rows_of(recalled_memory, places[pad])
            settings.update({"lost": lost_clients} if lost_clients else {})
        rows = Rows(
            position=pad,
            place=places[pad],
            id=request.ids[pad],
            repeat=occurrences(request.ids)[pad],
            weight=np.ones(len(pad)) if request.weights is None else request.weights[pad],
            replies=np.arange(len(pad)) < size,
            measured=None,
            plan=request.plan[pad],
            data=None,
            memory=memory,
        )
        job = Job(
            step=client_step,
            payload=part_of(request.payload, pad),
            key=secret_key() if request.key is None else request.key,
            limit=None if each else limit_of(request.gate),
            plan=None,
            data=(self._data.lower, self._data.upper),
            rows=rows,
            codecs=None,
            detect=False,
        )
        total, results = run_in_threads(job, keep=each)
        trains = client_step.__name__ != EVALUATION
        if store is not None and request.versions is not None and trains:
            keep_all(store, request.versions, request.ids, request.exchange, results.memory)
        arrays = {"ids": request.ids}
        if each:
            result = jax.tree.map(lambda stack: np.asarray(stack)[:size], results.messages)
            arrays["repeats"] = occurrences(request.ids)
            if request.code is not None:
                return arrays | self._coded(request, request.code, result)
        else:
            result = total
            arrays["squares"] = np.asarray(results.squares, np.float64)[:size]
            arrays["passed"] = np.asarray(results.admitted)[:size]
        return arrays | {_MESSAGE + name: array for name, array in as_arrays(result).items()}

    def _coded(self, request: NodeRequest, code: Code, stacked: PyTree) -> dict[str, np.ndarray]:
        """Encode the messages of a request's clients: their lengths, and all bytes."""
        assert self._codecs is not None
        messages = []
        for j, (i, repeat) in enumerate(zip(request.ids, occurrences(request.ids), strict=True)):
            message = jax.tree.map(lambda stack, j=j: stack[j], stacked)
            key = client_key(code.up, int(i), int(repeat))
            messages.append(encode_message(self._codecs, message, key))
        lengths = np.array([len(message) for message in messages], np.int64)
        return {"lengths": lengths, "coded": np.frombuffer(b"".join(messages), np.uint8)}

    def _positions(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of some clients in the data; raise if one is missing."""
        if not np.isin(ids, self._data.ids).all():
            missing = ids[~np.isin(ids, self._data.ids)]
            raise UserError(f"This node does not hold client {missing[0]}.")
        return np.searchsorted(self._data.ids, ids)


def replies(package: Package, like: PyTree, requested: np.ndarray) -> list[Reply]:
    """Validate the replies in a node's response, one per client.

    Args:
        package: from the node, not trusted.
        like: an example message.
        requested: the clients; a node may not reply for others.
    """
    stacks = messages_in(package, like, requested, ("ids", "repeats"))
    repeats = _integers(package.arrays, "repeats")
    if not np.array_equal(repeats, occurrences(requested)):
        raise BadPackage("a response for other clients than requested")
    if any(stack.ndim < 1 or len(stack) != len(requested) for stack in stacks.values()):
        raise BadPackage("a different number of messages than clients")
    exchange = package.settings.get("exchange")

    def message(j: int) -> dict[str, np.ndarray]:
        return {name: np.asarray(stack[j]) for name, stack in stacks.items()}

    return [Reply(int(i), exchange, message(j), int(repeats[j])) for j, i in enumerate(requested)]


def coded_replies(package: Package, requested: np.ndarray) -> tuple[list[Reply], np.ndarray]:
    """Validate the coded replies in a node's response; return them with their lengths.

    Args:
        package: from the node, not trusted.
        requested: the clients; a node may not reply for others.
    """
    arrays = package.arrays
    if list(arrays) != ["ids", "repeats", "lengths", "coded"] or package.common:
        raise BadPackage("arrays that were not requested")
    ids, repeats, lengths = (_integers(arrays, name) for name in ("ids", "repeats", "lengths"))
    if not np.array_equal(ids, requested) or not np.array_equal(repeats, occurrences(requested)):
        raise BadPackage("a response for other clients than requested")
    data = arrays["coded"]
    sizes = [int(length) for length in lengths]
    fits = len(sizes) == len(requested) and min(sizes, default=0) >= 0 and sum(sizes) == data.size
    if data.dtype != np.uint8 or data.ndim != 1 or not fits:
        raise BadPackage("coded messages of other lengths than it says")
    ends, content = np.cumsum([0, *sizes]).tolist(), data.tobytes()
    exchange = package.settings.get("exchange")
    return [
        Reply(int(i), exchange, content[ends[j] : ends[j + 1]], int(repeats[j]))
        for j, i in enumerate(requested)
    ], lengths


def part_of(payload: PyTree, positions: np.ndarray) -> PyTree:
    """Return the part of a payload for a node: of `PerClient` parts, its slices."""
    return jax.tree.map(lambda part: _filled(part, positions), payload, is_leaf=is_per_client)


def _filled(part: PyTree, positions: np.ndarray) -> PyTree:
    if not is_per_client(part):
        return part
    return PerClient(jax.tree.map(lambda a: np.asarray(a)[positions], part.slices))


def with_numbers(client_step: ClientStep, numbers: Sequence[float]) -> ClientStep:
    """Return a client step with the numbers of a request in place of its own."""
    parts = Parts.of(as_module(client_step))
    if len(parts.numbers) != len(numbers):
        raise UserError(
            f"The server's '{client_step.__name__}' has {len(numbers)} numbers, this node's "
            f"{len(parts.numbers)}: deploy the same app on both."
        )
    return parts._replace(numbers=tuple(numbers)).joined()


def _leaves(name: str, tree: PyTree) -> Json:
    """Name a tree's leaves name0, name1, and so on."""
    return {f"{name}{k}": leaf for k, leaf in enumerate(jax.tree.leaves(tree))}


def _on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}


def _integers(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Read a list of integers from untrusted arrays."""
    array = arrays.get(name)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadPackage(f"no list of {name}")
    return array


def messages_in(
    package: Package, like: PyTree, requested: np.ndarray, others: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Validate the arrays of messages in a response; return them by the names of their leaves.

    Args:
        package: from the node, not trusted.
        like: an example message; its leaves must be described in its order.
        requested: the clients; a node may not reply for others.
        others: the names of the arrays before the messages.
    """
    if not np.array_equal(_integers(package.arrays, "ids"), requested):
        raise BadPackage("a response for other clients than requested")
    received, expected = [*package.arrays], [*others, *(_MESSAGE + name for name in names(like))]
    if set(received) == set(expected) and received != expected:
        raise BadPackage("arrays in another order than requested")
    message_names = [name for name in received if name not in others]
    if package.common or not all(name.startswith(_MESSAGE) for name in message_names):
        raise BadPackage("arrays that were not requested")
    return {name[len(_MESSAGE) :]: package.arrays[name] for name in message_names}


def response_bytes(like: PyTree, clients: int, adds: bool) -> int:
    """Return the largest size of a response's arrays, in bytes."""
    leaves = jax.tree.leaves(like)
    message = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return clients * (32 + 8 * len(leaves)) + message * (1 if adds else clients)


def is_answer(package: Package, exchange: int) -> bool:
    """Check whether a response claims to answer this exchange."""
    number = package.settings.get("exchange")
    return type(number) is int and number == exchange
