"""The configuration of a run: from TOML and flags to a validated model.

This module does not import JAX, so that `simfbo --help` and a mistyped key are answered at once.
`simfbo.config.build` turns a configuration into the objects of a run.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidationError,
    model_validator,
)

from simfbo.config.catalogue import METHODS, TASKS, MethodRecord, TaskRecord, any_of, settings_model
from simfbo.config.codecs import CodecsConfig
from simfbo.config.fields import (
    LARGEST,
    Clients,
    Count,
    LocalRuleText,
    MethodSettings,
    StepSizes,
    Strict,
    TaskSettings,
)
from simfbo.config.files import merged, read
from simfbo.config.messages import dotted, sentence
from simfbo.config.notation import normalised
from simfbo.config.safety import AggregationConfig, GateConfig, PrivacyConfig
from simfbo.errors import UserError, brief
from simfbo.runs.files import Json
from simfbo.runs.trackers.tracking import tracker

__all__ = ["PRESETS", "LocalWorkConfig", "RunConfig", "SamplingConfig", "checked", "copied", "load"]

Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
LocalSteps = Annotated[int, Field(gt=0, le=1000)]
_DEEPEST = 10  # tables in tables
_HERE = Path(__file__).parent / "presets"
_NAMES = ("few-bytes", "few-bytes-non-iid", "paper", "private")
PRESETS = {name: _HERE / f"{name}.toml" for name in _NAMES}
"""Configurations that come with simfbo, by name."""
S = TypeVar("S", bound=Strict)
# The settings that fix a method's step sizes.
_STEP_SETTINGS = ("local", "server", "steps", "server_optimiser", "server_schedule")


class SamplingConfig(Strict):
    """The sampling of clients; the default `size` is 10, or all clients if there are fewer."""

    kind: Literal["everyone", "without-replacement", "with-replacement"] = "without-replacement"
    size: Clients | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "SamplingConfig":
        if self.kind == "everyone" and self.size is not None:
            raise ValueError("everyone takes part, so omit size")
        return self


class LocalWorkConfig(Strict):
    """The clients' local work: `tau`, or `low` and `high` for a uniform distribution.

    All clients have the same local `optimiser`, or each its own, as listed in `rules`.
    """

    tau: Annotated[
        Annotated[LocalSteps, Tag("all")] | Annotated[list[LocalSteps], Tag("each")],
        Discriminator(lambda value: "each" if isinstance(value, list) else "all"),
    ] = 1
    low: LocalSteps | None = None
    high: LocalSteps | None = None
    every_round: bool = False
    optimiser: Literal["sgd", "proximal", "momentum"] = "sgd"
    strength: Fraction = 0.0
    rules: list[LocalRuleText] = Field(default=[])
    rules_every_round: bool = False

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
        if self.rules and self.optimiser != "sgd":
            raise ValueError("give either rules or optimiser and strength, not both")
        if self.rules_every_round and not self.rules:
            raise ValueError("rules_every_round needs rules to draw from")
        return self

    def most(self) -> int:
        """Return the largest number of local steps of a client."""
        return self.high or (max(self.tau, default=1) if isinstance(self.tau, list) else self.tau)


class RunConfig(Strict):
    """The complete configuration of a run; by default `every` makes about 20 evaluations.

    With `steps = "auto"` step sizes are chosen automatically, and those in the method's settings
    are ignored. That is the default for practical tasks unless a step size is given. With
    "tuning-free" each is the inverse of the accumulated norm of its directions.
    """

    task: SerializeAsAny[TaskSettings]
    algorithm: SerializeAsAny[MethodSettings]
    sampling: SamplingConfig = SamplingConfig()
    local_work: LocalWorkConfig = LocalWorkConfig()
    gate: GateConfig = GateConfig()
    aggregation: AggregationConfig = AggregationConfig()
    privacy: PrivacyConfig | None = None
    codecs: CodecsConfig | None = None
    detect_anomalies: bool = False
    engine: Literal["simulated", "debug"] = "simulated"
    strategy: Literal["auto", "lanes", "batches"] = "auto"
    chunk: Count | None = None
    steps: Literal["auto", "given", "tuning-free"] = "given"
    rounds: Count = 500
    every: Count | None = None
    seed: int = Field(0, ge=0, lt=2**32)
    track: list[str] = Field([], exclude=True)  # does not affect results

    @model_validator(mode="after")
    def _privacy_fits(self) -> "RunConfig":
        if self.privacy is None:
            return self
        if self.steps == "auto":
            raise ValueError(
                "'privacy' does not cover the search for step sizes: set steps to given, and "
                "algorithm.local"
            )
        if not METHODS.find(self.algorithm.name).one_exchange:
            supported = [method.name for method in METHODS.usable() if method.one_exchange]
            raise ValueError(f"'privacy' is accounted for {any_of(supported)} only")
        if self.sampling.kind == "with-replacement":
            raise ValueError("'privacy' needs sampling without replacement, or everyone")
        if {self.aggregation.x, self.aggregation.y, self.aggregation.v} != {"mean"}:
            raise ValueError("'privacy' is accounted for the mean only: omit 'aggregation'")
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> "RunConfig":
        if self.steps == "tuning-free" and not _has_server_steps(type(self.algorithm)):
            records = METHODS.usable()
            supported = [
                record.name for record in records if _has_server_steps(settings_model(record))
            ]
            raise ValueError(
                f"'{self.algorithm.name}' cannot take tuning-free steps, which are the server's "
                f"for x, y and v: use {any_of(supported)}, or set steps to auto"
            )
        return self

    @model_validator(mode="after")
    def _fits_into_memory(self) -> "RunConfig":
        clients = getattr(self.task, "clients", 1)  # of any type in a user's task
        if isinstance(clients, int) and clients * self.local_work.most() > LARGEST // 10:
            raise ValueError(
                f"'task.clients' times the most local steps must not exceed {LARGEST // 10:,}: "
                "lower one of them"
            )
        return self

    def cohort_size(self, n: int) -> int:
        """Return the number of n clients that are sampled for an exchange."""
        return n if self.sampling.kind == "everyone" else self.sampling.size or min(10, n)

    @property
    def evaluation_interval(self) -> int:
        """The number of iterations between evaluations."""
        return self.every or max(1, self.rounds // 20)


def _has_server_steps(model: type[Strict]) -> bool:
    """Check whether a method's settings hold server step sizes for x, y and v."""
    field = model.model_fields.get("server")
    return field is not None and field.annotation == StepSizes | None


def load(file: Path | None, overrides: Json) -> RunConfig:
    """Read a configuration from a TOML file, overridden by flags.

    Args:
        file: the TOML file, or None for defaults.
        overrides: values by dotted key, as {"task.clients": 50}.

    Returns:
        The validated configuration.
    """
    return checked(read(file) if file else {}, overrides)


def checked(tree: Json, overrides: Json) -> RunConfig:
    """Validate a configuration in nested dictionaries, overridden by dotted keys.

    A `preset` in the tree has lower precedence than the rest of it; one among the overrides has
    higher precedence than the tree.
    """
    overrides = dict(overrides)
    tree = _with_preset(copied(tree))
    if "preset" in overrides:
        tree = merged(tree, _with_preset({"preset": overrides.pop("preset")}))
    for key, value in overrides.items():
        _put(tree, key, value)
    if isinstance(tree.get("track"), str):
        tree["track"] = [tree["track"]]
    for text in tree["track"] if isinstance(tree.get("track"), list) else ():
        tracker(str(text))  # raises for an unknown tracker
    tree = normalised(RunConfig, tree)
    task = _record(tree, "task", TASKS.find, None)
    method = _record(tree, "algorithm", METHODS.find, "simfbo")
    models: dict[str, type[Any]] = {"task": settings_model(task)}
    tree["task"] = _validated(
        models["task"], normalised(models["task"], tree["task"]), models, ("task",)
    )
    models["algorithm"] = settings_model(method)  # imports JAX
    tree["algorithm"] = normalised(models["algorithm"], tree["algorithm"])
    tree = _with_defaults(tree, task, method, models["algorithm"])
    tree["algorithm"] = _validated(models["algorithm"], tree["algorithm"], models, ("algorithm",))
    return _validated(RunConfig, tree, models)


def _with_preset(tree: Json) -> Json:
    """Merge the settings over those of the preset they name."""
    if "preset" not in tree:
        return tree
    name = tree.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"'preset' must be {any_of(PRESETS)}, got {brief(name)}.")
    return merged(read(PRESETS[name]), tree)


def _validated(
    model: type[S], values: Any, models: Mapping[str, type[Strict]], table: tuple[str, ...] = ()
) -> S:
    """Validate the settings of a table of the configuration, or of all of it."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(sentence(error, RunConfig, models, table)) from None


def _record(tree: Json, table: str, find: Any, default: str | None) -> Any:
    """Return the record named in a table of the configuration."""
    settings = tree.setdefault(table, {})
    if not isinstance(settings, dict):
        raise UserError(f"'{table}' must be a table of settings, got {brief(settings)}.")
    name = settings.setdefault("name", default)
    if name is None:
        raise UserError(f"'{table}.name' is missing: use {any_of(TASKS.names())}.")
    if not isinstance(name, str):
        raise UserError(f"'{table}.name' must be text, got {brief(name)}.")
    record = find(name)
    settings["name"] = record.name
    return record


def _with_defaults(tree: Json, task: TaskRecord, method: MethodRecord, model: type[Strict]) -> Json:
    """Add the defaults that depend on the task and on the method."""
    algorithm, sampling = tree["algorithm"], tree.get("sampling", {})
    kind = method.sampling or ("everyone" if task.practical else None)
    size_given = isinstance(sampling, dict) and sampling.get("size") is not None
    if kind and isinstance(sampling, dict) and not (kind == "everyone" and size_given):
        tree["sampling"] = {"kind": kind, **sampling}
    steps_given = any(key in algorithm for key in _STEP_SETTINGS)
    tree.setdefault("steps", "auto" if task.practical and not steps_given else "given")
    if tree["steps"] != "given" and "radius" in model.model_fields:
        tree["algorithm"] = {"radius": "none", **algorithm}
    return tree


def copied(tree: Json) -> Json:
    """Copy nested dictionaries; raise if they are nested too deeply."""
    for key, value in tree.items():
        level, depth = [value], 0
        while level := [inner for outer in level for inner in _inside(outer)]:
            depth += 1
            if depth > _DEEPEST:
                raise UserError(f"'{dotted([key])}' is nested too deeply.")
    return copy.deepcopy(tree)


def _inside(value: object) -> Iterable[object]:
    """Return the values of a table or list."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _put(tree: Json, key: str, value: Any) -> None:
    """Set a dotted key in a nested dictionary."""
    *parents, last = key.split(".")
    for parent in parents:
        inner: Any = tree.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise UserError(
                f"'{dotted(key.split('.'))}' cannot be set: '{dotted([parent])}' is a value, not a "
                "table."
            )
        tree = inner
    tree[last] = value
