"""Metrics of single clients, and what is said of all of them: mean, worst, quantiles."""

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
        client: its id; None if no client is known.
        value: of the metric; NaN if no client is known.
    """

    client: Any
    value: float


class ClientScores(NamedTuple):
    """Metrics of every client, on its own data.

    A client that did not reply, or whose numbers are not finite, has NaN and counts nowhere.

    Attributes:
        ids: the clients.
        weights: p_i, in the order of `ids`.
        values: an array with a number for each client, by metric.
        goals: whether a metric should be large ("max") or small ("min").

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
        """Return the scores of clients 0, 1, ...; None in place of a number is NaN."""
        found = {name: np.asarray(column, float) for name, column in values.items()}
        return cls(np.arange(len(weights)), np.asarray(weights, float), found, goals)

    def mean(self, metric: str | None = None) -> float:
        """Return the mean over the clients that are known, weighted by p; NaN if there are none.

        Args:
            metric: which one; the first by default, also in the other methods.
        """
        found = self._column(metric)
        known = ~np.isnan(found)
        if not known.any():
            return np.nan
        return float(np.average(found[known], weights=self.weights[known]))

    def worst(self, metric: str | None = None) -> Worst:
        """Return the worst client and its value."""
        name = self._name(metric)
        found = self._column(name)
        if np.isnan(found).all():
            return Worst(None, np.nan)
        place = int(np.nanargmin(found) if self.goals[name] == "max" else np.nanargmax(found))
        return Worst(self.ids.tolist()[place], float(found[place]))

    def quantiles(
        self, metric: str | None = None, at: Sequence[float] = tuple(QUANTILES.values())
    ) -> list[float]:
        """Return quantiles over the clients that are known, each counted once.

        Args:
            metric: which one.
            at: which quantiles, from 0 to 1.
        """
        found = self._column(metric)
        known = found[~np.isnan(found)]
        return np.quantile(known, at).tolist() if len(known) else [np.nan] * len(at)

    @property
    def ranked(self) -> np.ndarray:
        """Return the clients' places in `ids`, the worst by the first metric first."""
        first = self._column(None)
        return np.argsort(-first if self.goals[self._name(None)] == "min" else first)

    @property
    def missing(self) -> list[Any]:
        """Return the ids of clients of which some number is unknown."""
        unknown = np.zeros(len(self.ids), bool)
        for column in self.values.values():
            unknown |= np.isnan(column)
        return self.ids[unknown].tolist()

    @property
    def columns(self) -> dict[str, float]:
        """Return the numbers that a record of the history has, such as `clients_worst_NAME`."""
        found: dict[str, float] = {}
        for name in self.values:
            numbers = self.mean(name), self.worst(name).value, *self.quantiles(name)
            found |= dict(zip(columns_of(name), numbers, strict=True))
        return found

    def frame(self) -> "pandas.DataFrame":
        """Return a pandas DataFrame with a row for each client."""
        columns = {"weight": self.weights, **self.values}
        return require("pandas", "pandas").DataFrame(columns, index=self.ids)

    def summary(self, metric: str | None = None) -> str:
        """Return a metric in words.

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
        """Return mean, worst client and quantiles by metric, and who is missing."""
        pairs = {name: (self.worst(name), self.quantiles(name)) for name in self.values}
        found = {
            name: {"mean": self.mean(name), "worst": worst.value, "client": worst.client,
                   **dict(zip(QUANTILES, quantiles, strict=True))}
            for name, (worst, quantiles) in pairs.items()
        }  # fmt: skip
        return {**found, "missing": self.missing}

    def __str__(self) -> str:
        """Return a summary of every metric, and a table with the worst clients first."""
        order = self.ranked
        shown = order[:_SHOWN]
        rows = [["client", "weight", *self.values]]
        for place in shown:
            numbers = (self.weights[place], *(column[place] for column in self.values.values()))
            rows.append([str(self.ids[place]), *(f"{number:.4g}" for number in numbers)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        more = [f"... and {len(order) - len(shown)} more"] if len(order) > len(shown) else []
        return "\n".join([*map(self.summary, self.values), *lines, *more])

    def _name(self, metric: str | None) -> str:
        name = next(iter(self.values)) if metric is None else metric
        if name not in self.values:
            known = ", ".join(self.values)
            raise UserError(f"The clients have no metric '{name}'; they have {known}.")
        return name

    def _column(self, metric: str | None) -> np.ndarray:
        return self.values[self._name(metric)]


def line_of(t: int, scores: ClientScores) -> Json:
    """Return the scores after round t as a line of the history."""
    values = {name: column.tolist() for name, column in scores.values.items()}
    return {"round": t, "weights": scores.weights.tolist(), "values": values}


def is_column(name: str) -> bool:
    """Return whether a number of a record is of the clients."""
    return name.startswith(_PREFIX)


def columns_of(metric: str) -> list[str]:
    """Return the names of a metric's numbers in records.

    Example:
        >>> columns_of("loss")[:2]
        ['clients_mean_loss', 'clients_worst_loss']
    """
    return [f"{_PREFIX}{part}_{metric}" for part in ("mean", "worst", *QUANTILES)]
