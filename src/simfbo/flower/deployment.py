"""A deployment: the settings that server and clients of a federation share.

Both sides build it from the same code (docs/how-to-deploy.md): the server runs the algorithm's
rounds, a node its client steps on local data. Nothing here depends on the transport.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.codecs import Codecs
from simfbo.core.data import FederatedData, checked_weights, from_clients
from simfbo.core.federation import ClientStep
from simfbo.core.gate import Gate
from simfbo.core.local_work import LocalWork
from simfbo.core.method import Method
from simfbo.core.problem import Point, PyTree
from simfbo.core.sampling import AnySampler
from simfbo.core.validation import variable
from simfbo.engines import SimulatedFederation
from simfbo.errors import UserError
from simfbo.robust.aggregation import Aggregator
from simfbo.runs.client_metrics import Asked, evaluation_of
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.runs.runner import Evaluate, run

Settings = Mapping[str, Any]
LoadClient = Callable[[int, Settings], tuple[PyTree, PyTree]]


class Deployment(NamedTuple):
    """Everything about a run except its transport.

    Attributes:
        algorithm: the method.
        x0: initial upper variable.
        y0: initial lower variable.
        clients: n, the total number of clients.
        load_client: (client, the node's settings) -> its (lower, upper) samples, each a pytree of
            arrays with the sample along the first axis; called on the nodes only.
        example: (lower, upper) samples of any one client, one sample is enough. The server derives
            the shapes of messages from it, and nodes check their data against it.
        rounds: iterations.
        batch_size: samples per minibatch; None for full batches.
        p: the clients' weights; by default the numbers of samples, which nodes report once before
            the first round.
        sampler: selects the clients of a round; all by default.
        local_work: the local steps of each client; one by default.
        gate: the validation of replies; they must be finite by default.
        aggregators: of replies; weighted sums by default.
        codecs: by direction and channel; none by default.
        evaluate: (state) -> metrics by name, on the server.
        client_metrics: metrics by name that nodes measure on their clients' upper samples at every
            evaluation, as in `run`; for a server without data.
        every: iterations between evaluations.
        seed: of every random draw, so that a simulation can reproduce the run.
        secret: draw cohorts, batches and noise from the system's randomness instead of the seed, so
            that they cannot be reproduced.
        partial_sums: let a node sum its clients' messages: fewer bytes, but the node validates the
            replies, and the server only checks that the sum is possible. By default a node sends
            each message.
        node_aggregators: with partial sums, aggregators of the nodes' means, which limit the
            influence of a few hostile nodes; weighted sums by default. A node has the weight of its
            clients.
        timeout: seconds after which a node that has not replied is left out.
        wait: seconds to wait for the nodes of all clients before the first round.
    """

    algorithm: Method
    x0: PyTree
    y0: PyTree
    clients: int
    load_client: LoadClient
    example: tuple[PyTree, PyTree]
    rounds: int
    batch_size: int | None = None
    p: Sequence[float] | None = None
    sampler: AnySampler | None = None
    local_work: LocalWork | None = None
    gate: Gate | None = None
    aggregators: Point[Aggregator | None] | None = None
    codecs: Codecs | None = None
    evaluate: Evaluate | None = None
    client_metrics: Asked | None = None
    every: int = 1
    seed: int = 0
    secret: bool = False
    partial_sums: bool = False
    node_aggregators: Point[Aggregator | None] | None = None
    timeout: float = 600.0
    wait: float = 120.0


def clients_of(node: Settings, clients: int) -> list[int]:
    """Return the numbers of a node's clients, according to its settings.

    They are either listed, `clients="0-9,12"`, or one of several equal parts, as in Flower's
    simulation: part `partition-id` of `num-partitions`.

    Example:
        >>> clients_of({"clients": "0-2,7"}, 10)
        [0, 1, 2, 7]
        >>> clients_of({"partition-id": 1, "num-partitions": 3}, 10)
        [3, 4, 5]
    """
    if "clients" in node:
        numbers = _parse_list(str(node["clients"]), clients)
    else:
        part, parts = _part(node)
        numbers = list(range(clients * part // parts, clients * (part + 1) // parts))
    if not numbers or numbers != sorted(set(numbers)) or numbers[-1] >= clients:
        raise UserError(
            f"A node has the clients {numbers or 'none'} of {clients}: list numbers from 0 to "
            f"{clients - 1}, each once and in order."
        )
    return numbers


def simulate(
    plan: Deployment,
    node: Settings = MappingProxyType({}),
    *,
    detect_anomalies: bool = False,
    **options: Any,
) -> History:
    """Run a deployment with all clients on this machine, and return its history.

    The numbers equal those on Flower up to rounding. `load_client` must find its data here.

    Args:
        plan: the deployment.
        node: settings for `load_client`.
        detect_anomalies: report clients whose messages stand out, as on Flower.
        options: further options of `run`, such as `directory`.
    """
    if plan.node_aggregators is not None:
        raise UserError(
            "A simulation has no nodes to aggregate: leave out node_aggregators, or simulate with "
            "aggregators, where every client is a node of its own."
        )
    data = load_shard(plan, range(plan.clients), node)
    if plan.p is not None:
        data = replace(data, p=checked_weights(plan.p, plan.clients))
    federation = SimulatedFederation(
        data,
        plan.sampler,
        plan.local_work,
        gate=plan.gate,
        aggregators=plan.aggregators,
        codecs=plan.codecs,
        detect_anomalies=detect_anomalies,
    )
    return run(plan.algorithm, federation, plan.x0, plan.y0, **run_options(plan), **options)


def with_arrays(plan: Deployment) -> Deployment:
    """Convert a deployment's variables to arrays, on server and nodes alike."""
    return plan._replace(x0=variable(plan.x0, "x0"), y0=variable(plan.y0, "y0"))


def require_consistent(plan: Deployment) -> None:
    """Raise if options of a deployment exclude each other."""
    if plan.codecs is not None and plan.partial_sums:
        raise UserError("codecs code single messages, partial_sums adds them up: set one of them.")
    if plan.node_aggregators is None:
        return
    if not plan.partial_sums:
        raise UserError("node_aggregators combine the sums of nodes: set partial_sums=True.")
    if plan.aggregators is not None:
        raise UserError(
            "aggregators need every client's message, node_aggregators need sums: set one of them."
        )


def run_options(plan: Deployment) -> Json:
    """Return a deployment's options for `run`."""
    return {
        "rounds": plan.rounds,
        "seed": plan.seed,
        "evaluate": plan.evaluate,
        "client_metrics": plan.client_metrics,
        "every": plan.every,
    }


def client_steps_of(plan: Deployment) -> dict[str, ClientStep]:
    """Return all client steps that the server may request, by name."""
    if plan.client_metrics is None:
        return plan.algorithm.client_steps
    step = evaluation_of(plan.client_metrics, plan.algorithm).client_step
    return {**plan.algorithm.client_steps, step.__name__: step}


def load_shard(plan: Deployment, ids: Sequence[int], node: Settings) -> FederatedData:
    """Load the data of some clients, and check it against the example."""
    loaded = [plan.load_client(i, node) for i in ids]
    for i, parts in zip(ids, loaded, strict=True):
        for name, samples, example in zip(("lower", "upper"), parts, plan.example, strict=True):
            _require_alike(i, name, samples, example)
    lower, upper = zip(*loaded, strict=True)
    return from_clients(lower, upper, batch_size=plan.batch_size, ids=ids)


def _parse_list(text: str, most: int) -> list[int]:
    """Parse a list such as 0-9,12; ranges are cut off above `most`."""
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", text):
        raise UserError(f"A node's clients must be a list such as 0-9,12, got '{text}'.")
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), min(int(last or first), most) + 1)
    return numbers


def _part(node: Settings) -> tuple[int, int]:
    part, parts = node.get("partition-id"), node.get("num-partitions")
    if not isinstance(part, int) or not isinstance(parts, int) or not 0 <= part < parts:
        raise UserError(
            "A node's settings must list its clients: --node-config \"clients='0-9'\", or "
            "partition-id and num-partitions."
        )
    return part, parts


def _require_alike(client: int, name: str, samples: PyTree, example: PyTree) -> None:
    """Raise unless a client's samples have the example's structure, types and shapes."""

    def kind(leaf: PyTree) -> tuple[str | int, ...]:
        array = np.asarray(leaf)
        return array.dtype.name, *array.shape[1:]

    kinds = [jax.tree.map(kind, tree) for tree in (samples, example)]
    if jax.tree.structure(samples) != jax.tree.structure(example) or kinds[0] != kinds[1]:
        raise UserError(
            f"Client {client}'s {name} samples are {kinds[0]}, but the example has {kinds[1]}: "
            "load_client must return samples like the example."
        )
