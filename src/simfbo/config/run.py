"""The configuration of a run: TOML and flags in, a checked model out.

Light on purpose: nothing here imports JAX, so that `simfbo --help` and a mistyped key answer at
once. `simfbo.config.build` turns a configuration into the objects of a run.
"""

import copy
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, model_validator

from simfbo.config.algorithms import SAMPLING, AlgorithmConfig, Count, SimFBOConfig, Strict
from simfbo.config.messages import brief, dotted, plain, sentence
from simfbo.config.safety import AggregationConfig, GateConfig, PrivacyConfig
from simfbo.config.tasks import NUMBERS, PRACTICAL, Clients, TaskConfig
from simfbo.errors import UserError

Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
LocalSteps = Annotated[int, Field(gt=0, le=1000)]
_MOST_CHAINS = 10_000  # clients of a FedMBO round
_DEEPEST = 10  # tables in tables
_LONGEST = 20_000_000  # characters of a file: a million clients' local steps


# What a method's steps are set by.
STEPS = ("local", "server", "steps", "server_optimiser", "server_schedule")
# Methods that may project v onto a ball.
RADIUS = ("simfbo", "shrofbo", "fedbio")
# Methods with one exchange per cohort, whose privacy can be accounted for.
ONE_EXCHANGE = ("simfbo", "shrofbo", "fedbio", "memfbo")


class SamplingConfig(Strict):
    """Who takes part in a round; left out, `size` is 10, or all where there are fewer."""

    kind: Literal["everyone", "without-replacement", "with-replacement"] = "without-replacement"
    size: Clients | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "SamplingConfig":
        if self.kind == "everyone" and self.size is not None:
            raise ValueError("everyone takes part, so leave size out")
        return self


class LocalWorkConfig(Strict):
    """How much each client does: `tau`, or `low` and `high` for a uniform draw."""

    tau: Annotated[
        Annotated[LocalSteps, Tag("all")] | Annotated[list[LocalSteps], Tag("each")],
        Discriminator(lambda value: "each" if isinstance(value, list) else "all"),
    ] = 1
    low: LocalSteps | None = None
    high: LocalSteps | None = None
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

    def most(self) -> int:
        """Return the largest number of local steps that a client may take."""
        return self.high or (max(self.tau, default=1) if isinstance(self.tau, list) else self.tau)


class RunConfig(Strict):
    """Everything a run depends on; left out, `every` makes about 20 evaluations.

    With `steps` auto the method finds its step sizes, and those of its settings are not used. Left
    out, that is so for the tasks whose upper level is the point, unless some step size is given.
    """

    task: TaskConfig
    algorithm: AlgorithmConfig = SimFBOConfig()
    sampling: SamplingConfig = SamplingConfig()
    local_work: LocalWorkConfig = LocalWorkConfig()
    gate: GateConfig = GateConfig()
    aggregation: AggregationConfig = AggregationConfig()
    privacy: PrivacyConfig | None = None
    engine: Literal["simulated", "debug"] = "simulated"
    steps: Literal["auto", "given"] = "given"
    rounds: Count = 500
    every: Count | None = None
    seed: int = Field(0, ge=0, lt=2**32)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Return the settings with SimFBO for a missing name, and the method's own sampling."""
        if not isinstance(values, dict):
            return values
        _refuse_other_names(values)
        algorithm, who = values.get("algorithm", {}), values.get("sampling", {})
        if isinstance(algorithm, dict):
            algorithm = {"name": "simfbo", **algorithm}
            practical = _name(values, "task", "") in PRACTICAL
            kind = SAMPLING.get(algorithm["name"], "everyone" if practical else None)
            if kind and isinstance(who, dict) and (kind != "everyone" or who.get("size") is None):
                values = {**values, "sampling": {"kind": kind, **who}}
            given = any(key in algorithm for key in STEPS)
            values = {"steps": "auto" if practical and not given else "given", **values}
            if values["steps"] == "auto" and algorithm["name"] in RADIUS:
                algorithm = {"radius": "none", **algorithm}
            values = {**values, "algorithm": algorithm}
        return values

    @model_validator(mode="after")
    def _auto_fits(self) -> "RunConfig":
        if self.steps == "auto" and self.privacy is not None:
            raise ValueError(
                "'privacy' does not cover the search for steps: set steps to given, and "
                "algorithm.local"
            )
        return self

    @model_validator(mode="after")
    def _can_be_private(self) -> "RunConfig":
        if self.privacy is None:
            return self
        if self.algorithm.name not in ONE_EXCHANGE:
            raise ValueError(f"'privacy' is accounted for {', '.join(ONE_EXCHANGE)} only")
        if self.sampling.kind == "with-replacement":
            raise ValueError("'privacy' needs sampling without replacement, or everyone")
        if {self.aggregation.x, self.aggregation.y, self.aggregation.v} != {"mean"}:
            raise ValueError("'privacy' is accounted for the mean only: leave 'aggregation' out")
        return self

    @model_validator(mode="after")
    def _fits_into_memory(self) -> "RunConfig":
        if self.task.clients * self.local_work.most() > NUMBERS // 10:
            raise ValueError(
                f"'task.clients' times the most local steps must not exceed {NUMBERS // 10:,}: "
                "lower one of them"
            )
        if self.algorithm.name == "fedmbo" and self.cohort_size(self.task.clients) > _MOST_CHAINS:
            raise ValueError(
                f"'sampling.size' must not exceed {_MOST_CHAINS:,} for fedmbo, which holds a "
                f"square of it, got {self.cohort_size(self.task.clients)}"
            )
        return self

    def cohort_size(self, n: int) -> int:
        """Return how many of n clients are asked in an exchange."""
        return n if self.sampling.kind == "everyone" else self.sampling.size or min(10, n)


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
    tree = copied(tree)
    for key, value in overrides.items():
        _put(tree, key, value)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        chosen = {"task": _name(tree, "task", ""), "algorithm": _name(tree, "algorithm", "simfbo")}
        raise UserError(sentence(error, RunConfig, chosen)) from None


def copied(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of nested dictionaries, after a check that no function has to dig deep."""
    for key, value in tree.items():
        level, depth = [value], 0
        while level := [inner for outer in level for inner in _inside(outer)]:
            depth += 1
            if depth > _DEEPEST:
                raise UserError(f"'{dotted([key])}' is nested too deeply: no setting lies so deep.")
    return copy.deepcopy(tree)


def _inside(value: Any) -> Iterable[Any]:
    """Return what a table or a list holds."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _refuse_other_names(tree: dict[str, Any]) -> None:
    """Raise where a task or an algorithm has a name that is no text."""
    for table in ("task", "algorithm"):
        match tree.get(table):
            case {"name": name} if not isinstance(name, str):
                raise ValueError(
                    f"'{table}.name' is wrong: input should be a valid string, got {brief(name)}"
                )


def _name(tree: dict[str, Any], table: str, default: str) -> str:
    """Return the name that stands in a table."""
    found = tree.get(table)
    name = found.get("name", default) if isinstance(found, dict) else default
    return name if isinstance(name, str) else default


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
        raise UserError(f"'{plain(text)}' is no setting: write KEY=VALUE, as in task.clients=50.")
    try:
        found = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):  # no TOML, too many digits, too deep
        return key.strip(), value.strip()
    return key.strip(), found["value"] if len(found) == 1 else value.strip()


def read(file: Path) -> dict[str, Any]:
    """Return a TOML file as nested dictionaries."""
    name = plain(str(file), 1000)
    try:
        with file.open(encoding="utf-8-sig") as stream:
            text = stream.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise UserError(f"{name} is too long for a configuration: give another file.")
        return tomllib.loads(text)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{name} is not valid TOML: save it as UTF-8 text.") from None
    except RecursionError:
        raise UserError(f"{name} is nested too deeply: no setting lies so deep.") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not valid TOML: {plain(str(error), 150)}.") from None
    except ValueError:  # Python converts no integers of thousands of digits
        raise UserError(f"{name} holds a number of too many digits: write a smaller one.") from None


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a nested dictionary."""
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(
                f"'{dotted(key.split('.'))}' cannot be set: '{dotted([parent])}' is a value, not a "
                "table."
            )
    tree[last] = value
