"""Types of settings, and the models that settings derive from."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, lt=2**31)]
Share = Annotated[float, Field(gt=0, lt=1)]
Weight = Annotated[float, Field(gt=0, le=1)]
Spread = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Dimension = Annotated[int, Field(gt=0, le=100_000)]
Clients = Annotated[int, Field(gt=0, le=1_000_000)]
Folds = Annotated[int, Field(ge=2, le=100)]
# TOML has no null: "none" and "full" stand for a missing value.
Absent = BeforeValidator(lambda value: None if value in ("none", "full") else value)


def local_rule(text: str) -> tuple[str, list[float]]:
    """Parse a local rule to its name and numbers.

    Example:
        >>> local_rule("momentum:0.9")
        ('momentum', [0.9])
    """
    name, *rest = text.split(":")
    try:
        numbers = [float(part) for part in rest]
    except ValueError:
        numbers = []
    share = len(numbers) == 1 and 0 < numbers[0] < 1
    positive = len(numbers) > 0 and all(0 < number < float("inf") for number in numbers)
    fits = {"sgd": not rest, "momentum": share, "proximal": share, "coefficients": positive}
    if not fits.get(name, False):
        raise ValueError(
            "write sgd, momentum:0.9, proximal:0.1 (numbers between 0 and 1) or "
            "coefficients:1:0.5 (positive numbers, one per step)"
        )
    return name, numbers


def _checked_rule(text: str) -> str:
    local_rule(text)
    return text


LocalRuleText = Annotated[str, AfterValidator(_checked_rule)]
LARGEST = 10**9  # numbers in an array: eight gigabytes


class Strict(BaseModel):
    """No unknown keys, no silent conversions from text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MethodSettings(Strict):
    """The settings of a method."""

    name: str


class TaskSettings(Strict):
    """The settings of a task."""

    name: str


class StepSizes(Strict):
    """Step sizes for x, y and v; the defaults are the SimFBO paper's."""

    x: Positive = 0.05
    y: Positive = 0.2
    v: Positive = 0.1


class TwoStepSizes(Strict):
    """Step sizes for x and y, of a method without v."""

    x: Positive = 0.05
    y: Positive = 0.2


class LocalAndServer(MethodSettings):
    """Step sizes of the clients and of the server, which default to the clients'.

    With the schedule `cosine` the server's step sizes decay to zero over the run.
    """

    server_optimiser: Literal["sgd", "momentum", "adam"] = "sgd"
    server_schedule: Literal["constant", "cosine"] = "constant"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        match values:
            case {"local": dict() as local, "server": dict() as server}:
                return {**values, "server": local | server}
            case _:
                return values
