"""The configuration of a run: TOML and flags in, a checked model out.

Light on purpose: nothing here imports JAX, so that `simfbo --help` and a mistyped key answer at
once. `simfbo.build` turns a configuration into the objects of a run.
"""

import copy
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, PositiveInt, ValidationError, model_validator

from simfbo.algorithm_config import (
    ALGORITHMS,
    MODELS,
    SAMPLING,
    Absent,
    AlgorithmConfig,
    Positive,
    SimFBOConfig,
    StepsConfig,
    Strict,
)
from simfbo.errors import UserError
from simfbo.safety_config import AggregationConfig, ChannelsConfig, GateConfig, PrivacyConfig

Fraction = Annotated[float, Field(ge=0, lt=1)]


class QuadraticConfig(Strict):
    """A random quadratic with a closed form."""

    name: Literal["quadratic"]
    clients: PositiveInt = 10
    dim_x: PositiveInt = 4
    dim_y: PositiveInt = 5
    heterogeneity: float = Field(1.0, ge=0)
    samples: PositiveInt = 1
    noise: float = Field(0.0, ge=0)
    batch_size: Annotated[PositiveInt | None, Absent] = None


class HyperRepresentationConfig(Strict):
    """A shared representation with a linear head, on images.

    Left out, `clients` is 100 (20 for the small digits) and `upper_share` 0.5 for iid clients and
    0.2 for others, as in the released baselines.
    """

    name: Literal["hyper-representation"]
    dataset: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits"
    model: Literal["mlp", "cnn"] = "mlp"
    hidden: PositiveInt = 200
    clients: PositiveInt
    partition: Literal["iid", "shards", "dirichlet"] = "iid"
    shards_per_client: PositiveInt = 2
    alpha: Positive = 0.5
    upper_share: Annotated[float, Field(gt=0, lt=1)]
    batch_size: Annotated[PositiveInt | None, Absent] = 64
    regularisation: Positive = 1e-3

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        clients = 20 if values.get("dataset", "digits") == "digits" else 100
        share = 0.5 if values.get("partition", "iid") == "iid" else 0.2
        return {"clients": clients, "upper_share": share, **values}


TaskConfig = Annotated[QuadraticConfig | HyperRepresentationConfig, Field(discriminator="name")]
TASKS = ("quadratic", "hyper-representation")


# Methods with one exchange per cohort, whose privacy can be accounted for.
ONE_EXCHANGE = ("simfbo", "shrofbo", "fedbio", "memfbo")


class SamplingConfig(Strict):
    """Who takes part in a round; left out, `size` is 10, or all where there are fewer."""

    kind: Literal["everyone", "without-replacement", "with-replacement"] = "without-replacement"
    size: PositiveInt | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "SamplingConfig":
        if self.kind == "everyone" and self.size is not None:
            raise ValueError("everyone takes part, so leave size out")
        return self


class LocalWorkConfig(Strict):
    """How much each client does: `tau`, or `low` and `high` for a uniform draw."""

    tau: PositiveInt | list[PositiveInt] = 1
    low: PositiveInt | None = None
    high: PositiveInt | None = None
    every_round: bool = False
    optimiser: Literal["sgd", "proximal", "momentum"] = "sgd"
    strength: Fraction = 0.0

    @model_validator(mode="after")
    def _fits_together(self) -> "LocalWorkConfig":
        if (self.low is None) != (self.high is None):
            raise ValueError("give both low and high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError("low must not exceed high")
        if self.every_round and self.low is None:
            raise ValueError("every_round needs low and high to draw between")
        if (self.optimiser == "sgd") != (self.strength == 0):
            raise ValueError("proximal and momentum need a strength above 0, sgd takes none")
        return self


class RunConfig(Strict):
    """Everything a run depends on; left out, `every` makes about 20 evaluations."""

    task: TaskConfig
    algorithm: AlgorithmConfig = SimFBOConfig()
    sampling: SamplingConfig = SamplingConfig()
    local_work: LocalWorkConfig = LocalWorkConfig()
    gate: GateConfig = GateConfig()
    aggregation: AggregationConfig = AggregationConfig()
    privacy: PrivacyConfig | None = None
    engine: Literal["simulated", "debug"] = "simulated"
    rounds: PositiveInt = 500
    every: PositiveInt | None = None
    seed: int = Field(0, ge=0, lt=2**32)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Return the settings with SimFBO for a missing name, and the method's own sampling."""
        if not isinstance(values, dict):
            return values
        algorithm, who = values.get("algorithm", {}), values.get("sampling", {})
        if isinstance(algorithm, dict):
            algorithm = {"name": "simfbo", **algorithm}
            kind = SAMPLING.get(str(algorithm["name"]))
            if kind and isinstance(who, dict) and (kind != "everyone" or who.get("size") is None):
                values = {**values, "sampling": {"kind": kind, **who}}
            values = {**values, "algorithm": algorithm}
        return values

    @model_validator(mode="after")
    def _can_be_private(self) -> "RunConfig":
        if self.privacy is None:
            return self
        if self.algorithm.name not in ONE_EXCHANGE:
            raise ValueError(f"privacy is accounted for {', '.join(ONE_EXCHANGE)} only")
        if self.sampling.kind == "with-replacement":
            raise ValueError("privacy needs sampling without replacement, or everyone")
        if {self.aggregation.x, self.aggregation.y, self.aggregation.v} != {"mean"}:
            raise ValueError("privacy is accounted for the mean only: leave aggregation out")
        return self


def load(file: Path | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration in a TOML file, with dotted keys from the flags on top.

    Args:
        file: the TOML file, or None for defaults.
        overrides: values by dotted key, as {"task.clients": 50}.

    Returns:
        The checked configuration.
    """
    return checked(read(file) if file else {}, overrides)


def checked(tree: dict[str, Any], overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration in nested dictionaries, with dotted keys on top."""
    tree = copy.deepcopy(tree)
    for key, value in overrides.items():
        _put(tree, key, value)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def as_toml(config: RunConfig) -> str:
    """Return the configuration as a TOML file that `simfbo run --config` reads."""
    return "\n".join(_tables(config, ())) + "\n"


def _tables(model: BaseModel, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a model: its values, then a table for each model inside."""
    fields = {name: getattr(model, name) for name in type(model).model_fields}
    tables = {name: value for name, value in fields.items() if isinstance(value, BaseModel)}
    values = {name: value for name, value in fields.items() if name not in tables}
    for name, value in sorted(values.items(), key=lambda item: item[0] != "name"):
        if value is not None:
            yield f"{name} = {json.dumps(value)}"
        elif type(model).model_fields[name].default is not None:
            yield f'{name} = "none"'
    for name, table in tables.items():
        yield f"\n[{'.'.join((*path, name))}]"
        yield from _tables(table, (*path, name))


def parse_override(text: str) -> tuple[str, Any]:
    """Return (key, value) of `KEY=VALUE`, the value read as TOML, or as text if it is none.

    Example:
        >>> parse_override("algorithm.local.y=0.1")
        ('algorithm.local.y', 0.1)
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"'{text}' is no setting: write KEY=VALUE, as in task.clients=50.")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def read(file: Path) -> dict[str, Any]:
    """Return a TOML file as nested dictionaries."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a nested dictionary."""
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(f"'{key}' cannot be set: '{parent}' is a value, not a table.")
    tree[last] = value


def _sentence(error: ValidationError) -> str:
    """Return the first complaint as one sentence that names the field."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"] if part not in (*TASKS, *ALGORITHMS)]
    place = [part for part in parts if "constrained-int" not in part]
    field = ".".join(place) or "configuration"
    if first["type"] == "extra_forbidden":
        return f"'{field}' is no setting.{_suggestion(place[-1], first['loc'])}"
    if first["type"] == "missing":
        return f"'{field}' is missing from the configuration."
    if first["type"] == "union_tag_not_found":
        return f"'{field}.name' is missing from the configuration."
    if first["type"] == "union_tag_invalid":
        known = " or ".join(ALGORITHMS if field == "algorithm" else TASKS)
        return f"'{field}.name' is wrong: use {known}, got {first['input']['name']!r}."
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        message = "Input should be a table of settings"
    return f"'{field}' is wrong: {message[0].lower()}{message[1:]}, got {first['input']!r}."


def _suggestion(key: str, place: tuple) -> str:
    """Return ' Did you mean ...?' where a known key is close; what there is, of an algorithm."""
    own = [model for model in MODELS if place[0] == "algorithm" and place[1] in _names(model)]
    models = own or (RunConfig, QuadraticConfig, HyperRepresentationConfig, SamplingConfig,
                     LocalWorkConfig, GateConfig, AggregationConfig, PrivacyConfig,
                     ChannelsConfig)  # fmt: skip
    known = sorted({name for model in (*models, StepsConfig) for name in model.model_fields})
    close = [match for match in difflib.get_close_matches(key, known, 2) if match != key][:1]
    if close:
        return f" Did you mean '{close[0]}'?"
    others = [name for model in own for name in model.model_fields if name != "name"]
    return f" The settings of {place[1]} are {', '.join(sorted(others))}." if others else ""


def _names(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the algorithms that a model describes."""
    return get_args(model.model_fields["name"].annotation)
