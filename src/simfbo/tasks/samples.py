"""Rows of features for linear models: from images, from tables, or synthetic."""

from typing import NamedTuple

import numpy as np

from simfbo.core.keys import Purpose, seed_rng
from simfbo.core.partition import Rows, by_user
from simfbo.datasets import ImageData, TableData
from simfbo.errors import UserError


class Training(NamedTuple):
    """Training rows of linear models, and their distribution to clients.

    Attributes:
        features: [N, d].
        target: [N], class labels from 0, or numbers.
        classes: the number of classes, or a `simfbo.tasks.linear.Target`.
        parts: each client's rows.
        weight: [N], the rows' weights, one on average; None for equal weights.
    """

    features: np.ndarray
    target: np.ndarray
    classes: int
    parts: Rows
    weight: np.ndarray | None = None

    @property
    def strata(self) -> np.ndarray:
        """The classes to balance folds by; a single one if the target is a number."""
        return self.target if self.classes > 0 else np.zeros(len(self.target), np.int32)


class Samples(NamedTuple):
    """Training and test rows of a linear model.

    Attributes:
        features: [N, d], standardised: each column, or all pixels together.
        target: [N], class labels from 0, or standardised numbers.
        test_features: [M, d], shifted and scaled like the training rows.
        test_target: [M].
        names: the names of the d features.
        classes: the number of classes; 0 if the target is a number.
    """

    features: np.ndarray
    target: np.ndarray
    test_features: np.ndarray
    test_target: np.ndarray
    names: tuple[str, ...]
    classes: int

    def dealt(self, parts: Rows) -> Training:
        """Return the training rows with the clients' parts."""
        return Training(self.features, self.target, self.classes, parts)


class Federated(NamedTuple):
    """Samples, and the distribution of the training rows to clients.

    Attributes:
        samples: the rows.
        parts: each client's training rows.
        groups: the group of each training row and of each test row; None if there are no groups.
        group_names: the names of the groups.
        relevant: a mask of relevant features; None if unknown.
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
    """Standardise all rows by the training rows; a federation would exchange sums once."""
    mean, deviation = features.mean(0), features.std(0)
    # The computed deviation of a constant 0.1 is not exactly zero.
    deviation = np.where(np.ptp(features, 0) > 0, deviation, 1.0)

    def scaled(rows: np.ndarray) -> np.ndarray:
        return ((rows - mean) / deviation).astype(np.float32)

    if classes:
        targets = target.astype(np.int32), test_target.astype(np.int32)
    else:
        mean_target, deviation_of_target = (
            target.mean(),
            target.std() if np.ptp(target) > 0 else 1.0,
        )
        targets = ((part - mean_target) / deviation_of_target for part in (target, test_target))
        targets = tuple(part.astype(np.float32) for part in targets)
    names = names or tuple(f"feature {j}" for j in range(features.shape[1]))
    return Samples(scaled(features), targets[0], scaled(test_features), targets[1], names, classes)


def from_images(images: ImageData) -> Samples:
    """Flatten images to rows of pixels, all scaled by one factor: faint pixels stay faint."""
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
    """Add products of the features to a table, and hold out a quarter of every client's rows.

    Args:
        table: from `simfbo.datasets.load_table`.
        parts: each client's rows, for a table without natural clients.
        seed: of the choice of held-out rows.
        by_client: use the clients as groups instead of the table's own groups.
    """
    if table.clients is not None:
        parts = by_user(table.clients)
    assert parts is not None, "give parts for a table without clients"
    features, names = _with_products(table.features, table.names)
    rng = seed_rng(seed, Purpose.HELD_OUT)
    shuffled = [rng.permutation(rows) for rows in parts]
    training_parts, test_rows = (
        [rows[len(rows) // 4 :] for rows in shuffled],
        np.concatenate([rows[: len(rows) // 4] for rows in shuffled]),
    )
    if not len(test_rows):
        raise UserError("No client has four rows, so no row can be held out: use fewer clients.")
    training_rows = np.concatenate(training_parts)
    samples = standardised(
        features[training_rows],
        table.target[training_rows],
        features[test_rows],
        table.target[test_rows],
        classes=2 if table.binary else 0,
        names=names,
    )
    group, names = table.groups, table.group_names
    if by_client:
        group, names = owners(parts, len(group)), tuple(f"client {i}" for i in range(len(parts)))
    return Federated(
        samples, consecutive(training_parts), (group[training_rows], group[test_rows]), names
    )


def owners(parts: Rows, count: int) -> np.ndarray:
    """Return the client of each of `count` rows.

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
    """Draw a linear target that depends on a few features; each client's features are shifted."""
    rng = seed_rng(seed, Purpose.SYNTHETIC)
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
    test_inputs, test_target = (np.concatenate(part) for part in zip(*test, strict=True))
    parts = np.split(np.arange(clients * per_client), clients)
    samples = standardised(inputs, target, test_inputs, test_target)
    return Federated(samples, parts, relevant=truth != 0)


def long_tailed(labels: np.ndarray, imbalance: float, seed: int) -> np.ndarray:
    """Select rows so that class sizes fall off geometrically, in a random order of classes.

    Args:
        labels: of all rows.
        imbalance: the ratio of the largest class to the smallest.
        seed: of the order of classes and of the rows.
    """
    if imbalance < 1:
        raise UserError(f"The imbalance must be at least 1, got {imbalance}.")
    rng, classes = seed_rng(seed, Purpose.LONG_TAIL), np.unique(labels)
    most = np.bincount(labels).min(where=np.bincount(labels) > 0, initial=len(labels))
    fall = imbalance ** -(np.arange(len(classes)) / max(1, len(classes) - 1))
    rows = [
        rng.permutation(np.flatnonzero(labels == label))[: max(2, round(most * share))]
        for label, share in zip(rng.permutation(classes), fall, strict=True)
    ]
    return rng.permutation(np.concatenate(rows))


def consecutive(parts: Rows) -> Rows:
    """Renumber the rows of clients after concatenating them client by client.

    Example:
        >>> [rows.tolist() for rows in consecutive([np.array([7, 3]), np.array([5])])]
        [[0, 1], [2]]
    """
    ends = np.cumsum([len(rows) for rows in parts])
    return [np.arange(end - len(rows), end) for end, rows in zip(ends, parts, strict=True)]


def _with_products(
    features: np.ndarray, names: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Add squares and pairwise products to the features, without constants and duplicates."""
    columns, labels = list(features.T), list(names)
    for i in range(features.shape[1]):
        for j in range(i, features.shape[1]):
            product = features[:, i] * features[:, j]
            is_duplicate = any(np.array_equal(product, column) for column in columns)
            if np.ptp(product) > 0 and not is_duplicate:
                columns.append(product)
                labels.append(f"{names[i]} * {names[j]}" if i != j else f"{names[i]}²")
    return np.stack(columns, axis=1), tuple(labels)
