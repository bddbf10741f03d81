"""The aggregators that are compared."""

from simfbo import Point
from simfbo.robust.aggregation import (
    Aggregator,
    centred_clipping,
    clipped_mean,
    geometric_median,
    mean,
    median,
    trimmed_mean,
)

Rules = Point[Aggregator | None]

RULES: dict[str, Aggregator] = {
    "mean": mean(),
    "trimmed-mean 0.1": trimmed_mean(0.1),
    "trimmed-mean 0.2": trimmed_mean(0.2),
    "median": median(),
    "clipped-mean": clipped_mean(),
}
CENTRES: dict[str, Aggregator] = {  # younger: in the part `centres` only
    "geometric-median": geometric_median(),
    "centred-clipping": centred_clipping(),
}


def everywhere(name: str) -> Rules:
    """Return the aggregator of this name on all three channels."""
    return Point(*[(RULES | CENTRES)[name]] * 3)
