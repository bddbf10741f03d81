"""Settings of robustness: the gate, the aggregators and privacy."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from simfbo.config.fields import Absent, Positive, Strict, Weight

AggregatorName = Literal[
    "mean", "median", "trimmed-mean", "clipped-mean", "geometric-median", "centred-clipping"
]


class GateConfig(Strict):
    """Reply validation, the smallest number of replies, and the criterion of divergence."""

    max_norm: Annotated[Positive | Literal["auto"] | None, Absent] = None
    min_replies: PositiveInt = 1
    explosion: Positive = 1e6
    drop_out: Annotated[float, Field(ge=0, lt=1)] = 0.0


class AggregationConfig(Strict):
    """The aggregators, by channel.

    The default `clip` is the cohort's median norm, the default `radius` the median distance of its
    messages from their median. With `momenta`, clients send moving averages of their messages, with
    this weight of the newest.
    """

    x: AggregatorName = "mean"
    y: AggregatorName = "mean"
    v: AggregatorName = "mean"
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    clip: Annotated[Positive | None, Absent] = None
    radius: Annotated[Positive | None, Absent] = None
    iterations: Annotated[int, Field(ge=1, le=1000)] = 8
    momenta: Annotated[Weight | None, Absent] = None


class ChannelsConfig(Strict):
    """A number for each channel."""

    x: Positive = 1.0
    y: Positive = 1.0
    v: Positive = 1.0


class PrivacyConfig(Strict):
    """Clipping norms and noise multipliers by channel, and the side that adds the noise."""

    clip: ChannelsConfig = ChannelsConfig()
    noise: ChannelsConfig = ChannelsConfig()
    where: Literal["server", "client"] = "server"
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
