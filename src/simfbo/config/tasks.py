"""The settings of each task, one model per task."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from simfbo.config.algorithms import Absent, Count, Positive, Strict

Share = Annotated[float, Field(gt=0, lt=1)]
Spread = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Dimension = Annotated[int, Field(gt=0, le=100_000)]
Clients = Annotated[int, Field(gt=0, le=1_000_000)]
Folds = Annotated[int, Field(ge=2, le=100)]
Images = Literal["digits", "optdigits", "mnist", "fashion-mnist", "cifar10"]
NUMBERS = 10**9  # that an array may hold: eight gigabytes
# How many clients a table has by nature; None where its rows are dealt out.
TABLES = {"schools": 160, "exam": 65, "districts": 60, "mortgages": None}


class QuadraticConfig(Strict):
    """A random quadratic with a closed form."""

    name: Literal["quadratic"]
    clients: Clients = 10
    dim_x: Dimension = 4
    dim_y: Dimension = 5
    heterogeneity: Spread = 1.0
    samples: Count = 1
    noise: Spread = 0.0
    batch_size: Annotated[Dimension | None, Absent] = None

    @model_validator(mode="after")
    def _fits_into_memory(self) -> "QuadraticConfig":
        each = max(self.dim_x, self.dim_y) ** 2
        if self.clients * self.samples * each > NUMBERS:
            raise ValueError(
                "clients times samples times the square of the larger dimension must not exceed "
                f"{NUMBERS:,}"
            )
        return self


class DealtConfig(Strict):
    """Images that are dealt out to clients.

    Left out, `clients` is 100, or 20 for the small sets of digits.
    """

    dataset: Images = "digits"
    clients: Clients
    partition: Literal["iid", "shards", "dirichlet"] = "iid"
    shards_per_client: Clients = 2
    alpha: Positive = 0.5

    @model_validator(mode="before")
    @classmethod
    def _fill_clients(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        small = values.get("dataset", "digits") in ("digits", "optdigits")
        return {"clients": 20 if small else 100, **values}


class HyperRepresentationConfig(DealtConfig):
    """A shared representation with a linear head, on images.

    Left out, `upper_share` is 0.5 for iid clients and 0.2 for others, as in the released baselines;
    `train_images` and `test_images`, where given, are how many of the first images are used.
    `unseen` clients take no part: heads of their own are fitted and tested on their images.
    """

    name: Literal["hyper-representation"]
    model: Literal["mlp", "cnn"] = "mlp"
    hidden: Dimension = 200
    upper_share: Share
    batch_size: Annotated[Dimension | None, Absent] = 64
    regularisation: Positive = 1e-3
    train_images: Annotated[Count | None, Absent] = None
    test_images: Annotated[Count | None, Absent] = None
    unseen: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    pull: Positive = 0.2

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        share = 0.5 if values.get("partition", "iid") == "iid" else 0.2
        return {"upper_share": share, **values}

    @model_validator(mode="after")
    def _leaves_clients(self) -> "HyperRepresentationConfig":
        if self.unseen >= self.clients:
            raise ValueError(f"unseen must leave some of the {self.clients} clients to train")
        return self


class RegularisationConfig(Strict):
    """An L2 weight for every feature; left out, `clients` are the table's own, or 20.

    `features`, `relevant`, `per_client` and `noise` are the synthetic set's.
    """

    name: Literal["regularisation"]
    dataset: Literal["synthetic", "schools", "exam", "districts", "mortgages"] = "synthetic"
    clients: Clients
    folds: Folds = 5
    floor: Positive = 0.01
    sparsity: Spread = 0.1
    batch_size: Annotated[Dimension | None, Absent] = None
    features: Dimension = 40
    relevant: Dimension = 8
    per_client: Dimension = 15
    noise: Spread = 1.0

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return _natural(values, "synthetic")

    @model_validator(mode="after")
    def _fits_together(self) -> "RegularisationConfig":
        require_own_clients(self.dataset, self.clients)
        if self.dataset != "synthetic":
            _require_usual(self, "features", "relevant", "per_client", "noise")
        if self.relevant > self.features:
            raise ValueError("relevant must not exceed features")
        if self.clients * self.per_client * self.features > NUMBERS // 10:
            raise ValueError(
                f"clients times per_client times features must not exceed {NUMBERS // 10:,}"
            )
        return self


class LabelCleaningConfig(DealtConfig):
    """Training on labels of which many are wrong, with a few that are right."""

    name: Literal["label-cleaning"]
    wrong: Share = 0.5
    clean: Count = 100
    trust: Literal["network", "clients"] = "network"
    penalty: Positive = 0.01
    batch_size: Annotated[Dimension | None, Absent] = None


class LongTailConfig(DealtConfig):
    """Few samples of many classes; `imbalance` is how many times more the first class has."""

    name: Literal["long-tail"]
    imbalance: Annotated[float, Field(ge=1, le=1e6)] = 100.0
    folds: Folds = 5
    penalty: Positive = 0.003
    prior: Spread = 0.03
    batch_size: Annotated[Dimension | None, Absent] = None


class FairConfig(Strict):
    """Weights for groups; left out, `clients` are the table's own, or 20.

    On digits, a `turned` share of the clients holds images turned by a quarter, which is a group.
    """

    name: Literal["fair"]
    dataset: Literal["digits", "optdigits", "schools", "exam", "districts", "mortgages"] = "digits"
    clients: Clients
    groups: Literal["own", "clients"] = "own"
    turned: Share = 0.1
    folds: Folds = 5
    penalty: Positive = 0.003
    sharpness: Positive = 20.0
    batch_size: Annotated[Dimension | None, Absent] = None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return _natural(values, "digits")

    @model_validator(mode="after")
    def _fits_together(self) -> "FairConfig":
        require_own_clients(self.dataset, self.clients)
        if self.dataset in TABLES:
            _require_usual(self, "turned")
        if self.dataset not in TABLES and self.clients < 2:
            raise ValueError("clients must be at least 2, of whom some hold turned images")
        if self.dataset not in TABLES and self.groups == "clients":
            raise ValueError("groups can be the clients of a table only: choose another dataset")
        return self


def _require_usual(task: Strict, *names: str) -> None:
    """Raise where a setting was changed that the chosen data set does not have."""
    for name in names:
        if getattr(task, name) != type(task).model_fields[name].default:
            raise ValueError(f"{name} is not a setting of this data set: leave it out")


def _natural(values: Any, usual: str) -> Any:
    """Return the settings with a table's own number of clients, or 20."""
    if not isinstance(values, dict):
        return values
    return {"clients": TABLES.get(str(values.get("dataset", usual))) or 20, **values}


def require_own_clients(dataset: str, clients: int) -> None:
    """Raise where a table has clients by nature and another number is asked for."""
    own = TABLES.get(dataset)
    if own is not None and clients != own:
        raise ValueError(f"{dataset} has {own} clients of its own: leave clients out")


TaskConfig = Annotated[
    QuadraticConfig
    | HyperRepresentationConfig
    | RegularisationConfig
    | LabelCleaningConfig
    | LongTailConfig
    | FairConfig,
    Field(discriminator="name"),
]
# Tasks whose upper level is the point: everyone takes part and steps are found, unless told else.
PRACTICAL = ("regularisation", "label-cleaning", "long-tail", "fair")
TASKS = ("quadratic", "hyper-representation", *PRACTICAL)
