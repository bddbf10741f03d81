"""Evaluation on clients: every client measures a state on its upper samples.

An evaluation is one exchange with all clients, by `federation.gather`. Its random keys and its
state are separate from those of training, so that a run is the same with and without it.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.exchange import EVALUATION
from simfbo.core.federation import Client, ClientStep, Federation
from simfbo.core.keys import Purpose
from simfbo.core.method import Method
from simfbo.core.problem import Loss, Point, PyTree, average
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError
from simfbo.privacy import privacy_of
from simfbo.runs.client_scores import ClientScores, Goals


class ClientMetric(NamedTuple):
    """A metric on a client's upper samples.

    Attributes:
        measure: (x, y, batch) -> a number: a mean over the samples of the batch, plus terms that do
            not depend on any sample.
        goal: "min" or "max"; determines the worst client.
    """

    measure: Loss
    goal: Literal["max", "min"] = "min"


Asked = Mapping[str, Loss | ClientMetric]
Measures = tuple[tuple[str, Loss], ...]


class ClientMetrics(eqx.Module):
    """The client step that measures a state on all of the client's upper samples, without codecs.

    Attributes:
        measures: the metrics, by name.
        method: the method whose `client_y` is evaluated, if lower variables are personal.
    """

    measures: Measures = eqx.field(static=True)
    method: Method | None
    uncoded: ClassVar[bool] = True

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return EVALUATION

    def __call__(self, payload: Point[PyTree], client: Client) -> tuple[jax.Array, ...]:
        """Return the metrics."""
        y = payload.y if self.method is None else self.method.client_y(client.memory)
        batch = client.data.upper.full(client.data.client)

        def mean(name: str, measure: Loss) -> jax.Array:
            return average(lambda samples: _scalar(name, measure(payload.x, y, samples)), batch)

        return tuple(mean(*named) for named in self.measures)


class Evaluation(NamedTuple):
    """An evaluation on all clients.

    Attributes:
        client_step: computes the metrics.
        goals: of the metrics, by name.
        method: whose states are evaluated; None for x and y of the state.
    """

    client_step: ClientStep
    goals: Goals
    method: Method | None = None

    def ask(self, federation: Federation, state: PyTree, key: jax.Array) -> ClientScores:
        """Evaluate a state on all clients.

        Args:
            federation: whose clients.
            state: of the algorithm.
            key: of the round.
        """
        at, personal = state, False
        if self.method is not None:
            at, personal = self.method.evaluation_point(state), self.method.is_personal
        payload = Point(x=at.x, y=None if personal else at.y)
        cohort = Cohort(np.arange(federation.n, dtype=np.int32), federation.p)
        key = jax.random.fold_in(key, int(Purpose.CLIENT_METRICS))
        replies = federation.gather(self.client_step, payload, cohort, key)
        latest = federation.latest
        assert latest is not None, "an exchange has just ended"
        columns = [np.asarray(column, float) / latest.factor for column in replies]
        values = [np.where(latest.admitted, column, np.nan) for column in columns]
        return ClientScores.of(federation.p, dict(zip(self.goals, values, strict=True)), self.goals)

    def unknown(self, federation: Federation) -> ClientScores:
        """Return NaN for all clients, for an evaluation that failed."""
        values = dict.fromkeys(self.goals, np.full(federation.n, np.nan))
        return ClientScores.of(federation.p, values, self.goals)


def evaluation_of(asked: Asked, algorithm: Method | None = None) -> Evaluation:
    """Create the evaluation of an algorithm on its clients.

    Args:
        asked: the metrics, by name; a plain function has the goal "min".
        algorithm: the method of the run; None for x and y of the state.
    """
    if algorithm is not None and privacy_of(algorithm) is not None:
        raise UserError(
            f"The messages of {algorithm.name} are differentially private, and metrics of single "
            "clients would not be: leave out client_metrics."
        )
    if not asked:
        raise UserError("client_metrics is empty: name at least one metric, or leave it out.")
    metrics = {name: _as_metric(metric) for name, metric in asked.items()}
    measures = tuple((name, metric.measure) for name, metric in metrics.items())
    goals: Goals = {name: metric.goal for name, metric in metrics.items()}
    personal = algorithm if algorithm is not None and algorithm.is_personal else None
    return Evaluation(ClientMetrics(measures, personal), goals, algorithm)


def _as_metric(metric: Loss | ClientMetric) -> ClientMetric:
    return metric if isinstance(metric, ClientMetric) else ClientMetric(metric)


def _scalar(name: str, result: jax.Array) -> jax.Array:
    """Convert the result of a metric to a floating-point scalar; raise if it has axes."""
    value = jnp.asarray(result)
    if value.ndim:
        raise UserError(
            f"The client metric '{name}' returns an array of shape {value.shape}: return one "
            "number, a mean over the samples of the batch."
        )
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)
