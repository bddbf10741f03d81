"""The library's tasks: the settings of each, and its record in the catalogue."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from simfbo.config.catalogue import TASKS, TaskRecord
from simfbo.config.fields import (
    LARGEST,
    Absent,
    Clients,
    Count,
    Dimension,
    Folds,
    Positive,
    Share,
    Spread,
    TaskSettings,
)

Images = Literal["digits", "optdigits", "mnist", "fashion-mnist", "cifar10", "exercises"]
BatchSize = Annotated[Dimension | None, Absent]
# The number of natural clients of a table; None if its rows are distributed.
TABLES = {"schools": 160, "exam": 65, "districts": 60, "mortgages": None}
# The number of natural clients of a set of images.
IMAGE_CLIENTS = {"exercises": 20}


class QuadraticSettings(TaskSettings):
    """A random quadratic with a closed form."""

    clients: Clients = 10
    dim_x: Dimension = 4
    dim_y: Dimension = 5
    heterogeneity: Spread = 1.0
    samples: Count = 1
    noise: Spread = 0.0
    batch_size: BatchSize = None

    @model_validator(mode="after")
    def _fits_into_memory(self) -> "QuadraticSettings":
        each = max(self.dim_x, self.dim_y) ** 2
        if self.clients * self.samples * each > LARGEST:
            raise ValueError(
                "clients times samples times the square of the larger dimension must not exceed "
                f"{LARGEST:,}"
            )
        return self


class PartitionedSettings(TaskSettings):
    """Images partitioned over clients.

    The default of `clients` is 100, or 20 for the small sets of digits. Images with natural clients
    keep them unless another partition is chosen.
    """

    dataset: Images = "digits"
    clients: Clients
    partition: Literal["iid", "shards", "dirichlet", "natural"]
    shards_per_client: Clients = 2
    alpha: Positive = 0.5

    @model_validator(mode="before")
    @classmethod
    def _fill_clients(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        small = values.get("dataset", "digits") in ("digits", "optdigits", *IMAGE_CLIENTS)
        return {"clients": 20 if small else 100, "partition": _usual_partition(values), **values}

    @model_validator(mode="after")
    def _has_these_clients(self) -> Self:
        natural = IMAGE_CLIENTS.get(self.dataset)
        if self.partition != "natural" or self.clients == natural:
            return self
        if natural is None:
            raise ValueError(f"{self.dataset} has no clients of its own: choose another partition")
        raise ValueError(
            f"{self.dataset} has {natural} clients of its own: leave clients out, or choose "
            "another partition"
        )


class HyperRepresentationSettings(PartitionedSettings):
    """A shared representation with a linear head, on images.

    The default of `upper_share` is 0.5 for iid clients and 0.2 for others, as in the released
    baselines. `train_images` and `test_images` limit the data to the first images. `unseen` clients
    are not trained on: heads of their own are fitted and tested on their images. `private` gives
    every client a head of its own, which stays on the client: a personal lower level.
    """

    model: Literal["mlp", "cnn"] = "mlp"
    hidden: Dimension = 200
    upper_share: Share
    batch_size: BatchSize = 64
    regularisation: Positive = 1e-3
    train_images: Annotated[Count | None, Absent] = None
    test_images: Annotated[Count | None, Absent] = None
    unseen: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    together: bool = False
    private: bool = False
    pull: Positive = 0.2

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        share = 0.5 if values.get("partition", _usual_partition(values)) == "iid" else 0.2
        return {"upper_share": share, **values}

    @model_validator(mode="after")
    def _leaves_clients(self) -> "HyperRepresentationSettings":
        if self.unseen >= self.clients:
            raise ValueError(f"unseen must leave some of the {self.clients} clients to train")
        if self.private and (self.unseen or self.together):
            raise ValueError("own heads are tested on their own clients: omit unseen, together")
        if self.partition == "natural" and (self.train_images or self.test_images):
            raise ValueError(
                "the first images are those of the first natural clients: leave train_images and "
                "test_images out"
            )
        return self


class RegularisationSettings(TaskSettings):
    """An L2 weight for every feature; the default `clients` are the table's own, or 20.

    `features`, `relevant`, `per_client` and `noise` apply to the synthetic set.
    """

    dataset: Literal["synthetic", "schools", "exam", "districts", "mortgages"] = "synthetic"
    clients: Clients
    folds: Folds = 5
    floor: Positive = 0.01
    sparsity: Spread = 0.1
    batch_size: BatchSize = None
    features: Dimension = 40
    relevant: Dimension = 8
    per_client: Dimension = 15
    noise: Spread = 1.0

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return _natural(values, "synthetic")

    @model_validator(mode="after")
    def _fits_together(self) -> "RegularisationSettings":
        require_own_clients(self.dataset, self.clients)
        if self.dataset != "synthetic":
            _require_usual(self, "features", "relevant", "per_client", "noise")
        if self.relevant > self.features:
            raise ValueError("relevant must not exceed features")
        if self.clients * self.per_client * self.features > LARGEST // 10:
            raise ValueError(
                f"clients times per_client times features must not exceed {LARGEST // 10:,}"
            )
        return self


class LabelCleaningSettings(PartitionedSettings):
    """Training on partly wrong labels, with a few that are correct."""

    wrong: Share = 0.5
    clean: Count = 100
    trust: Literal["network", "clients"] = "network"
    penalty: Positive = 0.01
    batch_size: BatchSize = None


class LongTailSettings(PartitionedSettings):
    """Few samples of many classes; `imbalance` is the ratio of largest to smallest class."""

    imbalance: Annotated[float, Field(ge=1, le=1e6)] = 100.0
    folds: Folds = 5
    penalty: Positive = 0.003
    prior: Spread = 0.03
    batch_size: BatchSize = None


class FairSettings(TaskSettings):
    """Weights for groups; the default `clients` are the table's own, or 20.

    On digits, a `turned` share of the clients holds images rotated by 90 degrees, which form a
    group.
    """

    dataset: Literal["digits", "optdigits", "schools", "exam", "districts", "mortgages"] = "digits"
    clients: Clients
    groups: Literal["own", "clients"] = "own"
    turned: Share = 0.1
    folds: Folds = 5
    penalty: Positive = 0.003
    sharpness: Positive = 20.0
    batch_size: BatchSize = None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return _natural(values, "digits")

    @model_validator(mode="after")
    def _fits_together(self) -> "FairSettings":
        require_own_clients(self.dataset, self.clients)
        if self.dataset in TABLES:
            _require_usual(self, "turned")
        if self.dataset not in TABLES and self.clients < 2:
            raise ValueError("clients must be at least 2, of whom some hold turned images")
        if self.dataset not in TABLES and self.groups == "clients":
            raise ValueError("groups can be the clients of a table only: choose another dataset")
        return self


def _require_usual(task: TaskSettings, *names: str) -> None:
    """Raise if a setting was changed that does not apply to the chosen data set."""
    for name in names:
        if getattr(task, name) != type(task).model_fields[name].default:
            raise ValueError(f"{name} is not a setting of this data set: leave it out")


def _usual_partition(values: dict[Any, Any]) -> str:
    """Return the default partition of images."""
    return "natural" if str(values.get("dataset", "digits")) in IMAGE_CLIENTS else "iid"


def _natural(values: Any, usual: str) -> Any:
    """Add the default number of clients: the table's own, or 20."""
    if not isinstance(values, dict):
        return values
    return {"clients": TABLES.get(str(values.get("dataset", usual))) or 20, **values}


def require_own_clients(dataset: str, clients: int) -> None:
    """Raise if a table has natural clients and another number was given."""
    natural = TABLES.get(dataset)
    if natural is not None and clients != natural:
        raise ValueError(f"{dataset} has {natural} clients of its own: leave clients out")


def _record(name: str, settings: type[TaskSettings], practical: bool = False) -> TaskRecord:
    factory = f"simfbo.config.build_task:{name.replace('-', '_')}"
    return TaskRecord(name, factory, settings, practical)


TASKS.add(
    _record("quadratic", QuadraticSettings),
    _record("hyper-representation", HyperRepresentationSettings),
    _record("regularisation", RegularisationSettings, practical=True),
    _record("label-cleaning", LabelCleaningSettings, practical=True),
    _record("long-tail", LongTailSettings, practical=True),
    _record("fair", FairSettings, practical=True),
)
