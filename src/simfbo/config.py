"""The configuration of a run: TOML and flags in, a checked model out.

Light on purpose: nothing here imports JAX, so that `simfbo --help` and a mistyped key answer at
once. `simfbo.build` turns a configuration into the objects of a run.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from simfbo.errors import UserError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# TOML has no null: "none" and "full" stand for it where a value may be missing.
Absent = BeforeValidator(lambda value: None if value in ("none", "full") else value)


class _Strict(BaseModel):
    """No unknown keys, no silent conversions from text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class QuadraticConfig(_Strict):
    """A random quadratic with a closed form."""

    name: Literal["quadratic"]
    clients: PositiveInt = 10
    dim_x: PositiveInt = 4
    dim_y: PositiveInt = 5
    heterogeneity: float = Field(1.0, ge=0)
    samples: PositiveInt = 1
    noise: float = Field(0.0, ge=0)
    batch_size: Annotated[PositiveInt | None, Absent] = None


class HyperRepresentationConfig(_Strict):
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


class StepsConfig(_Strict):
    """Step sizes for y, v and x; left out, they are the paper's."""

    y: Positive = 0.2
    v: Positive = 0.1
    x: Positive = 0.05


class SimFBOConfig(_Strict):
    """SimFBO and ShroFBO take the same settings; left out, a server step is the local one."""

    name: Literal["simfbo", "shrofbo"] = "simfbo"
    local: StepsConfig = StepsConfig()
    server: StepsConfig | None = None
    server_optimiser: Literal["sgd", "momentum", "adam"] = "sgd"
    radius: Annotated[Positive | None, Absent] = 10.0
    independent_batches: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        match values:
            case {"local": dict() as local, "server": dict() as server}:
                return {**values, "server": local | server}
        return values


ALGORITHMS = get_args(SimFBOConfig.model_fields["name"].annotation)


class SamplingConfig(_Strict):
    """Who takes part in a round; left out, `size` is 10, or all where there are fewer."""

    kind: Literal["everyone", "without-replacement", "with-replacement"] = "without-replacement"
    size: PositiveInt | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "SamplingConfig":
        if self.kind == "everyone" and self.size is not None:
            raise ValueError("everyone takes part, so leave size out")
        return self


class LocalWorkConfig(_Strict):
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


class RunConfig(_Strict):
    """Everything a run depends on; left out, `every` makes about 20 evaluations."""

    task: TaskConfig
    algorithm: SimFBOConfig = SimFBOConfig()
    sampling: SamplingConfig = SamplingConfig()
    local_work: LocalWorkConfig = LocalWorkConfig()
    engine: Literal["simulated", "debug"] = "simulated"
    rounds: PositiveInt = 500
    every: PositiveInt | None = None
    seed: int = Field(0, ge=0, lt=2**32)


def load(file: Path | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration in a TOML file, with dotted keys from the flags on top.

    Args:
        file: the TOML file, or None for defaults.
        overrides: values by dotted key, as {"task.clients": 50}.

    Returns:
        The checked configuration.
    """
    tree = _read(file) if file else {}
    for key, value in overrides.items():
        _put(tree, key, value)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


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


def _read(file: Path) -> dict[str, Any]:
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
    parts = [str(part) for part in first["loc"] if part not in TASKS]
    place = [part for part in parts if "constrained-int" not in part]
    field = ".".join(place) or "configuration"
    if first["type"] == "extra_forbidden":
        return f"'{field}' is no setting.{_suggestion(place[-1])}"
    if first["type"] == "missing":
        return f"'{field}' is missing from the configuration."
    if first["type"] == "union_tag_not_found":
        return f"'{field}.name' is missing from the configuration."
    if first["type"] == "union_tag_invalid":
        return f"'{field}.name' is wrong: use {' or '.join(TASKS)}, got {first['input']['name']!r}."
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        message = "Input should be a table of settings"
    return f"'{field}' is wrong: {message[0].lower()}{message[1:]}, got {first['input']!r}."


def _suggestion(key: str) -> str:
    """Return ' Did you mean ...?' where a known key is close."""
    models = (RunConfig, QuadraticConfig, HyperRepresentationConfig, SimFBOConfig, StepsConfig,
              SamplingConfig, LocalWorkConfig)  # fmt: skip
    known = sorted({name for model in models for name in model.model_fields})
    close = [match for match in difflib.get_close_matches(key, known, 2) if match != key][:1]
    return f" Did you mean '{close[0]}'?" if close else ""
