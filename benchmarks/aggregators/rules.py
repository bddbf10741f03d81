"""The aggregators that are compared."""

from simfbo.core.aggregation import (
    Aggregator,
    Aggregators,
    clipped_mean,
    mean,
    median,
    trimmed_mean,
)

RULES: dict[str, Aggregator] = {
    "mean": mean(),
    "trimmed-mean 0.1": trimmed_mean(0.1),
    "trimmed-mean 0.2": trimmed_mean(0.2),
    "median": median(),
    "clipped-mean": clipped_mean(),
}


def everywhere(name: str) -> Aggregators:
    """Return the aggregator of this name on all three channels."""
    return Aggregators(*[RULES[name]] * 3)
