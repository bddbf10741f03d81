"""Flower as the transport: the apps of a deployment, and the engine on a Flower grid.

This module, `bounded` and three of `simfbo.flower.ops` import flwr. A message holds blocks of bytes
and texts that describe them (`simfbo.flower.wire`); its type is `train.` and the client step's
name.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, final

import numpy as np

from simfbo.core.data import FederatedData
from simfbo.core.exchange import Reason
from simfbo.errors import MissingExtra, UserError, missing, plain
from simfbo.flower.deployment import (
    Deployment,
    Settings,
    client_steps_of,
    clients_of,
    load_shard,
    run_options,
    with_arrays,
)
from simfbo.flower.discovery import LOG
from simfbo.flower.federation import DistributedFederation
from simfbo.flower.memory import MEMORY, Both, DiskStore, Leaves, Store
from simfbo.flower.node import Node
from simfbo.flower.transport import HELLO, Envelope, Package, Response
from simfbo.flower.wire import BadPackage, pack, unpack
from simfbo.runs.files import Json, keep_compilations, write_atomic
from simfbo.runs.history import History
from simfbo.runs.runner import run

try:
    import httpx
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.supercore.run import RunNotRunningException

    from simfbo.flower.bounded import bytes_in, inflating_at_most
    from simfbo.flower.ops.fast_nodes import hasten_pulls
except ModuleNotFoundError:
    raise MissingExtra(missing("flwr", "flower")) from None

_ERRORS = {  # Flower's codes
    1: (Reason.NODE_FAILED, "did not reply: its app cannot be loaded"),
    3: (Reason.TIMED_OUT, Reason.TIMED_OUT.text),
    4: (Reason.TIMED_OUT, Reason.TIMED_OUT.text),
    5: (Reason.NODE_AWAY, Reason.NODE_AWAY.text),
    7: (Reason.NODE_FAILED, "refuses this app, which is not on its list (up --only-apps)"),
    8: (Reason.NODE_FAILED, "did not reply: its process died"),
}
_WEIGHTS = "weights.json"
_SMALL = 16 * 1024  # bytes

Plan = Callable[[Settings], Deployment]


class FlowerTransport:
    """Sends envelopes as Flower messages."""

    def __init__(self, grid: Grid) -> None:
        """Take a run's grid."""
        hasten_pulls()
        self._grid = grid
        self._largest: dict[str, int] = {}  # bytes of arrays in a response, by number

    def nodes(self) -> set[int]:
        """Return the SuperNodes that are online."""
        return set(self._grid.get_node_ids())

    def send(self, envelopes: Sequence[Envelope], seconds: float) -> list[str | None]:
        """Send envelopes with a time to live; return their numbers, None for those not sent."""
        messages = [_message(envelope, seconds) for envelope in envelopes]
        numbers: list[str | None] = [*self._grid.push_messages(messages)] if messages else []
        if len(numbers) != len(envelopes):
            return [None] * len(envelopes)
        pairs = zip(numbers, envelopes, strict=True)
        self._largest |= {number: envelope.largest for number, envelope in pairs if number}
        return numbers

    def fetch(self, numbers: Iterable[str]) -> list[Response]:
        """Return the responses that have arrived to envelopes of these numbers, each only once.

        Replies are pulled one by one, so an unreadable one does not affect the others, and the
        request that a reply claims to answer does not matter.
        """
        wanted = [*numbers]
        self._largest = {number: self._largest.get(number, 0) for number in wanted}
        return [response for number in wanted for response in self._fetch(number)]

    def _fetch(self, number: str) -> list[Response]:
        """Return the response to an envelope, if it has arrived."""
        try:
            with inflating_at_most(self._largest[number]):
                replies = list(self._grid.pull_messages([number]))
            return [_response(number, reply) for reply in replies[:1]]
        except (httpx.HTTPError, RunNotRunningException):
            raise
        except Exception:  # untrusted bytes can raise anything
            return [Response(number, None, Reason.MALFORMED, "sent an unreadable message")]


@final
class FlowerFederation(DistributedFederation):
    """Clients on other machines, reached through a Flower grid."""

    def __init__(self, grid: Grid, plan: Deployment, poll: float = 0.05) -> None:
        """Take a run's grid and the deployment.

        Args:
            grid: from the ServerApp's main function.
            plan: the deployment.
            poll: seconds between polls for replies, at least a tenth of the time waited so far.
        """
        super().__init__(FlowerTransport(grid), plan, poll)


def server_app(plan: Plan) -> ServerApp:
    """Return the ServerApp of a deployment; it writes checkpoints and resumes from them.

    Args:
        plan: (run configuration) -> deployment; the same function as for `client_app`. The
            configuration's `folder` is where the history and checkpoints are written.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        keep_compilations()
        config = dict(context.run_config)
        folder = Path(str(config.pop("folder", "") or f"runs/flower-{context.run_id}"))
        serve(grid, plan(context.run_config), folder, config)

    return app


def serve(grid: Grid, plan: Deployment, folder: Path, config: Settings) -> History:
    """Start or resume the run of a deployment in a folder, and return its history.

    Args:
        grid: from the ServerApp's main function.
        plan: the deployment.
        folder: for the history and checkpoints.
        config: for the history's header.
    """
    _show_log()
    federation = FlowerFederation(grid, plan)
    file = folder / _WEIGHTS
    weights = federation.connect(json.loads(file.read_text()) if file.is_file() else None)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(weights))

    def log(t: int, record: Json | None) -> None:
        parts = ", ".join(f"{name} {took:.2f} s" for name, took in federation.timing.items())
        LOG.info("iteration %s of %s; last exchange: %s", t, plan.rounds, parts or "none yet")

    history = run(
        plan.algorithm,
        federation,
        plan.x0,
        plan.y0,
        **run_options(plan),
        directory=folder,
        config=dict(config),
        on_round=log,
        resume=True,
        checkpoint_seconds=0.0,
    )
    end = history.end or {}
    if end.get("status") != "finished":
        raise UserError(f"The run in {folder} ended as {end.get('status')}: {end.get('reason')}.")
    return history


def _show_log() -> None:
    """Show simfbo's log; the root logger's would include every HTTP request."""
    if not LOG.handlers:
        LOG.addHandler(logging.StreamHandler())
        LOG.setLevel(logging.INFO)
        LOG.propagate = False


def client_app(plan: Plan) -> ClientApp:
    """Return the ClientApp that runs the client steps of a deployment's algorithm on a node.

    Args:
        plan: (run configuration) -> deployment; the same function as for `server_app`.
    """
    return _NodeApp(plan)


@lru_cache(maxsize=1)
def _revived(plan: Plan) -> ClientApp:
    """Rebuild the app in a worker of a simulation, which unpickles it with every message."""
    return _NodeApp(plan)


class _NodeApp(ClientApp):
    """A ClientApp with a handler per client step, added once the run's configuration is known."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._source = plan
        self._named: set[str] = set()
        self._run: int | None = None
        self._plan = lru_cache(maxsize=8)(lambda config: with_arrays(plan(json.loads(config))))
        self._node = lru_cache(maxsize=4)(self._load)  # a worker of a simulation hosts many nodes
        self.query(HELLO)(self._hello)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments to rebuild the app in another process."""
        return _revived, (self._source,), {"_lifespan": self._lifespan, "_mods": self._mods}

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply to a message."""
        keep_compilations()
        for name in client_steps_of(self._plan(json.dumps(context.run_config))):
            if name not in self._named:
                self._named.add(name)
                self.train(name)(self._train)
        return super().__call__(message, context)

    def _node_and_data(self, context: Context) -> tuple[Node, FederatedData]:
        """Return this node and its data, cached during a run."""
        if context.run_id != self._run:
            self._run = context.run_id
            self._node.cache_clear()
        return self._node(json.dumps(context.run_config), json.dumps(context.node_config))

    def _load(self, run_config: str, node_config: str) -> tuple[Node, FederatedData]:
        """Load the data of a node with these settings."""
        plan, settings = self._plan(run_config), json.loads(node_config)
        data = load_shard(plan, clients_of(settings, plan.clients), settings)
        for client in data.not_finite:
            LOG.warning(
                "Client %s's samples hold NaN or infinite numbers, so its messages may not "
                "count: clean or drop those rows.",
                client,
            )
        initial, steps = {"x": plan.x0, "y": plan.y0}, client_steps_of(plan)
        return Node(plan.algorithm, initial, data, plan.codecs, steps), data

    def _hello(self, message: Message, context: Context) -> Message:
        """Report the clients of this node, with their numbers of samples."""
        _, data = self._node_and_data(context)
        samples = np.asarray(data.lower.count)
        if data.lower.samples is not data.upper.samples:  # shared rows count once
            samples = samples + np.asarray(data.upper.count)
        report = {"clients": data.ids.tolist(), "samples": samples.tolist()}
        return Message(_content(Package(report, {})), reply_to=message)

    def _train(self, message: Message, context: Context) -> Message:
        """Reply with the messages of this node's part of a cohort."""
        at, begin = time.time(), time.perf_counter()
        node, _ = self._node_and_data(context)
        loaded = time.perf_counter()
        client_step = message.metadata.message_type.partition(".")[2]
        response = node.respond(client_step, _package(message.content), partial(_store, context))
        end = time.perf_counter()
        response.settings.update(began=at, load=loaded - begin, compute=end - loaded)
        return Message(_content(response), reply_to=message)


class _StateStore:
    """A store of client memory in Flower's state of a node."""

    def __init__(self, state: RecordDict, run: str) -> None:
        """Take the state and the name of the run."""
        self._state, self._run = state, run

    def _name(self, client: int, number: int) -> str:
        return f"memory {self._run} {client} {number}"

    def numbers(self, client: int) -> list[int]:
        """Return the versions of a client's memory, ascending."""
        start = f"memory {self._run} {client} "
        return sorted(int(name[len(start) :]) for name in self._state if name.startswith(start))

    def read(self, client: int, number: int) -> Leaves | None:
        """Return the arrays of a version; None if it does not exist."""
        record: Any = self._state.get(self._name(client, number))
        return None if record is None else [record[str(k)].numpy() for k in range(len(record))]

    def write(self, client: int, number: int, leaves: Leaves) -> None:
        """Save a version."""
        arrays = {str(k): Array(leaf) for k, leaf in enumerate(leaves)}
        self._state[self._name(client, number)] = ArrayRecord(arrays)

    def remove(self, client: int, number: int) -> None:
        """Delete a version."""
        self._state.pop(self._name(client, number), None)


def _store(context: Context, run: str) -> Store:
    """Return the store of a node's client memory in a run."""
    in_state, folder = _StateStore(context.state, run), context.node_config.get(MEMORY)
    return Both(in_state, DiskStore(Path(str(folder)), run)) if folder else in_state


def _message(envelope: Envelope, seconds: float) -> Message:
    """Convert an envelope to a Flower message."""
    step, group = envelope.client_step, str(envelope.exchange or "")
    kind = f"query.{HELLO}" if step == HELLO else f"train.{step}"
    return Message(_content(envelope.package), envelope.node, kind, ttl=seconds, group_id=group)


def _response(number: str, reply: Message) -> Response:
    """Convert a Flower message to a response."""
    if reply.has_error():
        code, text = reply.error.code, plain(" ".join(str(reply.error.reason).split()), 200)
        failure = Reason.NODE_FAILED, f"did not reply: its app failed with {text}"
        return Response(number, None, *_ERRORS.get(code, failure))
    try:
        return Response(number, _package(reply.content))
    except BadPackage as error:
        return Response(number, None, error.reason, f"sent {error}")


def _content(package: Package) -> RecordDict:
    """Convert a package to the content of a Flower message.

    Every record is three objects that Flower sends one by one, so small blocks are sent with the
    texts; a large block for all nodes is sent once, since Flower identifies objects by their
    digest.
    """
    content = RecordDict()
    texts: Json = {"settings": json.dumps(package.settings)}
    for name, arrays in (("own", package.arrays), ("common", package.common)):
        block, texts[f"{name} arrays"] = pack(arrays)
        if len(block) <= _SMALL:
            texts[name] = block
        else:
            content[name] = ArrayRecord({"block": Array(np.frombuffer(block, np.uint8))})
    content["texts"] = ConfigRecord(texts)
    return content


def _package(content: RecordDict) -> Package:
    """Read the package in a message's content; raise `BadPackage` if it is invalid."""
    try:
        texts: Any = content["texts"]
        settings = json.loads(texts["settings"])
        individual, common = (_arrays(content, texts, name) for name in ("own", "common"))
    except BadPackage:
        raise
    except Exception as error:  # untrusted content can raise anything
        raise BadPackage("a message that is not a response") from error
    if not isinstance(settings, dict):
        raise BadPackage("settings that are not a table")
    return Package(settings, individual, common)


def _arrays(content: RecordDict, texts: Any, name: str) -> dict[str, np.ndarray]:
    record: Any = content.get(name)
    block = texts[name] if record is None else bytes_in(record["block"])
    return unpack(block, texts[f"{name} arrays"])
