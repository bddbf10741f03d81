"""Two exchanges before training: means and standard deviations over all clients' rows.

Clients send the means of their columns, weighted by their numbers of rows, and then, once they know
the mean over all, those of the squared distances from it; nobody sees another client's rows. From
squares alone, a variance would be the difference of two numbers that may be almost equal.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from simfbo.core.data import federate, pad_to_buckets
from simfbo.core.federation import Client
from simfbo.core.ledger import Ledger
from simfbo.core.partition import Rows, by_user
from simfbo.core.problem import PyTree, average
from simfbo.engines.simulated import SimulatedFederation
from simfbo.errors import UserError
from simfbo.estimators._validation import Data, Members
from simfbo.tasks.linear import Target
from simfbo.tasks.samples import Training

Pair = tuple[float, float]


class Units(NamedTuple):
    """The shift and scale of every column.

    Attributes:
        mean: [d].
        deviation: [d]; any nonzero number for a constant column.
    """

    mean: np.ndarray
    deviation: np.ndarray

    def __call__(self, columns: np.ndarray) -> np.ndarray:
        """Return the columns standardised, in single precision."""
        return ((columns - self.mean) / self.deviation).astype(np.float32)

    def part(self, columns: slice) -> "Units":
        """Return the units of some of the columns."""
        return Units(self.mean[columns], self.deviation[columns])


class Table(NamedTuple):
    """The validated arguments of `fit`.

    Attributes:
        inputs: [N, d] in the user's units.
        target: [N], indices into `classes_`, or numbers in the user's units.
        classes: the number of classes, or a `simfbo.tasks.linear.Target`.
        clients: which client holds which row.
        given: further arguments of `fit` with a value per row, by name; None where they are absent.
        ledger: with the exchanges so far, if there were any.
    """

    inputs: np.ndarray
    target: np.ndarray
    classes: int
    clients: Members
    given: Mapping[str, Data]
    ledger: Ledger

    @property
    def parts(self) -> Rows:
        """Return each client's rows."""
        return by_user(self.clients.owner)


class Scaled(NamedTuple):
    """Standardised rows, and how they were scaled.

    Attributes:
        training: the standardised features, the target (standardised if it is a number) and the
            clients' rows.
        units: of the features.
        target_units: mean and deviation of the target; 0 and 1 for classes, the logarithm of the
            mean and 1 for counts and sizes.
        shares: the means of the extra columns.
        ledger: the table's, with the exchanges that measured the units.
    """

    training: Training
    units: Units
    target_units: Pair
    shares: np.ndarray
    ledger: Ledger


def standardised(table: Table, *extra: np.ndarray, weight: np.ndarray | None = None) -> Scaled:
    """Standardise the rows, by two exchanges over the clients.

    Args:
        table: the rows.
        extra: further columns to average in the same exchanges.
        weight: [N], how much each row counts; all the same by default.
    """
    own = () if table.classes > 0 else (table.target[:, None],)
    columns = np.hstack([table.inputs, *own, *extra])
    units, mean_weight = measure(columns, table.parts, table.ledger, weight)
    width = table.inputs.shape[1]
    of_features, target, scale = units.part(slice(width)), table.target, (0.0, 1.0)
    if own:
        target, scale = _in_units(target, units.part(slice(width, width + 1)), table.classes)
    share = None if weight is None else (weight / mean_weight).astype(np.float32)
    training = Training(of_features(table.inputs), target, table.classes, table.parts, share)
    return Scaled(training, of_features, scale, units.mean[width + len(own) :], table.ledger)


def _in_units(target: np.ndarray, units: Units, kind: int) -> tuple[np.ndarray, Pair]:
    """Return the target in units of its own, and what takes a model of it to the user's."""
    mean, deviation = float(units.mean[0]), float(units.deviation[0])
    if kind == Target.NUMBER:
        return units(target), (mean, deviation)
    if not mean:
        raise UserError("y is zero in every row: there is nothing to predict.")
    return (target / mean).astype(np.float32), (math.log(mean), 1.0)


def measure(
    columns: np.ndarray, parts: Rows, ledger: Ledger, weight: np.ndarray | None = None
) -> tuple[Units, float]:
    """Measure the units of the clients' columns, in two exchanges that the ledger records.

    Returns:
        The units, and the mean of the rows' weights.
    """
    weighted = weight is not None
    rows = (columns, weight) if weighted else (columns,)
    with jax.enable_x64(True):
        federation = SimulatedFederation(pad_to_buckets(federate(rows, parts, parts)))
        federation.ledger = ledger
        key = jax.random.key(0)  # nothing is drawn: all clients reply
        cohort = federation.cohort(key)
        found = federation.sum(means, (), cohort, key)
        total = float(found[1]) if weighted else 1.0
        centre = np.asarray(found[0], float) / total
        found = federation.sum(centred_moments, centre, cohort, key)
        shift, square = (np.asarray(part, float) / total for part in found)
    return units_of(centre, shift, square, len(columns)), total


def units_of(centre: np.ndarray, shift: np.ndarray, square: np.ndarray, count: float) -> Units:
    """Return the units of columns.

    Args:
        centre: numbers near the columns' means, or within a deviation of them.
        shift: the means of the columns less the centre.
        square: the means of the squares of that.
        count: of the rows; a deviation below the rounding error of a sum of so many counts as none.
    """
    mean, deviation = centre + shift, np.sqrt(np.maximum(square - shift**2, 0))
    constant = deviation <= count * np.finfo(float).eps * np.abs(mean)
    return Units(mean, np.where(constant, 1.0, deviation))


def means(payload: PyTree, client: Client) -> tuple[PyTree, ...]:
    """Return the means of a client's columns, times the rows' weights if there are any, and these.

    The samples are (columns,) or (columns, weights).
    """
    batch = client.data.lower.full(client.data.client)
    first = average(lambda rows: _weighted(rows[0], rows).mean(0), batch)
    if len(client.data.lower.samples) == 1:
        return (first,)
    return first, average(lambda rows: rows[1].mean(), batch)


def centred_moments(centre: jax.Array, client: Client) -> tuple[PyTree, PyTree]:
    """Return the means of a client's columns less the centre, and of the squares of that."""
    batch = client.data.lower.full(client.data.client)

    def mean(power: int) -> PyTree:
        return average(lambda rows: _weighted((rows[0] - centre) ** power, rows).mean(0), batch)

    return mean(1), mean(2)


def _weighted(numbers: PyTree, rows: PyTree) -> PyTree:
    """Return numbers times the weights of their rows, if these have any."""
    return numbers if len(rows) == 1 else rows[1][:, None] * numbers


def one_hot(labels: np.ndarray, count: int) -> np.ndarray:
    """Return a 0/1 column for each of `count` labels; its mean is the label's share of the rows."""
    return np.eye(count)[labels]
