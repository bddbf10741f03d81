"""The definition of tasks and their baselines."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax

from simfbo.core.data import FederatedData
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.runs.client_metrics import ClientMetric

Metrics = Callable[[PyTree], dict[str, float]]
Goal = Literal["max", "min"]
Outputs = Callable[[PyTree, PyTree, PyTree], jax.Array]


class Setting(NamedTuple):
    """A problem assembled with its data.

    Attributes:
        problem: the two losses.
        data: the clients' data and weights.
        x0: initial upper variable.
        y0: initial lower variable.
        outputs: (x, y, batch) -> the predictions for each row of an upper batch, by a model that
            was not trained on it; None if there are none.
    """

    problem: BilevelProblem
    data: FederatedData
    x0: PyTree
    y0: PyTree
    outputs: Outputs | None = None


class Baseline(NamedTuple):
    """An alternative without a bilevel method: FedAvg trains y at a fixed x.

    Attributes:
        name: shown in tables.
        problem: the losses, of which the lower one is trained.
        data: the data to train on.
        y0: initial lower variable.
        candidates: values of x; each is tried, and the best by the task's `tuned_by` is kept.
        evaluate: (state) -> the task's metrics by name.
    """

    name: str
    problem: BilevelProblem
    data: FederatedData
    y0: PyTree
    candidates: tuple[PyTree, ...]
    evaluate: Metrics


class Task(NamedTuple):
    """Everything a run needs except the algorithm.

    Attributes:
        name: shown in reports.
        problem: the two losses.
        data: the clients' data and weights.
        x0: initial upper variable.
        y0: initial lower variable.
        evaluate: (state) -> metrics by name.
        metric: the main metric.
        goal: "max" if `metric` should be large, "min" if small.
        tuned_by: the metric for tuning, if it is not `metric`; never computed on test data.
        maximise: names of other metrics that should be large; all others should be small.
        baselines: alternatives without a bilevel method, to print next to the result.
        own_metrics: metrics that clients measure on their own upper samples, besides the upper
            loss or in its place.
    """

    name: str
    problem: BilevelProblem
    data: FederatedData
    x0: PyTree
    y0: PyTree
    evaluate: Metrics
    metric: str
    goal: Goal = "min"
    tuned_by: str = ""
    maximise: frozenset[str] = frozenset()
    baselines: tuple[Baseline, ...] = ()
    own_metrics: Mapping[str, ClientMetric] = MappingProxyType({})

    @property
    def client_metrics(self) -> dict[str, ClientMetric]:
        """The metrics that clients measure on their own upper samples, for `run`."""
        return {"upper_loss": ClientMetric(self.problem.upper), **self.own_metrics}

    @property
    def about(self) -> dict[str, Any]:
        """The entries about metrics in a history's header."""
        return {"metric": self.metric, "goal": self.goal, "maximise": sorted(self.maximise)}

    def goal_of(self, metric: str) -> Goal:
        """Return the goal of one of the task's metrics: "max" or "min".

        Example:
            >>> from simfbo.tasks import quadratic
            >>> quadratic().goal_of("x_error")
            'min'
        """
        if metric == self.metric:
            return self.goal
        return "max" if metric in self.maximise else "min"


def goal_of(metric: str) -> Goal:
    """Return the goal of a metric of the built-in tasks, for histories saved without their task.

    Example:
        >>> goal_of("test_accuracy"), goal_of("test_loss")
        ('max', 'min')
    """
    large = metric.endswith(("accuracy", "auc")) or metric == "irrelevant_shut"
    return "max" if large else "min"
