"""Flower as the carrier of messages: the apps of a deployment, and the engine on a Flower grid.

The only file that imports flwr. A message holds one block of bytes and two texts that describe it
(`simfbo.flower.wire`); its type is `train.` and the name of the work.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import RunNotRunningException

from simfbo.core.data import FederatedData
from simfbo.core.gate import NO_REPLY
from simfbo.engines.compile_cache import keep_compilations
from simfbo.errors import UserError
from simfbo.flower.deployment import Deployment, Settings, clients_of, load_shard, run_options
from simfbo.flower.federation import AWAY, HELLO, LOG, Answer, DistributedFederation, Letter
from simfbo.flower.node import Node, Package
from simfbo.flower.ops.fast_nodes import hasten_pulls
from simfbo.flower.wire import BadPackage, pack, unpack
from simfbo.runs.checkpoint import put
from simfbo.runs.history import History
from simfbo.runs.runner import run

_ERRORS = {  # Flower's codes
    1: f"{NO_REPLY}: its app does not load",
    3: f"{NO_REPLY} in time",
    4: f"{NO_REPLY} in time",
    5: AWAY,
    8: f"{NO_REPLY}: its process died",
}
_WEIGHTS = "weights.json"
_SMALL = 16 * 1024  # bytes

Plan = Callable[[Settings], Deployment]


class FlowerPost:
    """Letters as Flower messages."""

    def __init__(self, grid: Grid) -> None:
        """Take a run's grid."""
        hasten_pulls()
        self._grid = grid

    def nodes(self) -> set[int]:
        """Return the SuperNodes that are there now."""
        return set(self._grid.get_node_ids())

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str | None]:
        """Return the numbers of letters sent, which expire after so many seconds; None if not."""
        messages = [_message(letter, seconds) for letter in letters]
        numbers: list[str | None] = [*self._grid.push_messages(messages)] if messages else []
        return numbers if len(numbers) == len(letters) else [None] * len(letters)

    def fetch(self, letters: Iterable[str]) -> list[Answer]:
        """Return the answers that have come to letters of these numbers; each only once.

        One by one: a reply that cannot be read takes no other with it, and what a reply says of
        the letter it answers does not matter.
        """
        return [answer for number in letters for answer in self._fetch(number)]

    def _fetch(self, number: str) -> list[Answer]:
        """Return the answer to a letter, if there is one."""
        try:
            found = list(self._grid.pull_messages([number]))
        except (httpx.HTTPError, RunNotRunningException):
            raise
        except Exception:  # whatever a stranger's bytes can do to a reader
            return [Answer(number, None, "sent something that cannot be read")]
        return [_answer(number, reply) for reply in found[:1]]


@final
class FlowerFederation(DistributedFederation):
    """Clients on other machines, reached through a Flower grid."""

    def __init__(self, grid: Grid, plan: Deployment, poll: float = 0.05) -> None:
        """Take a run's grid and what server and clients agreed upon.

        Args:
            grid: from the ServerApp's main function.
            plan: the deployment.
            poll: seconds between looks for replies, or a tenth of the time waited so far.
        """
        super().__init__(FlowerPost(grid), plan, poll)


def server_app(plan: Plan) -> ServerApp:
    """Return the ServerApp of a deployment, with checkpoints: a killed run goes on where it was.

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
    """Return the history of a deployment's run, begun or gone on with in a folder.

    Args:
        grid: from the ServerApp's main function.
        plan: the deployment.
        folder: for the history and checkpoints.
        config: goes into the history's header.
    """
    _speak()
    federation = FlowerFederation(grid, plan)
    file = folder / _WEIGHTS
    weights = federation.connect(json.loads(file.read_text()) if file.is_file() else None)
    folder.mkdir(parents=True, exist_ok=True)
    put(file, json.dumps(weights).encode())

    def say(t: int, record: dict[str, Any] | None) -> None:
        parts = ", ".join(f"{name} {took:.2f} s" for name, took in federation.timing.items())
        LOG.info("round %s of %s; the last exchange: %s", t, plan.rounds, parts or "none yet")

    history = run(
        plan.algorithm,
        federation,
        plan.x0,
        plan.y0,
        **run_options(plan),
        directory=folder,
        config=config,
        on_round=say,
        resume=True,
        checkpoint_seconds=0.0,
    )
    end = history.end or {}
    if end.get("status") != "finished":
        raise UserError(f"The run in {folder} ended as {end.get('status')}: {end.get('reason')}.")
    return history


def _speak() -> None:
    """Let our own log be heard; the root's would bring every HTTP request with it."""
    if not LOG.handlers:
        LOG.addHandler(logging.StreamHandler())
        LOG.setLevel(logging.INFO)
        LOG.propagate = False


def client_app(plan: Plan) -> ClientApp:
    """Return the ClientApp that runs the works of a deployment's algorithm on a node's clients.

    Args:
        plan: (run configuration) -> deployment; the same function as for `server_app`.
    """
    return _NodeApp(plan)


@lru_cache(maxsize=1)
def _revived(plan: Plan) -> ClientApp:
    """Return the app in a worker of a simulation, which receives it anew with every message."""
    return _NodeApp(plan)


class _NodeApp(ClientApp):
    """A ClientApp with a handler per work, made when the run's configuration is known."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._source = plan
        self._named: set[str] = set()
        self._run: int | None = None
        self._plan = lru_cache(maxsize=8)(lambda config: plan(json.loads(config)))
        self._node = lru_cache(maxsize=4)(self._load)  # a worker of a simulation is many nodes
        self.query(HELLO)(self._hello)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make the app again elsewhere."""
        return _revived, (self._source,), {"_lifespan": self._lifespan, "_mods": self._mods}

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply to a message."""
        keep_compilations()
        for work in self._plan(json.dumps(context.run_config)).algorithm.works:
            if work.__name__ not in self._named:
                self._named.add(work.__name__)
                self.train(work.__name__)(self._train)
        return super().__call__(message, context)

    def _held(self, context: Context) -> tuple[Node, FederatedData]:
        """Return what this node holds; loaded once per run where the process stays."""
        if context.run_id != self._run:
            self._run = context.run_id
            self._node.cache_clear()
        return self._node(json.dumps(context.run_config), json.dumps(context.node_config))

    def _load(self, run_config: str, node_config: str) -> tuple[Node, FederatedData]:
        """Return what a node of these settings holds."""
        plan, settings = self._plan(run_config), json.loads(node_config)
        data = load_shard(plan, clients_of(settings, plan.clients), settings)
        return Node(plan.algorithm, {"x": plan.x0, "y": plan.y0}, data), data

    def _hello(self, message: Message, context: Context) -> Message:
        """Return which clients this node holds, and how many samples each has."""
        _, data = self._held(context)
        samples = np.asarray(data.lower.count) + np.asarray(data.upper.count)
        words = {"clients": data.ids.tolist(), "samples": samples.tolist()}
        return Message(_content(Package(words, {})), reply_to=message)

    def _train(self, message: Message, context: Context) -> Message:
        """Return what this node's part of a cohort sends."""
        at, begin = time.time(), time.perf_counter()
        node, _ = self._held(context)
        loaded = time.perf_counter()
        work = message.metadata.message_type.partition(".")[2]
        answer = node.answer(work, _package(message.content))
        end = time.perf_counter()
        answer.settings.update(began=at, load=loaded - begin, compute=end - loaded)
        return Message(_content(answer), reply_to=message)


def _message(letter: Letter, seconds: float) -> Message:
    """Return a letter as Flower sends it."""
    kind = f"query.{HELLO}" if letter.work == HELLO else f"train.{letter.work}"
    group = str(letter.exchange or "")
    return Message(_content(letter.package), letter.node, kind, ttl=seconds, group_id=group)


def _answer(number: str, reply: Message) -> Answer:
    """Return the reply to a letter as the engine reads it."""
    if reply.has_error():
        code, text = reply.error.code, " ".join(str(reply.error.reason).split())[:200]
        return Answer(number, None, _ERRORS.get(code, f"{NO_REPLY}: its app failed with {text}"))
    try:
        return Answer(number, _package(reply.content))
    except BadPackage as error:
        return Answer(number, None, f"sent {error}")


def _content(package: Package) -> RecordDict:
    """Return a package as the content of a Flower message.

    Every record is three objects that Flower sends one by one, so small blocks go with the texts;
    a large block that all nodes receive is sent once, since Flower knows objects by their digest.
    """
    content = RecordDict()
    texts: dict[str, Any] = {"settings": json.dumps(package.settings)}
    for name, arrays in (("own", package.arrays), ("common", package.common)):
        block, texts[f"{name} arrays"] = pack(arrays)
        if len(block) <= _SMALL:
            texts[name] = block
        else:
            content[name] = ArrayRecord({"block": Array(np.frombuffer(block, np.uint8))})
    content["texts"] = ConfigRecord(texts)
    return content


def _package(content: RecordDict) -> Package:
    """Return the package in a message's content; raise `BadPackage` where there is none."""
    try:
        texts: Any = content["texts"]
        settings = json.loads(texts["settings"])
        own, common = (_arrays(content, texts, name) for name in ("own", "common"))
    except BadPackage:
        raise
    except Exception as error:  # whatever a stranger can send
        raise BadPackage("something that is no answer") from error
    if not isinstance(settings, dict):
        raise BadPackage("settings that are no table")
    return Package(settings, own, common)


def _arrays(content: RecordDict, texts: Any, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one block."""
    record: Any = content.get(name)
    block = texts[name] if record is None else record["block"].numpy().tobytes()
    return unpack(block, texts[f"{name} arrays"])
