"""From the settings of a task to the task, with its data loaded."""

import inspect
from pathlib import Path

import numpy as np

from simfbo import datasets, tasks
from simfbo.config.catalogue import TASKS, factory_of
from simfbo.config.run import RunConfig
from simfbo.config.tasks import (
    TABLES,
    FairSettings,
    HyperRepresentationSettings,
    LabelCleaningSettings,
    LongTailSettings,
    PartitionedSettings,
    QuadraticSettings,
    RegularisationSettings,
)
from simfbo.core import partition
from simfbo.core.keys import Purpose, seed_rng
from simfbo.errors import UserError
from simfbo.runs.files import Json
from simfbo.tasks import Task, samples
from simfbo.tasks.models import Model, cnn, mlp


def build_task(config: RunConfig, data_dir: Path | None = None) -> Task:
    """Build the task of a configuration, with its data loaded."""
    record = TASKS.find(config.task.name)
    factory = factory_of(record)
    if record.settings is not None:
        return factory(config.task, config.seed, data_dir)
    if isinstance(factory, Task):
        return factory
    run_arguments = {"seed": config.seed, "data_dir": data_dir}
    parameters = inspect.signature(factory).parameters
    options = config.task.model_dump(exclude={"name"})
    task = factory(
        **options, **{name: run_arguments[name] for name in run_arguments if name in parameters}
    )
    if not isinstance(task, Task):
        kind = type(task).__name__
        raise UserError(f"'{config.task.name}' returned {kind}, which is not a Task.")
    return task


def quadratic(settings: QuadraticSettings, seed: int, data_dir: Path | None) -> Task:
    """Build the quadratic task; it has no data to load."""
    return tasks.quadratic(**settings.model_dump(exclude={"name"}), seed=seed)


def regularisation(settings: RegularisationSettings, seed: int, data_dir: Path | None) -> Task:
    """Build the task on a table, or on synthetic features."""
    if settings.dataset == "synthetic":
        sizes = settings.model_dump(
            include={"clients", "per_client", "features", "relevant", "noise"}
        )
        federated = samples.synthetic(**sizes, seed=seed)
    else:
        federated = _table(settings.dataset, settings.clients, seed, data_dir)
    options = settings.model_dump(include={"folds", "floor", "sparsity", "batch_size"})
    return tasks.regularisation(
        federated.samples, federated.parts, relevant=federated.relevant, seed=seed, **options
    )


def label_cleaning(settings: LabelCleaningSettings, seed: int, data_dir: Path | None) -> Task:
    """Build the task on images."""
    images = datasets.load(settings.dataset, data_dir)
    rows = samples.from_images(images)
    parts = _parts(settings, rows.target, images.train_clients, seed)
    if settings.clean > len(rows.target) // 2:
        raise UserError(
            f"'task.clean' is {settings.clean:,}, but {settings.dataset} has {len(rows.target):,} "
            "training images: use less than half of them."
        )
    options = settings.model_dump(include={"wrong", "clean", "trust", "penalty", "batch_size"})
    return tasks.label_cleaning(rows, parts, seed=seed, **options)


def long_tail(settings: LongTailSettings, seed: int, data_dir: Path | None) -> Task:
    """Build the task on images with a long tail of classes."""
    images = datasets.load(settings.dataset, data_dir)
    rows = samples.from_images(images)
    selected = samples.long_tailed(rows.target, settings.imbalance, seed)
    rows = rows._replace(features=rows.features[selected], target=rows.target[selected])
    users = None if images.train_clients is None else images.train_clients[selected]
    parts = _parts(settings, rows.target, users, seed)
    options = settings.model_dump(include={"folds", "penalty", "prior", "batch_size"})
    return tasks.long_tail(rows, parts, seed=seed, **options)


def fair(settings: FairSettings, seed: int, data_dir: Path | None) -> Task:
    """Build the task on a table with its groups, or on images of which some are rotated."""
    if settings.dataset in TABLES:
        federated = _table(
            settings.dataset, settings.clients, seed, data_dir, settings.groups == "clients"
        )
    else:
        federated = _with_rotated(settings, seed, data_dir)
    options = settings.model_dump(include={"folds", "penalty", "sharpness", "batch_size"})
    assert federated.groups is not None
    return tasks.fair(federated.samples, federated.parts, federated.groups, seed=seed, **options)


def _with_rotated(settings: FairSettings, seed: int, data_dir: Path | None) -> samples.Federated:
    """Return images, rotated by 90 degrees for the first clients and for half of the test set."""
    images = datasets.load(settings.dataset, data_dir)
    parts = partition.iid(len(images.train_labels), settings.clients, seed)
    rotated_clients = min(settings.clients - 1, max(1, round(settings.turned * settings.clients)))
    train = np.zeros(len(images.train_labels), bool)
    train[np.concatenate(parts[:rotated_clients])] = True
    test = seed_rng(seed, Purpose.ROTATED).random(len(images.test_labels)) < 0.5
    rotated = images._replace(
        train_images=_rotate(images.train_images, train),
        test_images=_rotate(images.test_images, test),
    )
    groups = train.astype(np.int32), test.astype(np.int32)
    return samples.Federated(samples.from_images(rotated), parts, groups, ("upright", "turned"))


def _rotate(images: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Rotate the chosen images by 90 degrees."""
    return np.where(chosen[:, None, None], np.rot90(images, axes=(1, 2)), images)


def _table(
    name: str, clients: int, seed: int, data_dir: Path | None, by_client: bool = False
) -> samples.Federated:
    """Load a table with its natural clients, or distribute its rows to this number of clients."""
    table = datasets.load_table(name, data_dir)
    parts = partition.iid(len(table.target), clients, seed) if table.clients is None else None
    return samples.from_table(table, parts, seed, by_client)


def hyper_representation(
    settings: HyperRepresentationSettings, seed: int, data_dir: Path | None
) -> Task:
    """Build the task on images."""
    images = datasets.load(settings.dataset, data_dir)
    classes = int(images.train_labels.max()) + 1
    images = _of_seen(_limit(images, settings), settings)
    parts = _parts(settings, images.train_labels, images.train_clients, seed)
    common: Json = {
        "model": _model(settings, images, classes),
        "upper_share": settings.upper_share,
        "batch_size": settings.batch_size,
        "regularisation": settings.regularisation,
        "seed": seed,
    }
    if settings.private:
        if settings.partition != "natural":
            images = images._replace(test_clients=None)
        return tasks.private_heads(images, parts, **common)
    return tasks.hyper_representation(
        images,
        parts,
        **common,
        unseen=settings.unseen,
        together=settings.together,
        pull=settings.pull,
    )


def _limit(images: datasets.ImageData, settings: HyperRepresentationSettings) -> datasets.ImageData:
    """Limit images to the configured numbers of training and test images."""
    for key, labels in (("train_images", images.train_labels), ("test_images", images.test_labels)):
        if (getattr(settings, key) or 0) > len(labels):
            raise UserError(
                f"'task.{key}' is {getattr(settings, key):,}, but {settings.dataset} has "
                f"{len(labels):,}: lower it."
            )
    train, test = slice(settings.train_images), slice(settings.test_images)
    return images._replace(
        train_images=images.train_images[train],
        train_labels=images.train_labels[train],
        test_images=images.test_images[test],
        test_labels=images.test_labels[test],
        train_clients=_cut(images.train_clients, train),
        test_clients=_cut(images.test_clients, test),
    )


def _cut(clients: np.ndarray | None, rows: slice) -> np.ndarray | None:
    return None if clients is None else clients[rows]


def _of_seen(
    images: datasets.ImageData, settings: HyperRepresentationSettings
) -> datasets.ImageData:
    """Remove test images of unseen natural clients, which are used to test their own heads."""
    if settings.partition != "natural" or images.test_clients is None:
        return images
    seen = images.test_clients < settings.clients - settings.unseen
    return images._replace(
        test_images=images.test_images[seen],
        test_labels=images.test_labels[seen],
        test_clients=images.test_clients[seen],
    )


def _parts(
    settings: PartitionedSettings, labels: np.ndarray, users: np.ndarray | None, seed: int
) -> partition.Rows:
    if settings.partition == "natural":
        assert users is not None
        return partition.by_user(users)
    if settings.partition == "iid":
        return partition.iid(len(labels), settings.clients, seed)
    if settings.partition == "shards":
        return partition.shards(labels, settings.clients, settings.shards_per_client, seed)
    return partition.dirichlet(labels, settings.clients, settings.alpha, seed=seed)


def _model(
    settings: HyperRepresentationSettings, images: datasets.ImageData, classes: int
) -> Model:
    shape = images.train_images.shape
    if settings.model == "mlp":
        return mlp(int(np.prod(shape[1:])), settings.hidden, classes)
    if min(shape[1:3]) < 16:
        raise UserError(
            "The CNN needs images of at least 16 x 16 pixels: use --set task.model=mlp."
        )
    return cnn(shape[1], shape[3] if len(shape) == 4 else 1, classes)
