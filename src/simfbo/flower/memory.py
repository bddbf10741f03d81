"""What the clients of a node remember: versions, of which the server names the one to go on from.

A node cannot know whether a reply of its clients will count, so it keeps what they remember after
an exchange under the number of that exchange, and the server says with every request which of these
the client goes on from: that of the last exchange in which its reply counted. A run that is resumed
names the same ones again. The memory itself never leaves the node.

It is kept in Flower's state of the node, which lasts for one run of Flower's, and, if the node's
settings name a folder (`memory`), on disk, where a resumed run and a restarted node find it.
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
_RUNS = 4  # of which memories are kept on disk
Leaves = Sequence[np.ndarray]  # of a memory, in order
_TOKEN = re.compile(r"[0-9a-f]{16}")


class Versions(NamedTuple):
    """From which memories a request's clients go on.

    Attributes:
        run: a random name of the run.
        numbers: the exchange after which the memory was kept, by position; 0 for none yet.
        oldest: the last exchange before the oldest checkpoint that the server may go back to.
    """

    run: str
    numbers: np.ndarray
    oldest: int = 0


class Store(Protocol):
    """Where memories are kept, by client and number of the exchange."""

    def numbers(self, client: int) -> list[int]:
        """Return the versions of a client's memory, ascending."""
        ...

    def read(self, client: int, number: int) -> Leaves | None:
        """Return the arrays of a version; None if it is not there."""
        ...

    def write(self, client: int, number: int, leaves: Leaves) -> None:
        """Keep a version."""
        ...

    def remove(self, client: int, number: int) -> None:
        """Forget a version."""
        ...


class DiskStore:
    """Memories of one run in files, a folder per run; the oldest of several runs is removed."""

    def __init__(self, folder: Path, run: str) -> None:
        """Take the node's folder and the name of the run."""
        require_name(run)
        self._folder = folder / run
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            others = sorted((path for path in folder.iterdir() if _TOKEN.fullmatch(path.name)),
                            key=lambda path: path.stat().st_mtime)  # fmt: skip
            for old in others[:-_RUNS]:
                shutil.rmtree(old, ignore_errors=True)

    def _file(self, client: int, number: int) -> Path:
        return self._folder / f"{client}-{number:010d}.npz"

    def numbers(self, client: int) -> list[int]:
        """Return the versions of a client's memory, ascending."""
        found = self._folder.glob(f"{client}-*.npz")
        return sorted(int(path.stem.partition("-")[2]) for path in found)

    def read(self, client: int, number: int) -> Leaves | None:
        """Return the arrays of a version; None if it is not there, or damaged."""
        try:
            return list(checkpoint.load(self._file(client, number)).arrays.values())
        except (DamagedError, UserError):
            return None

    def write(self, client: int, number: int, leaves: Leaves) -> None:
        """Keep a version."""
        data = checkpoint.encode(list(leaves), {"client": client, "exchange": number})
        write_atomic(self._file(client, number), data)

    def remove(self, client: int, number: int) -> None:
        """Forget a version."""
        self._file(client, number).unlink(missing_ok=True)


class Both:
    """Two stores that hold the same; what one lost is read from the other."""

    def __init__(self, *stores: Store) -> None:
        """Take the stores, the quicker first."""
        self._stores = stores

    def numbers(self, client: int) -> list[int]:
        """Return the versions of a client's memory, ascending."""
        return sorted({number for store in self._stores for number in store.numbers(client)})

    def read(self, client: int, number: int) -> Leaves | None:
        """Return the arrays of a version; None if it is nowhere."""
        found = (store.read(client, number) for store in self._stores)
        return next((arrays for arrays in found if arrays is not None), None)

    def write(self, client: int, number: int, leaves: Leaves) -> None:
        """Keep a version."""
        for store in self._stores:
            store.write(client, number, leaves)

    def remove(self, client: int, number: int) -> None:
        """Forget a version."""
        for store in self._stores:
            store.remove(client, number)


def require_name(run: object) -> None:
    """Raise unless a run's name is one of ours: on disk it becomes a folder."""
    if not isinstance(run, str) or not _TOKEN.fullmatch(run):
        raise UserError("The server names a run in a way that it never does.")


def recall(store: Store, client: int, number: int, initial: PyTree) -> PyTree | None:
    """Return what a client remembers after an exchange; None if that is lost.

    Args:
        store: where it is kept.
        client: whose it is.
        number: of the exchange; 0 before the first.
        initial: what it remembers before the first.
    """
    if not number:
        return initial
    found, (wanted, structure) = store.read(client, number), jax.tree.flatten(initial)
    if found is None or list(map(_kind, found)) != list(map(_kind, wanted)):
        return None
    return jax.tree.unflatten(structure, found)


def _kind(leaf: Any) -> tuple[Any, ...]:
    array = np.asarray(leaf)
    return array.dtype, array.shape


def recalled(
    store: Store, versions: Versions, ids: np.ndarray, places: np.ndarray, fresh: PyTree
) -> tuple[PyTree, list[int]]:
    """Return what the clients of a node remember, and those of a request that lost it.

    Args:
        store: where it is kept.
        versions: from which memories the clients of the request go on.
        ids: who these are.
        places: where each of them is in the memory.
        fresh: what all clients of the node remember before the first exchange.
    """
    held = jax.tree.map(np.array, fresh)
    initial, gone = jax.tree.map(lambda a: a[0].copy(), held), set()
    for i, place, number in zip(ids.tolist(), places, versions.numbers.tolist(), strict=True):
        own = recall(store, i, number, initial)
        if own is None:
            gone.add(i)
            continue
        for stack, row in zip(jax.tree.leaves(held), jax.tree.leaves(own), strict=True):
            stack[place] = row
    return held, sorted(gone)


def keep_all(
    store: Store, versions: Versions, ids: np.ndarray, exchange: int, rows: PyTree
) -> None:
    """Keep what the clients of a request remember after it, of each what its last reply left."""
    clients = ids.tolist()
    stacks = jax.tree.map(np.asarray, rows)
    for j, i in enumerate(clients):
        if i not in clients[j + 1 :]:
            own = jax.tree.map(lambda a, j=j: a[j], stacks)
            keep(store, i, exchange, own, versions.oldest)


def keep(store: Store, client: int, number: int, memory: PyTree, oldest: int) -> None:
    """Keep what a client remembers after an exchange; forget what the server cannot ask for.

    Args:
        store: where to.
        client: whose it is.
        number: of the exchange.
        memory: what it remembers.
        oldest: see `Versions`; of the versions up to this one, only the last is still of use.
    """
    store.write(client, number, list(map(np.asarray, jax.tree.leaves(memory))))
    early = [one for one in store.numbers(client) if one <= oldest]
    for one in early[:-1]:
        store.remove(client, one)


def lost(settings: Mapping[str, Any], asked: np.ndarray) -> list[int]:
    """Return the clients that lost their memory, as a node's response says; nothing is trusted."""
    found = settings.get("lost")
    if not isinstance(found, list):
        return []
    return sorted({one for one in found if type(one) is int and one in asked.tolist()})
