"""Two exchanges before training: means and standard deviations over all clients' rows.

Clients send the means of their columns, weighted by their numbers of rows, and then, relative to
the mean over all clients, those of the squared distances. A variance from the means of squares
alone would suffer from cancellation.
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
        """Standardise columns, in single precision."""
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
        clients: the client of each row.
        given: further arguments of `fit` with a value per row, by name, or None.
        ledger: of the exchanges so far.
    """

    inputs: np.ndarray
    target: np.ndarray
    classes: int
    clients: Members
    given: Mapping[str, Data]
    ledger: Ledger

    @property
    def parts(self) -> Rows:
        """Each client's rows."""
        return by_user(self.clients.owner)


class Scaled(NamedTuple):
    """Standardised rows and their units.

    Attributes:
        training: the standardised features, the target (standardised if it is a number) and the
            clients' rows.
        units: of the features.
        target_units: mean and deviation of the target; 0 and 1 for classes, the logarithm of the
            mean and 1 for counts and sizes.
        shares: the means of the extra columns.
        ledger: of the table, including the exchanges for the units.
    """

    training: Training
    units: Units
    target_units: Pair
    shares: np.ndarray
    ledger: Ledger


def standardised(table: Table, *extra: np.ndarray, weight: np.ndarray | None = None) -> Scaled:
    """Standardise the rows in two exchanges with the clients.

    Args:
        table: the rows.
        extra: further columns to average in the same exchanges.
        weight: [N], the weights of rows; equal by default.
    """
    is_number = table.classes <= 0
    numeric_target = [table.target[:, None]] if is_number else []
    columns = np.hstack([table.inputs, *numeric_target, *extra])
    units, mean_weight = measure(columns, table.parts, table.ledger, weight)
    width = table.inputs.shape[1]
    feature_units, target, target_units = units.part(slice(width)), table.target, (0.0, 1.0)
    if is_number:
        target_column = units.part(slice(width, width + 1))
        target, target_units = _standardised_target(target, target_column, table.classes)
    share = None if weight is None else (weight / mean_weight).astype(np.float32)
    training = Training(feature_units(table.inputs), target, table.classes, table.parts, share)
    shares = units.mean[width + is_number :]
    return Scaled(training, feature_units, target_units, shares, table.ledger)


def _standardised_target(target: np.ndarray, units: Units, kind: int) -> tuple[np.ndarray, Pair]:
    """Standardise the target; return it and the (mean, scale) that undoes it."""
    mean, deviation = float(units.mean[0]), float(units.deviation[0])
    if kind == Target.NUMBER:
        return units(target), (mean, deviation)
    if not mean:
        raise UserError("y is zero in every row: there is nothing to predict.")
    return (target / mean).astype(np.float32), (math.log(mean), 1.0)


def measure(
    columns: np.ndarray, parts: Rows, ledger: Ledger, weight: np.ndarray | None = None
) -> tuple[Units, float]:
    """Compute the units of the clients' columns in two exchanges that the ledger records.

    Returns:
        The units, and the mean of the rows' weights.
    """
    weighted = weight is not None
    rows = (columns, weight) if weighted else (columns,)
    with jax.enable_x64(True):
        federation = SimulatedFederation(pad_to_buckets(federate(rows, parts, parts)))
        federation.ledger = ledger
        key = jax.random.key(0)  # unused: there are no random draws
        cohort = federation.cohort(key)
        first = federation.sum(means, (), cohort, key)
        mean_weight = float(first[1]) if weighted else 1.0
        centre = np.asarray(first[0], float) / mean_weight
        moments = federation.sum(centred_moments, centre, cohort, key)
        shift, square = (np.asarray(moment, float) / mean_weight for moment in moments)
    return units_of(centre, shift, square, len(columns)), mean_weight


def units_of(centre: np.ndarray, shift: np.ndarray, square: np.ndarray, count: float) -> Units:
    """Compute the units of columns from their moments.

    Args:
        centre: numbers near the columns' means, or within a deviation of them.
        shift: the means of the columns minus the centre.
        square: the means of the squares of the columns minus the centre.
        count: the number of rows; columns with a deviation below the rounding error of a sum over
            these rows are constant.
    """
    mean, deviation = centre + shift, np.sqrt(np.maximum(square - shift**2, 0))
    constant = deviation <= count * np.finfo(float).eps * np.abs(mean)
    return Units(mean, np.where(constant, 1.0, deviation))


def means(payload: PyTree, client: Client) -> tuple[PyTree, ...]:
    """Return the weighted means of a client's columns and, with weights, the mean weight.

    The samples are (columns,) or (columns, weights).
    """
    batch = client.data.lower.full(client.data.client)
    column_means = average(lambda rows: _weighted(rows[0], rows).mean(0), batch)
    if len(client.data.lower.samples) == 1:
        return (column_means,)
    return column_means, average(lambda rows: rows[1].mean(), batch)


def centred_moments(centre: jax.Array, client: Client) -> tuple[PyTree, PyTree]:
    """Return the means of a client's columns minus the centre, and of their squares."""
    batch = client.data.lower.full(client.data.client)

    def mean(power: int) -> PyTree:
        return average(lambda rows: _weighted((rows[0] - centre) ** power, rows).mean(0), batch)

    return mean(1), mean(2)


def _weighted(numbers: PyTree, rows: PyTree) -> PyTree:
    """Multiply numbers by the weights of their rows, if there are any."""
    return numbers if len(rows) == 1 else rows[1][:, None] * numbers


def one_hot(labels: np.ndarray, count: int) -> np.ndarray:
    """Encode labels as `count` columns of 0 and 1, with means equal to the labels' shares."""
    return np.eye(count)[labels]
