"""Evaluation where the data is: every client measures a state on its own upper samples.

One exchange with all clients, through the verb. It draws nothing that training draws and changes
nothing that training depends on, so a run takes the same course with and without it.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.exchange import EVALUATION
from simfbo.core.federation import Algorithm, Client, ClientStep, Federation
from simfbo.core.keys import Purpose
from simfbo.core.privacy import is_private
from simfbo.core.problem import Loss, Point, PyTree, average
from simfbo.core.sampling import Cohort
from simfbo.errors import UserError
from simfbo.runs.client_scores import ClientScores, Goals


class ClientMetric(NamedTuple):
    """What clients measure on their own upper samples.

    Attributes:
        measure: (x, y, batch) -> a number: a mean over the samples of the batch, plus terms that do
            not depend on any sample.
        goal: whether it should be small ("min") or large ("max"); decides which client is worst.
    """

    measure: Loss
    goal: Literal["max", "min"] = "min"


Asked = Mapping[str, Loss | ClientMetric]
Measures = tuple[tuple[str, Loss], ...]
OwnY = Callable[[PyTree], PyTree] | None


class Evaluation(NamedTuple):
    """How clients are asked.

    Attributes:
        client_step: what each of them does.
        goals: of the metrics, by name.
        private: whether y is the clients' own, and not sent.
        judged: (state) -> x and y; those of the state by default.
    """

    client_step: ClientStep
    goals: Goals
    private: bool
    judged: Callable[[PyTree], Point[PyTree]] | None = None

    def ask(self, federation: Federation, state: PyTree, key: jax.Array) -> ClientScores:
        """Ask all clients for their metrics of a state.

        Args:
            federation: whose clients.
            state: of the algorithm.
            key: of the round.
        """
        at = state if self.judged is None else self.judged(state)
        payload = Point(x=at.x, y=None if self.private else at.y)
        everyone = Cohort(np.arange(federation.n, dtype=np.int32), federation.p)
        own = jax.random.fold_in(key, int(Purpose.CLIENT_METRICS))
        found = federation.gather(self.client_step, payload, everyone, own)
        latest = federation.latest
        assert latest is not None, "an exchange has just ended"
        columns = [np.asarray(column, float) / latest.factor for column in found]
        known = [np.where(latest.admitted, column, np.nan) for column in columns]
        return ClientScores.of(federation.p, dict(zip(self.goals, known, strict=True)), self.goals)

    def unknown(self, federation: Federation) -> ClientScores:
        """Return the scores of clients that cannot be asked."""
        nothing = dict.fromkeys(self.goals, np.full(federation.n, np.nan))
        return ClientScores.of(federation.p, nothing, self.goals)


def evaluation_of(asked: Asked, algorithm: Algorithm | None = None) -> Evaluation:
    """Return how the clients of an algorithm are asked for metrics.

    Args:
        asked: the metrics, by name; a function alone should be small.
        algorithm: what is run; None for one whose clients have no y of their own.
    """
    if algorithm is not None and is_private(algorithm):
        raise UserError(
            f"The messages of {algorithm.name} are differentially private, and metrics of single "
            "clients would not be: leave out client_metrics."
        )
    if not asked:
        raise UserError("client_metrics is empty: name at least one metric, or leave it out.")
    metrics = {name: _as_metric(metric) for name, metric in asked.items()}
    measures = tuple((name, metric.measure) for name, metric in metrics.items())
    goals: Goals = {name: metric.goal for name, metric in metrics.items()}
    own_y, judged = (None, None) if algorithm is None else (algorithm.own_y, algorithm.judged)
    return Evaluation(_step(measures, own_y), goals, own_y is not None, judged)


def _as_metric(given: Loss | ClientMetric) -> ClientMetric:
    return given if isinstance(given, ClientMetric) else ClientMetric(given)


def _step(measures: Measures, own_y: OwnY) -> ClientStep:
    """Return the client step, the same for the same metrics: it is compiled once."""
    try:
        return _kept(measures, own_y)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _build(measures, own_y)


def _build(measures: Measures, own_y: OwnY) -> ClientStep:
    def client_metrics(payload: Point[PyTree], client: Client) -> tuple[jax.Array, ...]:
        y = payload.y if own_y is None else own_y(client.memory)
        batch = client.data.upper.full(client.data.client)

        def mean(name: str, measure: Loss) -> jax.Array:
            return average(lambda samples: _number(name, measure(payload.x, y, samples)), batch)

        return tuple(mean(*named) for named in measures)

    assert client_metrics.__name__ == EVALUATION
    client_metrics.uncoded = True  # pyright: ignore[reportFunctionMemberAccess]
    return client_metrics


_kept = lru_cache(maxsize=32)(_build)


def _number(name: str, found: jax.Array) -> jax.Array:
    """Return a metric's value, after a check that it is one number."""
    value = jnp.asarray(found)
    if value.ndim:
        raise UserError(
            f"The client metric '{name}' returns an array of shape {value.shape}: return one "
            "number, a mean over the samples of the batch."
        )
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)
