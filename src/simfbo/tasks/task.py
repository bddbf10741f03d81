"""What a task is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from simfbo.core.data import FederatedData
from simfbo.core.problem import BilevelProblem, PyTree

Metrics = Callable[[Any], dict[str, float]]


class Baseline(NamedTuple):
    """What somebody would do without a bilevel method: train y by FedAvg at a given x.

    Attributes:
        name: as people call it.
        problem: the losses, of which the lower one is trained.
        data: what is trained on.
        y0: initial lower variable.
        candidates: values of x; with several, each is tried and the best by the task's `tuned_by`
            stays.
        evaluate: (state) -> the task's metrics by name.
    """

    name: str
    problem: BilevelProblem
    data: FederatedData
    y0: PyTree
    candidates: tuple[PyTree, ...]
    evaluate: Metrics


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
        baselines: what to print beside a result.
    """

    name: str
    problem: BilevelProblem
    data: FederatedData
    x0: PyTree
    y0: PyTree
    evaluate: Metrics
    metric: str
    tuned_by: str = ""
    baselines: tuple[Baseline, ...] = ()
