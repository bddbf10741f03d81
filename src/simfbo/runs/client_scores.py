"""Metrics of single clients and their statistics: mean, worst, quantiles."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from simfbo.errors import UserError, require
from simfbo.runs.files import Json

if TYPE_CHECKING:
    import pandas

Goals = Mapping[str, Literal["max", "min"]]
QUANTILES = {"q10": 0.1, "q50": 0.5, "q90": 0.9}
_PREFIX = "clients_"
_SHOWN = 10  # clients in a table


class Worst(NamedTuple):
    """The client with the worst value of a metric.

    Attributes:
        client: its id; None if no client has a value.
        value: of the metric; NaN if no client has one.
    """

    client: Any
    value: float


class ClientScores(NamedTuple):
    """Metrics of every client, on its own data.

    A client without a finite reply has NaN and is excluded from all statistics.

    Attributes:
        ids: the clients.
        weights: p_i, in the order of `ids`.
        values: an array with a number for each client, by metric.
        goals: "max" or "min", by metric.

    Example:
        >>> scores = ClientScores.of([0.5, 0.5], {"loss": [1.0, 3.0]}, {"loss": "min"})
        >>> scores.mean("loss"), scores.worst("loss")
        (2.0, Worst(client=1, value=3.0))
    """

    ids: np.ndarray
    weights: np.ndarray
    values: Mapping[str, np.ndarray]
    goals: Goals

    @classmethod
    def of(
        cls,
        weights: Any,
        values: Mapping[str, Any],
        goals: Goals,
    ) -> "ClientScores":
        """Create the scores of clients 0, 1, ...; None becomes NaN."""
        columns = {name: np.asarray(column, float) for name, column in values.items()}
        return cls(np.arange(len(weights)), np.asarray(weights, float), columns, goals)

    def mean(self, metric: str | None = None) -> float:
        """Return the mean over the clients with a value, weighted by p; NaN if there are none.

        Args:
            metric: the first by default, also in the other methods.
        """
        values = self._column(metric)
        valid = ~np.isnan(values)
        if not valid.any():
            return np.nan
        return float(np.average(values[valid], weights=self.weights[valid]))

    def worst(self, metric: str | None = None) -> Worst:
        """Return the worst client and its value."""
        name = self._name(metric)
        values = self._column(name)
        if np.isnan(values).all():
            return Worst(None, np.nan)
        index = int(np.nanargmin(values) if self.goals[name] == "max" else np.nanargmax(values))
        return Worst(self.ids.tolist()[index], float(values[index]))

    def quantiles(
        self, metric: str | None = None, at: Sequence[float] = tuple(QUANTILES.values())
    ) -> list[float]:
        """Return unweighted quantiles over the clients with a value.

        Args:
            metric: the first by default.
            at: probabilities from 0 to 1.
        """
        values = self._column(metric)
        valid = values[~np.isnan(values)]
        return np.quantile(valid, at).tolist() if len(valid) else [np.nan] * len(at)

    @property
    def ranked(self) -> np.ndarray:
        """Indices into `ids`, the worst client by the first metric first."""
        first = self._column(None)
        return np.argsort(-first if self.goals[self._name(None)] == "min" else first)

    @property
    def missing(self) -> list[Any]:
        """The ids of clients that lack a value of some metric."""
        incomplete = np.zeros(len(self.ids), bool)
        for column in self.values.values():
            incomplete |= np.isnan(column)
        return self.ids[incomplete].tolist()

    @property
    def columns(self) -> dict[str, float]:
        """The statistics in a record of the history, such as `clients_worst_NAME`."""
        statistics: dict[str, float] = {}
        for name in self.values:
            numbers = self.mean(name), self.worst(name).value, *self.quantiles(name)
            statistics |= dict(zip(columns_of(name), numbers, strict=True))
        return statistics

    def frame(self) -> "pandas.DataFrame":
        """Return a pandas DataFrame with a row for each client."""
        columns = {"weight": self.weights, **self.values}
        return require("pandas", "pandas").DataFrame(columns, index=self.ids)

    def summary(self, metric: str | None = None) -> str:
        """Summarise a metric in a line of text.

        Example:
            >>> ClientScores.of([0.5, 0.5], {"loss": [1.0, 3.0]}, {"loss": "min"}).summary()
            'loss: mean 2, worst 3 (client 1), 10-90 %: 1.2 to 2.8'
        """
        name = self._name(metric)
        low, *_, high = self.quantiles(name)
        client, value = self.worst(name)
        return (
            f"{name.replace('_', ' ')}: mean {self.mean(name):.4g}, worst {value:.4g} "
            f"(client {client}), 10-90 %: {low:.4g} to {high:.4g}"
        )

    def as_json(self) -> Json:
        """Return mean, worst client and quantiles by metric, and the ids of missing clients."""
        result: Json = {}
        for name in self.values:
            worst, quantiles = self.worst(name), self.quantiles(name)
            result[name] = {
                "mean": self.mean(name),
                "worst": worst.value,
                "client": worst.client,
                **dict(zip(QUANTILES, quantiles, strict=True)),
            }
        return {**result, "missing": self.missing}

    def __str__(self) -> str:
        """Return a summary of every metric, and a table with the worst clients first."""
        order = self.ranked
        shown = order[:_SHOWN]
        rows = [["client", "weight", *self.values]]
        for i in shown:
            numbers = (self.weights[i], *(column[i] for column in self.values.values()))
            rows.append([str(self.ids[i]), *(f"{number:.4g}" for number in numbers)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        more = [f"... and {len(order) - len(shown)} more"] if len(order) > len(shown) else []
        return "\n".join([*map(self.summary, self.values), *lines, *more])

    def _name(self, metric: str | None) -> str:
        name = next(iter(self.values)) if metric is None else metric
        if name not in self.values:
            names = ", ".join(self.values)
            raise UserError(f"The clients have no metric '{name}'; they have {names}.")
        return name

    def _column(self, metric: str | None) -> np.ndarray:
        return self.values[self._name(metric)]


def line_of(t: int, scores: ClientScores) -> Json:
    """Return the scores after round t as a line of the history."""
    values = {name: column.tolist() for name, column in scores.values.items()}
    return {"round": t, "weights": scores.weights.tolist(), "values": values}


def is_column(name: str) -> bool:
    """Check if a column of a record is a statistic of clients' metrics."""
    return name.startswith(_PREFIX)


def columns_of(metric: str) -> list[str]:
    """Return the columns of a metric in records.

    Example:
        >>> columns_of("loss")[:2]
        ['clients_mean_loss', 'clients_worst_loss']
    """
    return [f"{_PREFIX}{statistic}_{metric}" for statistic in ("mean", "worst", *QUANTILES)]
