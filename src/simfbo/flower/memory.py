"""Client memory on a node: versions, of which the server names the current one.

A node cannot know whether a client's reply will count, so it saves the memory after an exchange
under the number of that exchange. Every request names the version that a client continues from:
that of the last exchange in which its reply counted. A resumed run names the same versions again.
The memory itself never leaves the node.

It is saved in Flower's state of the node, which lasts for one run of Flower's, and, if the node's
settings name a folder (`memory`), on disk, for resumed runs and restarted nodes.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.errors import UserError
from simfbo.runs import checkpoint
from simfbo.runs.checkpoint import DamagedError
from simfbo.runs.files import write_atomic

MEMORY = "memory"  # the node's setting that names a folder
_RUNS = 4  # runs whose memory is kept on disk
Leaves = Sequence[np.ndarray]  # of a memory, in order
_TOKEN = re.compile(r"[0-9a-f]{16}")


class Versions(NamedTuple):
    """The memory versions of a request's clients.

    Attributes:
        run: a random name of the run.
        numbers: the exchange of each version, by position; 0 for none yet.
        oldest: the last exchange before the oldest checkpoint that the server may resume from.
    """

    run: str
    numbers: np.ndarray
    oldest: int = 0


class Store(Protocol):
    """A store of client memory, by client and number of the exchange."""

    def numbers(self, client: int) -> list[int]:
        """Return the versions of a client's memory, ascending."""
        ...

    def read(self, client: int, number: int) -> Leaves | None:
        """Return the arrays of a version; None if it does not exist."""
        ...

    def write(self, client: int, number: int, leaves: Leaves) -> None:
        """Save a version."""
        ...

    def remove(self, client: int, number: int) -> None:
        """Delete a version."""
        ...


class DiskStore:
    """The memory of one run in files, a folder per run; the oldest of several runs is removed."""

    def __init__(self, folder: Path, run: str) -> None:
        """Take the node's folder and the name of the run."""
        require_name(run)
        self._folder = folder / run
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            others = sorted(
                (path for path in folder.iterdir() if _TOKEN.fullmatch(path.name)),
                key=lambda path: path.stat().st_mtime,
            )
            for old in others[:-_RUNS]:
                shutil.rmtree(old, ignore_errors=True)

    def _file(self, client: int, number: int) -> Path:
        return self._folder / f"{client}-{number:010d}.npz"

    def numbers(self, client: int) -> list[int]:
        """Return the versions of a client's memory, ascending."""
        files = self._folder.glob(f"{client}-*.npz")
        return sorted(int(path.stem.partition("-")[2]) for path in files)

    def read(self, client: int, number: int) -> Leaves | None:
        """Return the arrays of a version; None if it does not exist or is damaged."""
        try:
            return list(checkpoint.load(self._file(client, number)).arrays.values())
        except (DamagedError, UserError):
            return None

    def write(self, client: int, number: int, leaves: Leaves) -> None:
        """Save a version."""
        data = checkpoint.encode(list(leaves), {"client": client, "exchange": number})
        write_atomic(self._file(client, number), data)

    def remove(self, client: int, number: int) -> None:
        """Delete a version."""
        self._file(client, number).unlink(missing_ok=True)


class Both:
    """Several stores with the same content: a version missing in one is read from another."""

    def __init__(self, *stores: Store) -> None:
        """Take the stores, the fastest first."""
        self._stores = stores

    def numbers(self, client: int) -> list[int]:
        """Return the versions of a client's memory, ascending."""
        return sorted({number for store in self._stores for number in store.numbers(client)})

    def read(self, client: int, number: int) -> Leaves | None:
        """Return the arrays of a version; None if no store has it."""
        versions = (store.read(client, number) for store in self._stores)
        return next((arrays for arrays in versions if arrays is not None), None)

    def write(self, client: int, number: int, leaves: Leaves) -> None:
        """Save a version in all stores."""
        for store in self._stores:
            store.write(client, number, leaves)

    def remove(self, client: int, number: int) -> None:
        """Delete a version."""
        for store in self._stores:
            store.remove(client, number)


def require_name(run: object) -> None:
    """Raise unless a run's name is a valid token, since it becomes a folder's name."""
    if not isinstance(run, str) or not _TOKEN.fullmatch(run):
        raise UserError("The server sent an invalid name of a run.")


def recall(store: Store, client: int, number: int, initial: PyTree) -> PyTree | None:
    """Return a client's memory after an exchange; None if it is lost.

    Args:
        store: of client memory.
        client: its number.
        number: of the exchange; 0 before the first.
        initial: the memory before the first exchange.
    """
    if not number:
        return initial
    leaves, (expected, structure) = store.read(client, number), jax.tree.flatten(initial)
    if leaves is None or list(map(_kind, leaves)) != list(map(_kind, expected)):
        return None
    return jax.tree.unflatten(structure, leaves)


def _kind(leaf: Any) -> tuple[Any, ...]:
    array = np.asarray(leaf)
    return array.dtype, array.shape


def recalled(
    store: Store, versions: Versions, ids: np.ndarray, places: np.ndarray, fresh: PyTree
) -> tuple[PyTree, list[int]]:
    """Return the memory of a node's clients, and the clients of a request whose memory is lost.

    Args:
        store: of client memory.
        versions: of the clients in the request.
        ids: the clients in the request.
        places: the position of each of them in the memory.
        fresh: the memory of all clients of the node before the first exchange.
    """
    memory = jax.tree.map(np.array, fresh)
    initial, lost_clients = jax.tree.map(lambda a: a[0].copy(), memory), set()
    for i, place, number in zip(ids.tolist(), places, versions.numbers.tolist(), strict=True):
        leaves = recall(store, i, number, initial)
        if leaves is None:
            lost_clients.add(i)
            continue
        for stack, row in zip(jax.tree.leaves(memory), jax.tree.leaves(leaves), strict=True):
            stack[place] = row
    return memory, sorted(lost_clients)


def keep_all(
    store: Store, versions: Versions, ids: np.ndarray, exchange: int, rows: PyTree
) -> None:
    """Save the memory of a request's clients; of a repeated client, that of its last reply."""
    clients = ids.tolist()
    stacks = jax.tree.map(np.asarray, rows)
    for j, i in enumerate(clients):
        if i not in clients[j + 1 :]:
            memory = jax.tree.map(lambda a, j=j: a[j], stacks)
            keep(store, i, exchange, memory, versions.oldest)


def keep(store: Store, client: int, number: int, memory: PyTree, oldest: int) -> None:
    """Save a client's memory after an exchange; delete versions that the server cannot request.

    Args:
        store: of client memory.
        client: its number.
        number: of the exchange.
        memory: after the exchange.
        oldest: see `Versions`; of the versions up to this one, only the last can be requested.
    """
    store.write(client, number, list(map(np.asarray, jax.tree.leaves(memory))))
    old = [version for version in store.numbers(client) if version <= oldest]
    for version in old[:-1]:
        store.remove(client, version)


def lost(settings: Mapping[str, Any], requested: np.ndarray) -> list[int]:
    """Return the clients whose memory is lost according to a node's untrusted response."""
    reported = settings.get("lost")
    if not isinstance(reported, list):
        return []
    return sorted(
        {client for client in reported if type(client) is int and client in requested.tolist()}
    )
