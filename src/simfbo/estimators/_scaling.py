"""The one exchange before training: means and standard deviations over all clients' rows.

Clients send the means of their columns and of the squares, weighted by their numbers of rows;
nobody sees another client's rows. They use double precision, because a variance is the difference
of two such means.
"""

from typing import NamedTuple

import jax
import numpy as np

from simfbo.core.data import federate
from simfbo.core.federation import Client
from simfbo.core.ledger import Ledger
from simfbo.core.partition import Rows, by_user
from simfbo.core.problem import PyTree, evaluate
from simfbo.engines.simulated import SimulatedFederation
from simfbo.estimators._validation import Members
from simfbo.tasks.samples import Training


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
        classes: the number of classes; 0 if the target is a number.
        clients: which client holds which row.
    """

    inputs: np.ndarray
    target: np.ndarray
    classes: int
    clients: Members

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
        target_units: mean and deviation of the target; 0 and 1 for classes.
        shares: the means of the extra columns.
        ledger: with the exchange that measured the units.
    """

    training: Training
    units: Units
    target_units: tuple[float, float]
    shares: np.ndarray
    ledger: Ledger


def standardised(table: Table, *extra: np.ndarray) -> Scaled:
    """Standardise the rows, by one exchange over the clients.

    Args:
        table: the rows.
        extra: further columns to average in the same exchange.
    """
    own = () if table.classes else (table.target[:, None],)
    units, ledger = measure(np.hstack([table.inputs, *own, *extra]), table.parts)
    width = table.inputs.shape[1]
    of_features, target, scale = units.part(slice(width)), table.target, (0.0, 1.0)
    if own:
        scale = float(units.mean[width]), float(units.deviation[width])
        target = ((target - scale[0]) / scale[1]).astype(np.float32)
    training = Training(of_features(table.inputs), target, table.classes, table.parts)
    return Scaled(training, of_features, scale, units.mean[width + len(own) :], ledger)


def measure(columns: np.ndarray, parts: Rows) -> tuple[Units, Ledger]:
    """Measure the units of the clients' columns; the ledger records that one exchange."""
    with jax.enable_x64(True):
        federation = SimulatedFederation(federate(columns, parts, parts))
        key = jax.random.key(0)  # nothing is drawn: all clients reply
        found = federation.sum(moments, (), federation.cohort(key), key)
        mean, square = (np.asarray(part, float) for part in found)
    # A variance below the rounding error of the sums cannot be measured: use that error instead.
    least = len(columns) * np.finfo(float).eps * square
    deviation = np.sqrt(np.maximum(square - mean**2, least))
    return Units(mean, np.where(deviation > 0, deviation, 1.0)), federation.ledger


def moments(payload: PyTree, client: Client) -> tuple[PyTree, PyTree]:
    """Return the means of a client's columns and of their squares."""
    batch = client.data.lower.full(client.data.client)
    first = evaluate(lambda x, y, rows: rows.mean(0), None, None, batch)
    return first, evaluate(lambda x, y, rows: (rows**2).mean(0), None, None, batch)


def one_hot(labels: np.ndarray, count: int) -> np.ndarray:
    """Return a 0/1 column for each of `count` labels; its mean is the label's share of the rows."""
    return np.eye(count)[labels]
