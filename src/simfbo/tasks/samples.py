"""Rows of features for linear models: from images, from tables, or made up."""

from typing import NamedTuple

import numpy as np

from simfbo.core.partition import Rows, by_user
from simfbo.datasets import ImageData, TableData
from simfbo.errors import UserError

_SYNTHETIC, _HELD_OUT = 10, 11  # purposes of a seed


class Samples(NamedTuple):
    """What a linear model sees.

    Attributes:
        features: [N, d], with mean 0 and deviation 1: each column, or all pixels together.
        target: [N], classes from 0 or numbers (in units of their deviation, with mean 0).
        test_features: [M, d], with the same shift and scale.
        test_target: [M].
        names: of the d features.
        classes: how many; 0 where the target is a number.
    """

    features: np.ndarray
    target: np.ndarray
    test_features: np.ndarray
    test_target: np.ndarray
    names: tuple[str, ...]
    classes: int


class Federated(NamedTuple):
    """Samples, and who holds which rows of the training part.

    Attributes:
        samples: the rows.
        parts: each client's rows.
        groups: the group of each training row, and of each test row; None where there are none.
        group_names: what they are called.
        relevant: whether each feature matters, where that is known.
    """

    samples: Samples
    parts: Rows
    groups: tuple[np.ndarray, np.ndarray] | None = None
    group_names: tuple[str, ...] = ()
    relevant: np.ndarray | None = None


def standardised(
    features: np.ndarray,
    target: np.ndarray,
    test_features: np.ndarray,
    test_target: np.ndarray,
    classes: int = 0,
    names: tuple[str, ...] = (),
) -> Samples:
    """Return samples on the scale of the training rows; in a federation, one exchange of sums."""
    mean, deviation = features.mean(0), features.std(0)
    deviation = np.where(np.ptp(features, 0) > 0, deviation, 1.0)  # that of 0.1, 0.1, .. is not 0

    def scaled(rows: np.ndarray) -> np.ndarray:
        return ((rows - mean) / deviation).astype(np.float32)

    if classes:
        targets = target.astype(np.int32), test_target.astype(np.int32)
    else:
        middle, spread = target.mean(), target.std() if np.ptp(target) > 0 else 1.0
        targets = ((part - middle) / spread for part in (target, test_target))
        targets = tuple(part.astype(np.float32) for part in targets)
    names = names or tuple(f"feature {j}" for j in range(features.shape[1]))
    return Samples(scaled(features), targets[0], scaled(test_features), targets[1], names, classes)


def from_images(images: ImageData) -> Samples:
    """Return images as rows of pixels, all on one scale, so that faint pixels stay faint."""
    train, test = (
        part.reshape(len(part), -1).astype(np.float32)
        for part in (images.train_images, images.test_images)
    )
    mean, deviation = train.mean(0), train.std()
    scaled = [(part - mean) / deviation for part in (train, test)]
    names = tuple(f"pixel {j}" for j in range(train.shape[1]))
    classes = int(images.train_labels.max()) + 1
    return Samples(scaled[0], images.train_labels, scaled[1], images.test_labels, names, classes)


def from_table(
    table: TableData, parts: Rows | None = None, seed: int = 0, by_client: bool = False
) -> Federated:
    """Return a table with products of its features, a quarter of every client's rows held out.

    Args:
        table: from `simfbo.datasets.load_table`.
        parts: each client's rows, where the table has no natural clients.
        seed: of what is held out.
        by_client: whether the clients are the groups, in the place of the table's own.
    """
    if table.clients is not None:
        parts = by_user(table.clients)
    assert parts is not None, "give parts for a table without clients"
    features, names = _with_products(table.features, table.names)
    rng = np.random.default_rng([_HELD_OUT, seed])
    mixed = [rng.permutation(rows) for rows in parts]
    kept, tested = ([rows[len(rows) // 4 :] for rows in mixed],
                    np.concatenate([rows[: len(rows) // 4] for rows in mixed]))  # fmt: skip
    if not len(tested):
        raise UserError("No client has four rows, of which one could be held out: use fewer.")
    trained = np.concatenate(kept)
    samples = standardised(
        features[trained], table.target[trained], features[tested], table.target[tested],
        classes=2 if table.binary else 0, names=names,
    )  # fmt: skip
    group, names = table.groups, table.group_names
    if by_client:
        group, names = owners(parts, len(group)), tuple(f"client {i}" for i in range(len(parts)))
    return Federated(samples, consecutive(kept), (group[trained], group[tested]), names)


def owners(parts: Rows, count: int) -> np.ndarray:
    """Return who holds each of `count` rows.

    Example:
        >>> owners([np.array([0, 2]), np.array([1])], 3).tolist()
        [0, 1, 0]
    """
    owner = np.zeros(count, np.int32)
    for client, rows in enumerate(parts):
        owner[rows] = client
    return owner


def synthetic(
    clients: int = 20,
    per_client: int = 15,
    features: int = 40,
    relevant: int = 8,
    noise: float = 1.0,
    seed: int = 0,
) -> Federated:
    """Return a linear target on a few of many features; clients' features are shifted apart."""
    rng = np.random.default_rng([_SYNTHETIC, seed])
    truth = np.zeros(features)
    chosen = rng.permutation(features)[:relevant]
    truth[chosen] = rng.choice([-1.0, 1.0], relevant) * rng.uniform(0.5, 1.5, relevant)

    def draw(rows: int, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = rng.normal(size=(rows, features)) + shift
        return inputs, inputs @ truth + noise * rng.normal(size=rows)

    shifts = 0.5 * rng.normal(size=(clients, features))
    train = [draw(per_client, shift) for shift in shifts]
    test = [draw(100, shift) for shift in shifts]
    inputs, target = (np.concatenate(part) for part in zip(*train, strict=True))
    unseen, wanted = (np.concatenate(part) for part in zip(*test, strict=True))
    parts = np.split(np.arange(clients * per_client), clients)
    samples = standardised(inputs, target, unseen, wanted)
    return Federated(samples, parts, relevant=truth != 0)


def consecutive(parts: Rows) -> Rows:
    """Return row numbers for clients whose rows were put one after the other.

    Example:
        >>> [rows.tolist() for rows in consecutive([np.array([7, 3]), np.array([5])])]
        [[0, 1], [2]]
    """
    ends = np.cumsum([len(rows) for rows in parts])
    return [np.arange(end - len(rows), end) for end, rows in zip(ends, parts, strict=True)]


def _with_products(
    features: np.ndarray, names: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the features, their squares and pairwise products: no constants, nothing twice."""
    columns, labels = list(features.T), list(names)
    for i in range(features.shape[1]):
        for j in range(i, features.shape[1]):
            product = features[:, i] * features[:, j]
            known = any(np.array_equal(product, column) for column in columns)
            if np.ptp(product) > 0 and not known:
                columns.append(product)
                labels.append(f"{names[i]} * {names[j]}" if i != j else f"{names[i]}²")
    return np.stack(columns, axis=1), tuple(labels)
