"""A deployment: what the server and the clients of a federation must agree on.

Both sides build it from the same code (docs/how-to-deploy.md): the server runs the algorithm's
rounds, a node its client steps on local data. Nothing here depends on what carries the messages.
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
    """Everything about a run except what carries its messages.

    Attributes:
        algorithm: what runs.
        x0: initial upper variable.
        y0: initial lower variable.
        clients: n, the total number of clients.
        load_client: (client, the node's settings) -> its (lower, upper) samples, each a pytree of
            arrays with the sample along the first axis; called only where the data is.
        example: (lower, upper) samples of any one client, one sample is enough. The server derives
            the shapes of messages from it, and nodes check their data against it.
        rounds: iterations.
        batch_size: samples per minibatch; None for full batches.
        p: the clients' weights; by default the numbers of samples, which nodes report once before
            the first round.
        sampler: which clients take part; everyone by default.
        local_work: how many local steps each client takes; one by default.
        gate: what a reply must be like; finite by default.
        aggregators: how replies are combined; weighted sums by default.
        codecs: how messages are coded, by direction and channel; not at all by default.
        evaluate: (state) -> metrics by name, on the server.
        client_metrics: what nodes measure on their clients' upper samples whenever a state is
            evaluated, by name, as in `run`; for a server without data.
        every: evaluate after this many iterations.
        seed: of every random draw, so that a simulation can reproduce the run.
        secret: draw cohorts, batches and noise from the system's own randomness, which nobody can
            reproduce, instead of the seed.
        partial_sums: let a node add up its clients' messages and send the sum: fewer bytes, but
            the node applies the gate, and the server only checks that the sum is possible. By
            default a node sends each message.
        node_aggregators: with partial sums, how the nodes' means are combined, so that few hostile
            nodes do little; weighted sums by default. Its clients count for a node by weight.
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
    """Return the numbers of the clients that a node holds, according to its settings.

    They are either listed, `clients="0-9,12"`, or one of several equal parts, as in Flower's
    simulation: part `partition-id` of `num-partitions`.

    Example:
        >>> clients_of({"clients": "0-2,7"}, 10)
        [0, 1, 2, 7]
        >>> clients_of({"partition-id": 1, "num-partitions": 3}, 10)
        [3, 4, 5]
    """
    if "clients" in node:
        found = _named(str(node["clients"]), clients)
    else:
        part, parts = _part(node)
        found = list(range(clients * part // parts, clients * (part + 1) // parts))
    if not found or found != sorted(set(found)) or found[-1] >= clients:
        raise UserError(
            f"A node has the clients {found or 'none'} of {clients}: list numbers from 0 to "
            f"{clients - 1}, each once and in order."
        )
    return found


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
        detect_anomalies: whether clients whose messages stand out are reported, as on Flower.
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
        data, plan.sampler, plan.local_work, gate=plan.gate, aggregators=plan.aggregators,
        codecs=plan.codecs, detect_anomalies=detect_anomalies,
    )  # fmt: skip
    return run(plan.algorithm, federation, plan.x0, plan.y0, **run_options(plan), **options)


def with_arrays(plan: Deployment) -> Deployment:
    """Return a deployment whose variables are arrays, as server and nodes must both have them."""
    return plan._replace(x0=variable(plan.x0, "x0"), y0=variable(plan.y0, "y0"))


def require_consistent(plan: Deployment) -> None:
    """Raise if a deployment asks for things that exclude each other."""
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
    """Return a deployment's options of `run`."""
    return {
        "rounds": plan.rounds,
        "seed": plan.seed,
        "evaluate": plan.evaluate,
        "client_metrics": plan.client_metrics,
        "every": plan.every,
    }


def client_steps_of(plan: Deployment) -> dict[str, ClientStep]:
    """Return every client step that a node may be asked for, by name."""
    if plan.client_metrics is None:
        return plan.algorithm.client_steps
    step = evaluation_of(plan.client_metrics, plan.algorithm).client_step
    return {**plan.algorithm.client_steps, step.__name__: step}


def load_shard(plan: Deployment, ids: Sequence[int], node: Settings) -> FederatedData:
    """Load the data of some clients, and check that it looks like the example."""
    loaded = [plan.load_client(i, node) for i in ids]
    for i, parts in zip(ids, loaded, strict=True):
        for name, found, wanted in zip(("lower", "upper"), parts, plan.example, strict=True):
            _require_alike(i, name, found, wanted)
    lower, upper = zip(*loaded, strict=True)
    return from_clients(lower, upper, batch_size=plan.batch_size, ids=ids)


def _named(text: str, most: int) -> list[int]:
    """Return the numbers in a list such as 0-9,12; ranges are cut off above `most`."""
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", text):
        raise UserError(f"A node's clients must be a list such as 0-9,12, got '{text}'.")
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), min(int(last or first), most) + 1)
    return found


def _part(node: Settings) -> tuple[int, int]:
    part, parts = node.get("partition-id"), node.get("num-partitions")
    if not isinstance(part, int) or not isinstance(parts, int) or not 0 <= part < parts:
        raise UserError(
            "A node's settings must list its clients: --node-config \"clients='0-9'\", or "
            "partition-id and num-partitions."
        )
    return part, parts


def _require_alike(client: int, name: str, found: PyTree, wanted: PyTree) -> None:
    """Raise unless a client's samples have the example's structure, types and shapes."""

    def kind(leaf: PyTree) -> tuple[str | int, ...]:
        array = np.asarray(leaf)
        return array.dtype.name, *array.shape[1:]

    looks = [jax.tree.map(kind, tree) for tree in (found, wanted)]
    if jax.tree.structure(found) != jax.tree.structure(wanted) or looks[0] != looks[1]:
        raise UserError(
            f"Client {client}'s {name} samples are {looks[0]}, but the example has {looks[1]}: "
            "load_client must return samples like the example."
        )
