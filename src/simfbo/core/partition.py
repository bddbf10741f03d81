"""Partitions: the assignment of samples to clients, as one array of row numbers per client."""

from collections.abc import Sequence

import numpy as np

from simfbo.core.keys import Purpose, seed_rng
from simfbo.errors import UserError

__all__ = ["by_user", "dirichlet", "halve", "iid", "shards"]

Rows = list[np.ndarray]


def iid(samples: int, clients: int, seed: int = 0) -> Rows:
    """Distribute the samples at random, as evenly as possible.

    Example:
        >>> [len(rows) for rows in iid(samples=10, clients=3)]
        [4, 3, 3]
    """
    _require_enough(samples, clients)
    return np.array_split(seed_rng(seed, Purpose.PARTITION).permutation(samples), clients)


def shards(labels: np.ndarray, clients: int, per_client: int = 2, seed: int = 0) -> Rows:
    """Sort the samples by label, split them into equal shards, and assign `per_client` to each.

    McMahan et al. (2017): with two shards most clients have two labels.
    """
    _require_enough(len(labels), clients * per_client)
    rng = seed_rng(seed, Purpose.PARTITION)
    parts = np.array_split(np.argsort(labels, kind="stable"), clients * per_client)
    assignment = rng.permutation(len(parts)).reshape(clients, per_client)
    return [np.concatenate([parts[shard] for shard in shards]) for shards in assignment]


def dirichlet(
    labels: np.ndarray, clients: int, alpha: float = 0.5, minimum: int = 2, seed: int = 0
) -> Rows:
    """Sample the clients' shares of every label from a Dirichlet distribution.

    Hsu et al. (2019): the samples of each label are distributed in proportions ~ Dir(alpha). A
    small alpha gives clients with few labels and unequal sizes. Sampling is repeated until every
    client has `minimum` samples.
    """
    _require_enough(len(labels), clients * minimum)
    if alpha <= 0:
        raise UserError(f"The Dirichlet alpha must be positive, got {alpha}.")
    rng = seed_rng(seed, Purpose.PARTITION)
    for _ in range(100):
        parts_by_client: list[Rows] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(clients, alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(rows)).astype(int)
            for parts, part in zip(parts_by_client, np.split(rows, cuts), strict=True):
                parts.append(part)
        rows_by_client = [np.concatenate(parts) for parts in parts_by_client]
        if min(map(len, rows_by_client)) >= minimum:
            return rows_by_client
    raise UserError(
        f"No Dirichlet draw with alpha={alpha} left {minimum} samples for each of {clients} "
        "clients: raise alpha or use fewer clients."
    )


def by_user(users: Sequence[object] | np.ndarray) -> Rows:
    """Create a client for every distinct user id, in the order of the sorted ids.

    Example:
        >>> [rows.tolist() for rows in by_user(["ann", "bob", "ann"])]
        [[0, 2], [1]]
    """
    _, owner = np.unique(np.asarray(users), return_inverse=True)
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owner[order])) + 1)


def halve(parts: Rows, upper: float = 0.5, seed: int = 0) -> tuple[Rows, Rows]:
    """Split every client's rows at random into (lower, upper), at least one in each.

    Args:
        parts: each client's rows.
        upper: the share of the upper part.
        seed: of the random order.

    Returns:
        The lower rows and the upper rows, client by client.
    """
    if not 0 < upper < 1:
        raise UserError(f"The upper share must lie between 0 and 1, got {upper}.")
    if min(map(len, parts)) < 2:
        raise UserError("Every client needs two samples, one for each level: use fewer clients.")
    rng = seed_rng(seed, Purpose.LEVELS)
    mixed = [rng.permutation(part) for part in parts]
    cuts = [int(np.clip(round(len(part) * upper), 1, len(part) - 1)) for part in parts]
    pairs = list(zip(mixed, cuts, strict=True))
    return [part[cut:] for part, cut in pairs], [part[:cut] for part, cut in pairs]


def _require_enough(samples: int, needed: int) -> None:
    if needed < 1 or samples < needed:
        raise UserError(f"{samples} samples cannot fill {needed} places: use fewer clients.")
