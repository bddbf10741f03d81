"""From the settings of a task to the task, its data loaded."""

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
    """Return the task of a configuration, its data loaded."""
    record = TASKS.find(config.task.name)
    factory = factory_of(record)
    if record.settings is not None:
        return factory(config.task, config.seed, data_dir)
    if isinstance(factory, Task):
        return factory
    given = {"seed": config.seed, "data_dir": data_dir}
    taken = inspect.signature(factory).parameters
    options = config.task.model_dump(exclude={"name"})
    found = factory(**options, **{name: given[name] for name in given if name in taken})
    if not isinstance(found, Task):
        kind = type(found).__name__
        raise UserError(f"'{config.task.name}' returned {kind}, which is not a Task.")
    return found


def quadratic(settings: QuadraticSettings, seed: int, data_dir: Path | None) -> Task:
    """Return the quadratic task; it has no data to load."""
    return tasks.quadratic(**settings.model_dump(exclude={"name"}), seed=seed)


def regularisation(settings: RegularisationSettings, seed: int, data_dir: Path | None) -> Task:
    """Return the task on a table, or on made-up features."""
    if settings.dataset == "synthetic":
        sizes = settings.model_dump(include={"clients", "per_client", "features", "relevant",
                                           "noise"})  # fmt: skip
        held = samples.synthetic(**sizes, seed=seed)
    else:
        held = _table(settings.dataset, settings.clients, seed, data_dir)
    options = settings.model_dump(include={"folds", "floor", "sparsity", "batch_size"})
    return tasks.regularisation(
        held.samples, held.parts, relevant=held.relevant, seed=seed, **options
    )


def label_cleaning(settings: LabelCleaningSettings, seed: int, data_dir: Path | None) -> Task:
    """Return the task on images."""
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
    """Return the task on images, most of them of a few classes."""
    images = datasets.load(settings.dataset, data_dir)
    rows = samples.from_images(images)
    kept = samples.long_tailed(rows.target, settings.imbalance, seed)
    rows = rows._replace(features=rows.features[kept], target=rows.target[kept])
    users = None if images.train_clients is None else images.train_clients[kept]
    parts = _parts(settings, rows.target, users, seed)
    options = settings.model_dump(include={"folds", "penalty", "prior", "batch_size"})
    return tasks.long_tail(rows, parts, seed=seed, **options)


def fair(settings: FairSettings, seed: int, data_dir: Path | None) -> Task:
    """Return the task on a table with its groups, or on images of which some are turned."""
    if settings.dataset in TABLES:
        held = _table(
            settings.dataset, settings.clients, seed, data_dir, settings.groups == "clients"
        )
    else:
        held = _turned(settings, seed, data_dir)
    options = settings.model_dump(include={"folds", "penalty", "sharpness", "batch_size"})
    assert held.groups is not None
    return tasks.fair(held.samples, held.parts, held.groups, seed=seed, **options)


def _turned(settings: FairSettings, seed: int, data_dir: Path | None) -> samples.Federated:
    """Return images that the first clients hold turned by a quarter, as do half of the test's."""
    images = datasets.load(settings.dataset, data_dir)
    parts = partition.iid(len(images.train_labels), settings.clients, seed)
    some = min(settings.clients - 1, max(1, round(settings.turned * settings.clients)))
    train = np.zeros(len(images.train_labels), bool)
    train[np.concatenate(parts[:some])] = True
    test = seed_rng(seed, Purpose.ROTATED).random(len(images.test_labels)) < 0.5
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


def hyper_representation(
    settings: HyperRepresentationSettings, seed: int, data_dir: Path | None
) -> Task:
    """Return the image task."""
    images = datasets.load(settings.dataset, data_dir)
    classes = int(images.train_labels.max()) + 1
    images = _of_seen(_first(images, settings), settings)
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


def _first(images: datasets.ImageData, settings: HyperRepresentationSettings) -> datasets.ImageData:
    """Return as many of the first images as a configuration asks for."""
    for key, labels in (("train_images", images.train_labels), ("test_images", images.test_labels)):
        if (getattr(settings, key) or 0) > len(labels):
            raise UserError(
                f"'task.{key}' is {getattr(settings, key):,}, but {settings.dataset} has "
                f"{len(labels):,}: lower it."
            )
    train, test = slice(settings.train_images), slice(settings.test_images)
    return images._replace(
        train_images=images.train_images[train], train_labels=images.train_labels[train],
        test_images=images.test_images[test], test_labels=images.test_labels[test],
        train_clients=_cut(images.train_clients, train),
        test_clients=_cut(images.test_clients, test),
    )  # fmt: skip


def _cut(clients: np.ndarray | None, rows: slice) -> np.ndarray | None:
    return None if clients is None else clients[rows]


def _of_seen(
    images: datasets.ImageData, settings: HyperRepresentationSettings
) -> datasets.ImageData:
    """Return the images without natural unseen clients' test images: those test their own heads."""
    if settings.partition != "natural" or images.test_clients is None:
        return images
    seen = images.test_clients < settings.clients - settings.unseen
    return images._replace(
        test_images=images.test_images[seen], test_labels=images.test_labels[seen],
        test_clients=images.test_clients[seen],
    )  # fmt: skip


def _parts(
    settings: PartitionedSettings, labels: np.ndarray, users: np.ndarray | None, seed: int
) -> partition.Rows:
    """Return each client's rows."""
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
    """Return the network for these images."""
    shape = images.train_images.shape
    if settings.model == "mlp":
        return mlp(int(np.prod(shape[1:])), settings.hidden, classes)
    if min(shape[1:3]) < 16:
        raise UserError(
            "The CNN needs images of at least 16 x 16 pixels: use --set task.model=mlp."
        )
    return cnn(shape[1], shape[3] if len(shape) == 4 else 1, classes)
