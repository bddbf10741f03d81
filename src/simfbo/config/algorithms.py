"""The settings of each algorithm, one model per method: a method has no field it does not use."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, lt=2**31)]
# TOML has no null: "none" and "full" stand for it where a value may be missing.
Absent = BeforeValidator(lambda value: None if value in ("none", "full") else value)


class Strict(BaseModel):
    """No unknown keys, no silent conversions from text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StepsConfig(Strict):
    """Step sizes for y, v and x; left out, they are the SimFBO paper's."""

    y: Positive = 0.2
    v: Positive = 0.1
    x: Positive = 0.05


class PairConfig(Strict):
    """Step sizes for y and x, of a method without v."""

    y: Positive = 0.2
    x: Positive = 0.05


class _LocalAndServer(Strict):
    """Steps of the clients and of the server; left out, a server step is the local one.

    With `cosine` the server's steps fall to zero over the run's iterations.
    """

    server_optimiser: Literal["sgd", "momentum", "adam"] = "sgd"
    server_schedule: Literal["constant", "cosine"] = "constant"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        match values:
            case {"local": dict() as local, "server": dict() as server}:
                return {**values, "server": local | server}
        return values


class SimFBOConfig(_LocalAndServer):
    """SimFBO and ShroFBO take the same settings."""

    name: Literal["simfbo", "shrofbo"] = "simfbo"
    local: StepsConfig = StepsConfig()
    server: StepsConfig | None = None
    radius: Annotated[Positive | None, Absent] = 10.0
    independent_batches: bool = False


class MemFBOConfig(_LocalAndServer):
    """MemFBO."""

    name: Literal["memfbo"]
    local: PairConfig = PairConfig()
    server: PairConfig | None = None
    penalty: Positive = 100.0


class FedNestConfig(Strict):
    """FedNest; its step `v` is that of the Neumann series."""

    name: Literal["fednest"]
    steps: StepsConfig = StepsConfig()
    lower_rounds: Count = 1
    neumann_terms: Count = 5
    mode: Literal["paper", "as_released"] = "paper"
    drawn: bool = False
    one_upper_step: bool = False


class LFedNestConfig(Strict):
    """LFedNest."""

    name: Literal["lfednest"]
    steps: StepsConfig = StepsConfig()
    lower_rounds: Count = 1
    neumann_terms: Count = 5


class AggITDConfig(Strict):
    """FBO-AggITD; its step `v` is the paper's lambda."""

    name: Literal["aggitd"]
    steps: StepsConfig = StepsConfig()
    lower_rounds: Count = 5


class FedBiOConfig(Strict):
    """FedBiO."""

    name: Literal["fedbio"]
    steps: StepsConfig = StepsConfig()
    radius: Annotated[Positive | None, Absent] = 10.0


class FedMBOConfig(Strict):
    """FedMBO; its step `v` is that of the series along the chains."""

    name: Literal["fedmbo"]
    steps: StepsConfig = StepsConfig()
    lower_rounds: Count = 1
    neumann_terms: Count = 5
    mode: Literal["paper", "as_released"] = "paper"


AlgorithmConfig = Annotated[
    SimFBOConfig
    | FedNestConfig
    | LFedNestConfig
    | AggITDConfig
    | FedBiOConfig
    | FedMBOConfig
    | MemFBOConfig,
    Field(discriminator="name"),
]
ALGORITHMS = ("simfbo", "shrofbo", "fednest", "lfednest", "aggitd", "fedbio", "fedmbo", "memfbo")


def steps_table(config: AlgorithmConfig) -> str:
    """Return the name of the table that holds a method's step sizes, the server's where given."""
    if hasattr(config, "steps"):
        return "steps"
    return "local" if getattr(config, "server", None) is None else "server"


# Whom a method's authors let take part, where that is not SimFBO's sampling without replacement.
SAMPLING = {"fedbio": "everyone", "fedmbo": "with-replacement"}
