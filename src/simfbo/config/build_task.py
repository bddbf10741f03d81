"""From the settings of a task to the task, its data loaded."""

from pathlib import Path

import numpy as np

from simfbo import datasets
from simfbo.config import tasks as task_config
from simfbo.config.run import RunConfig
from simfbo.config.tasks import (
    DealtConfig,
    FairConfig,
    HyperRepresentationConfig,
    LabelCleaningConfig,
    LongTailConfig,
    QuadraticConfig,
    RegularisationConfig,
)
from simfbo.core import partition
from simfbo.errors import UserError
from simfbo.tasks import (
    Task,
    fair,
    hyper_representation,
    label_cleaning,
    long_tail,
    quadratic,
    regularisation,
    samples,
)
from simfbo.tasks._long_tail import long_tailed
from simfbo.tasks.models import Model, cnn, mlp

_TURNED = 17  # purpose of a seed


def build_task(config: RunConfig, data_dir: Path | None = None) -> Task:
    """Return the task of a configuration, its data loaded."""
    task, seed = config.task, config.seed
    match task:
        case QuadraticConfig():
            return quadratic(**task.model_dump(exclude={"name"}), seed=seed)
        case HyperRepresentationConfig():
            return _hyper_representation(task, seed, data_dir)
        case RegularisationConfig():
            return _regularisation(task, seed, data_dir)
        case LabelCleaningConfig():
            return _label_cleaning(task, seed, data_dir)
        case LongTailConfig():
            return _long_tail(task, seed, data_dir)
        case FairConfig():
            return _fair(task, seed, data_dir)


def _regularisation(config: RegularisationConfig, seed: int, data_dir: Path | None) -> Task:
    """Return the task on a table, or on made-up features."""
    if config.dataset == "synthetic":
        sizes = config.model_dump(include={"clients", "per_client", "features", "relevant",
                                           "noise"})  # fmt: skip
        held = samples.synthetic(**sizes, seed=seed)
    else:
        held = _table(config.dataset, config.clients, seed, data_dir)
    options = config.model_dump(include={"folds", "floor", "sparsity", "batch_size"})
    return regularisation(held.samples, held.parts, relevant=held.relevant, seed=seed, **options)


def _label_cleaning(config: LabelCleaningConfig, seed: int, data_dir: Path | None) -> Task:
    """Return the task on images."""
    rows = samples.from_images(datasets.load(config.dataset, data_dir))
    parts = _parts(config, rows.target, seed)
    if config.clean > len(rows.target) // 2:
        raise UserError(
            f"'task.clean' is {config.clean:,}, but {config.dataset} has {len(rows.target):,} "
            "training images: use less than half of them."
        )
    options = config.model_dump(include={"wrong", "clean", "trust", "penalty", "batch_size"})
    return label_cleaning(rows, parts, seed=seed, **options)


def _long_tail(config: LongTailConfig, seed: int, data_dir: Path | None) -> Task:
    """Return the task on images, of which most of most classes are left out."""
    rows = samples.from_images(datasets.load(config.dataset, data_dir))
    kept = long_tailed(rows.target, config.imbalance, seed)
    rows = rows._replace(features=rows.features[kept], target=rows.target[kept])
    options = config.model_dump(include={"folds", "penalty", "prior", "batch_size"})
    return long_tail(rows, _parts(config, rows.target, seed), seed=seed, **options)


def _fair(config: FairConfig, seed: int, data_dir: Path | None) -> Task:
    """Return the task on a table with its groups, or on images of which some are turned."""
    if config.dataset in task_config.TABLES:
        held = _table(config.dataset, config.clients, seed, data_dir, config.groups == "clients")
    else:
        held = _turned(config, seed, data_dir)
    options = config.model_dump(include={"folds", "penalty", "sharpness", "batch_size"})
    assert held.groups is not None
    return fair(held.samples, held.parts, held.groups, seed=seed, **options)


def _turned(config: FairConfig, seed: int, data_dir: Path | None) -> samples.Federated:
    """Return images that the first clients hold turned by a quarter, as do half of the test's."""
    images = datasets.load(config.dataset, data_dir)
    parts = partition.iid(len(images.train_labels), config.clients, seed)
    some = min(config.clients - 1, max(1, round(config.turned * config.clients)))
    train = np.zeros(len(images.train_labels), bool)
    train[np.concatenate(parts[:some])] = True
    test = np.random.default_rng([_TURNED, seed]).random(len(images.test_labels)) < 0.5
    turned = images._replace(
        train_images=_quarter(images.train_images, train),
        test_images=_quarter(images.test_images, test),
    )
    groups = train.astype(np.int32), test.astype(np.int32)
    return samples.Federated(samples.from_images(turned), parts, groups, ("upright", "turned"))


def _quarter(images: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the images, the chosen ones turned by a quarter."""
    return np.where(chosen[:, None, None], np.rot90(images, axes=(1, 2)), images)


def _table(
    name: str, clients: int, seed: int, data_dir: Path | None, by_client: bool = False
) -> samples.Federated:
    """Return a table with its own clients, or dealt to as many."""
    table = datasets.load_table(name, data_dir)
    dealt = partition.iid(len(table.target), clients, seed) if table.clients is None else None
    return samples.from_table(table, dealt, seed, by_client)


def _hyper_representation(
    config: HyperRepresentationConfig, seed: int, data_dir: Path | None
) -> Task:
    """Return the image task."""
    images = _first(datasets.load(config.dataset, data_dir), config)
    return hyper_representation(
        images,
        _parts(config, images.train_labels, seed),
        model=_model(config, images),
        upper_share=config.upper_share,
        batch_size=config.batch_size,
        regularisation=config.regularisation,
        unseen=config.unseen,
        pull=config.pull,
        seed=seed,
    )


def _first(images: datasets.ImageData, config: HyperRepresentationConfig) -> datasets.ImageData:
    """Return as many of the first images as a configuration asks for."""
    for key, labels in (("train_images", images.train_labels), ("test_images", images.test_labels)):
        if (getattr(config, key) or 0) > len(labels):
            raise UserError(
                f"'task.{key}' is {getattr(config, key):,}, but {config.dataset} has "
                f"{len(labels):,}: lower it."
            )
    train, test = slice(config.train_images), slice(config.test_images)
    return images._replace(
        train_images=images.train_images[train], train_labels=images.train_labels[train],
        test_images=images.test_images[test], test_labels=images.test_labels[test],
    )  # fmt: skip


def _parts(config: DealtConfig, labels: np.ndarray, seed: int) -> partition.Rows:
    """Return each client's rows."""
    if config.partition == "iid":
        return partition.iid(len(labels), config.clients, seed)
    if config.partition == "shards":
        return partition.shards(labels, config.clients, config.shards_per_client, seed)
    return partition.dirichlet(labels, config.clients, config.alpha, seed=seed)


def _model(config: HyperRepresentationConfig, images: datasets.ImageData) -> Model:
    """Return the network for these images."""
    shape = images.train_images.shape
    if config.model == "mlp":
        return mlp(int(np.prod(shape[1:])), config.hidden, 10)
    if shape[1] < 16:
        raise UserError(
            "The CNN needs images of at least 16 x 16 pixels: use --set task.model=mlp."
        )
    return cnn(shape[1], shape[3] if len(shape) == 4 else 1, 10)
