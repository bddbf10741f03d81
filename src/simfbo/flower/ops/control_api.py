"""An operator's requests to the SuperLink: register nodes, and list, start, stop and watch runs.

Every request is signed with the operator's key; the SuperLink rejects all others.
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

_RECOVERY = 120.0  # seconds for a SuperLink to restart

proto: Any = control_pb2  # its names are generated at run time


class Unreachable(UserError):
    """The SuperLink does not respond."""


class Signer:
    """Signs the requests of Flower's client."""

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
    """Pack an app's folder into the single file that is sent to nodes."""
    try:
        return build_fab_from_disk(app)
    except (OSError, ValueError) as error:
        raise UserError(f"{app} is not a Flower app: {' '.join(str(error).split())}") from None


def digest(app: Path) -> str:
    """Return the digest that identifies an app."""
    return hashlib.sha256(bundle(app)).hexdigest()


def sync_nodes(layout: Layout) -> None:
    """Register the nodes whose public keys are in the folder, and unregister all others."""
    admitted = set(filter(None, map(node_form, map(layout.identity, layout.public_keys()))))
    with _client(layout) as client:
        nodes = client.ListNodes(proto.ListNodesRequest()).nodes_info
        registered = {
            node.public_key: node.node_id for node in nodes if node.status != "unregistered"
        }
        for key in admitted - registered.keys():
            client.RegisterNode(proto.RegisterNodeRequest(public_key=key))
        for key in registered.keys() - admitted:
            client.UnregisterNode(proto.UnregisterNodeRequest(node_id=registered[key]))


def list_nodes(layout: Layout) -> list[Json]:
    """Return the SuperLink's nodes, with the names of their keys."""
    names = {node_form(layout.identity(file)): file.stem for file in layout.public_keys()}
    with _client(layout) as client:
        response = client.ListNodes(proto.ListNodesRequest())
    return [
        {
            "node-id": str(node.node_id),
            "key": names.get(node.public_key, ""),
            "status": node.status,
            "online-elapsed": _seconds(node.last_activated_at, response.now),
        }
        for node in sorted(response.nodes_info, key=lambda node: node.registered_at)
        if node.status != "unregistered"
    ]


def list_runs(layout: Layout, number: str | None = None) -> list[Json]:
    """Return the SuperLink's runs, the latest first, or one of them."""
    query = {} if number is None else {"run_id": int(number)}
    with _client(layout) as client:
        response = client.ListRuns(proto.ListRunsRequest(**query))
    return [
        {
            "run-id": str(run.run_id),
            "app": run.fab_hash,
            "status": ":".join(filter(None, (run.status.status, run.status.sub_status))),
            "elapsed": _seconds(run.running_at, run.finished_at or response.now),
        }
        for run in sorted(response.run_dict.values(), key=lambda run: run.pending_at, reverse=True)
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
    """Check whether a run is over; waits for an unreachable SuperLink."""
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
    """Yield a signing client; its errors are raised as sentences."""
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
    """Return the SuperLink's reason for a rejection."""
    if (error := FlowerError.from_json(response.text)) is not None:
        return " ".join(filter(None, (error.message, error.public_details)))
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {response.status_code}."


def _seconds(begin: str, end: str) -> float:
    """Return the seconds between two times in ISO format; 0 if the first is empty."""
    if not begin:
        return 0.0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
