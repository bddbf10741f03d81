"""What an operator asks of the SuperLink: register nodes, list, start, stop and watch runs.

Every request is signed with the operator's key, and the SuperLink refuses those that are not.
"""

import hashlib
import time
import tomllib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import user_config_to_proto
from flwr.proto import control_pb2
from flwr.proto.fab_pb2 import Fab
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from simfbo.errors import UserError
from simfbo.flower.ops import operators
from simfbo.flower.ops.certificates import node_form
from simfbo.flower.ops.folder import Layout
from simfbo.runs.files import Json

_RECOVERY = 120.0  # seconds for a SuperLink to come back

proto: Any = control_pb2  # its names are made at run time


class Unreachable(UserError):
    """The SuperLink does not respond."""


class Signer:
    """Signs what Flower's client sends."""

    def __init__(self, key: Path) -> None:
        """Take an operator's private key."""
        self._key = key

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Sign a request and send it."""
        request = context.request
        words = request.method, request.url.path, request.content
        request.headers[operators.HEADER] = operators.sign(self._key, *words)
        return call_next(context)


def bundle(app: Path) -> bytes:
    """Return an app's folder as the one file that is sent to nodes."""
    try:
        return build_fab_from_disk(app)
    except (OSError, ValueError) as error:
        raise UserError(f"{app} is not a Flower app: {' '.join(str(error).split())}") from None


def digest(app: Path) -> str:
    """Return the digest by which nodes know an app."""
    return hashlib.sha256(bundle(app)).hexdigest()


def sync_nodes(layout: Layout) -> None:
    """Register the nodes whose public keys are in the folder, and unregister all others."""
    wanted = set(filter(None, map(node_form, map(layout.identity, layout.public_keys()))))
    with _client(layout) as client:
        found = client.ListNodes(proto.ListNodesRequest()).nodes_info
        known = {one.public_key: one.node_id for one in found if one.status != "unregistered"}
        for key in wanted - known.keys():
            client.RegisterNode(proto.RegisterNodeRequest(public_key=key))
        for key in known.keys() - wanted:
            client.UnregisterNode(proto.UnregisterNodeRequest(node_id=known[key]))


def list_nodes(layout: Layout) -> list[Json]:
    """Return the nodes that the SuperLink knows, with the names of their keys."""
    names = {node_form(layout.identity(file)): file.stem for file in layout.public_keys()}
    with _client(layout) as client:
        found = client.ListNodes(proto.ListNodesRequest())
    return [
        {
            "node-id": str(one.node_id),
            "key": names.get(one.public_key, ""),
            "status": one.status,
            "online-elapsed": _seconds(one.last_activated_at, found.now),
        }
        for one in sorted(found.nodes_info, key=lambda one: one.registered_at)
        if one.status != "unregistered"
    ]


def list_runs(layout: Layout, number: str | None = None) -> list[Json]:
    """Return the runs that the SuperLink knows, the last one first, or one of them."""
    only = {} if number is None else {"run_id": int(number)}
    with _client(layout) as client:
        found = client.ListRuns(proto.ListRunsRequest(**only))
    return [
        {
            "run-id": str(one.run_id),
            "app": one.fab_hash,
            "status": ":".join(filter(None, (one.status.status, one.status.sub_status))),
            "elapsed": _seconds(one.running_at, one.finished_at or found.now),
        }
        for one in sorted(found.run_dict.values(), key=lambda one: one.pending_at, reverse=True)
    ]


def start_run(layout: Layout, app: Path, settings: Path) -> str:
    """Start a run of an app with a TOML file of settings; return its number."""
    content = bundle(app)
    fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
    config = user_config_to_proto(tomllib.loads(settings.read_text()))
    with _client(layout) as client:
        started = client.StartRun(proto.StartRunRequest(fab=fab, override_config=config))
    if not started.HasField("run_id"):
        raise UserError("The SuperLink did not start the run: see its log.")
    return str(started.run_id)


def stop_run(layout: Layout, run: str) -> None:
    """Stop a run."""
    with _client(layout) as client:
        client.StopRun(proto.StopRunRequest(run_id=int(run)))


def is_over(layout: Layout, run: str) -> bool:
    """Return whether a run is over, as soon as the SuperLink can be reached."""
    deadline = time.monotonic() + _RECOVERY
    while True:
        try:
            return list_runs(layout, run)[0]["status"].startswith("finished")
        except Unreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def stream_log(layout: Layout, run: str) -> Iterator[str]:
    """Yield the log of a run's server, from its beginning, as it arrives."""
    with _client(layout) as client:
        for part in client.StreamLogs(proto.StreamLogsRequest(run_id=int(run))):
            yield part.log_output


@contextmanager
def _client(layout: Layout) -> Generator[ControlHttpClient]:
    """Yield a client that signs; what goes wrong with it is raised as a sentence."""
    setup, key = layout.read_setup(), operators.own_key(layout.operators)
    root = None if setup.insecure else (layout.certificates / "ca.crt").read_bytes()
    signed = [RuntimeVersionHttpInterceptor("simfbo"), Signer(key)]
    try:
        with ControlHttpClient.from_server_address(
            setup.address, setup.insecure, root, signed
        ) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise UserError(f"The SuperLink refused: {_reason(error.response)}") from None
    except httpx.RequestError as error:
        raise Unreachable(
            f"The SuperLink at {setup.address} does not respond ({error}): see "
            f"{layout.log('superlink')}."
        ) from None


def _reason(response: httpx.Response) -> str:
    """Return why the SuperLink refused."""
    if (known := FlowerError.from_json(response.text)) is not None:
        return " ".join(filter(None, (known.message, known.public_details)))
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {response.status_code}."


def _seconds(begin: str, end: str) -> float:
    """Return the seconds between two times in ISO format; 0 if there is no first one."""
    if not begin:
        return 0.0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
