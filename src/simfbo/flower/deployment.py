"""A deployment: what the server and the clients of a federation must agree upon.

Both sides build it from the same code (docs/how-to-deploy.md); the server uses the algorithm's
rounds, a client its works and its own data. Nothing here depends on what carries the messages.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.core.aggregation import Aggregators
from simfbo.core.data import FederatedData, checked_weights, from_clients
from simfbo.core.federation import Algorithm
from simfbo.core.gate import Gate
from simfbo.core.local_work import LocalWork
from simfbo.core.problem import PyTree
from simfbo.core.sampling import Sampler
from simfbo.engines import SimulatedFederation
from simfbo.errors import UserError
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
        clients: n, how many clients there are in all.
        load_client: (client, the node's settings) -> its (lower, upper) samples, each a pytree of
            arrays, sample after sample; called only where the data is.
        example: (lower, upper) of any one client, a sample is enough: what clients' data look
            like. The server finds the shape of messages with it, and clients check theirs.
        rounds: iterations.
        batch_size: as in `federate`.
        p: the clients' weights; by default the numbers of samples that the nodes state once,
            before the first round.
        sampler: who is asked; everyone by default.
        local_work: how much each does; one step by default.
        gate: what a reply must be like; finite by default.
        aggregators: how replies are combined; weighted sums by default.
        evaluate: (state) -> metrics by name, on the server.
        every: evaluate after so many iterations.
        seed: of every random draw, so that a simulation can repeat the run.
        secret: the server draws cohorts and its noise, and clients draw their batches and noise,
            from the system's own randomness, which nobody can repeat, in place of the seed.
        partial_sums: a node adds up its clients' messages and sends one sum: less to send, and
            the gate is then the node's. By default it sends each.
        timeout: seconds after which a node that has not replied is left out.
        wait: seconds to wait for the nodes of all clients before the first round.
    """

    algorithm: Algorithm
    x0: PyTree
    y0: PyTree
    clients: int
    load_client: LoadClient
    example: tuple[PyTree, PyTree]
    rounds: int
    batch_size: int | None = None
    p: Sequence[float] | None = None
    sampler: Sampler | None = None
    local_work: LocalWork | None = None
    gate: Gate | None = None
    aggregators: Aggregators | None = None
    evaluate: Evaluate | None = None
    every: int = 1
    seed: int = 0
    secret: bool = False
    partial_sums: bool = False
    timeout: float = 600.0
    wait: float = 120.0


def clients_of(node: Settings, clients: int) -> list[int]:
    """Return the numbers of the clients that a node holds, by its settings.

    Either it names them, `clients="0-9,12"`, or it is one of several equal parts, as Flower's
    simulation says it: `partition-id` out of `num-partitions`.

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
            f"A node holds the clients {found or 'none'} of {clients}: give it some of the numbers "
            f"0 to {clients - 1}, each once and in order."
        )
    return found


def simulate(plan: Deployment, node: Settings = MappingProxyType({}), **options: Any) -> History:
    """Return the history of a deployment's run with all clients on this machine.

    The same numbers as on Flower, to rounding: a rehearsal, where `load_client` can find data here.

    Args:
        plan: the deployment.
        node: settings for `load_client`.
        options: further ones of `run`, such as `directory`.
    """
    data = load_shard(plan, range(plan.clients), node)
    if plan.p is not None:
        data = replace(data, p=checked_weights(plan.p, plan.clients))
    federation = SimulatedFederation(
        data, plan.sampler, plan.local_work, gate=plan.gate, aggregators=plan.aggregators
    )
    return run(plan.algorithm, federation, plan.x0, plan.y0, **run_options(plan), **options)


def run_options(plan: Deployment) -> dict[str, Any]:
    """Return what a deployment says of a run, as options of `run`."""
    return {
        "rounds": plan.rounds,
        "seed": plan.seed,
        "evaluate": plan.evaluate,
        "every": plan.every,
    }


def load_shard(plan: Deployment, ids: Sequence[int], node: Settings) -> FederatedData:
    """Return the data of some clients, loaded, after a check that it is like the example."""
    loaded = [plan.load_client(i, node) for i in ids]
    for i, parts in zip(ids, loaded, strict=True):
        for name, found, wanted in zip(("lower", "upper"), parts, plan.example, strict=True):
            _require_alike(i, name, found, wanted)
    lower, upper = zip(*loaded, strict=True)
    return from_clients(lower, upper, batch_size=plan.batch_size, ids=ids)


def _named(text: str, most: int) -> list[int]:
    """Return the numbers of a list such as 0-9,12, none above `most`."""
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", text):
        raise UserError(f"A node's clients must be written as 0-9,12, got '{text}'.")
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), min(int(last or first), most) + 1)
    return found


def _part(node: Settings) -> tuple[int, int]:
    part, parts = node.get("partition-id"), node.get("num-partitions")
    if not isinstance(part, int) or not isinstance(parts, int) or not 0 <= part < parts:
        raise UserError(
            "A node must say which clients it holds: --node-config \"clients='0-9'\", or "
            "partition-id and num-partitions."
        )
    return part, parts


def _require_alike(client: int, name: str, found: PyTree, wanted: PyTree) -> None:
    """Raise unless a client's samples have the example's structure, types and shapes."""

    def kind(leaf: Any) -> tuple:
        array = np.asarray(leaf)
        return array.dtype.name, *array.shape[1:]

    looks = [jax.tree.map(kind, tree) for tree in (found, wanted)]
    if jax.tree.structure(found) != jax.tree.structure(wanted) or looks[0] != looks[1]:
        raise UserError(
            f"Client {client}'s {name} samples are {looks[0]} where the example has {looks[1]}: "
            "return the same from load_client."
        )
