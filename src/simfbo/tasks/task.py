"""What a task is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from simfbo.data import FederatedData
from simfbo.problem import BilevelProblem, PyTree


class Task(NamedTuple):
    """All that a run needs besides an algorithm.

    Attributes:
        name: as people call it.
        problem: the two losses.
        data: the clients' data and weights.
        x0: initial upper variable.
        y0: initial lower variable.
        evaluate: (state) -> metrics by name.
        metric: the metric to watch.
        tuned_by: the metric that tuning may look at, where that is another one: never of test data.
    """

    name: str
    problem: BilevelProblem
    data: FederatedData
    x0: PyTree
    y0: PyTree
    evaluate: Callable[[Any], dict[str, float]]
    metric: str
    tuned_by: str = ""
