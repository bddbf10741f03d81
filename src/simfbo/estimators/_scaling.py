"""The one exchange before training: means and deviations over all clients' rows.

Clients send the means of their columns and of the squares, weighed by their numbers of rows; nobody
sees another's rows. In double precision, since a difference of squares is what is wanted of them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.core.data import federate
from simfbo.core.federation import Client, Ledger
from simfbo.core.partition import Rows
from simfbo.core.problem import evaluate
from simfbo.engines.simulated import SimulatedFederation
from simfbo.estimators._reuse import form, lend


class Units(NamedTuple):
    """The shift and scale of every column.

    Attributes:
        mean: [d].
        deviation: [d]; for a column that does not vary, whatever is not zero.
    """

    mean: np.ndarray
    deviation: np.ndarray

    def __call__(self, columns: np.ndarray) -> np.ndarray:
        """Return columns of mean 0 and deviation 1, in single precision."""
        return ((columns - self.mean) / self.deviation).astype(np.float32)

    def part(self, columns: slice) -> "Units":
        """Return the units of some columns."""
        return Units(self.mean[columns], self.deviation[columns])


def measure(columns: np.ndarray, parts: Rows) -> tuple[Units, Ledger]:
    """Return the units of columns that clients hold, and the ledger with that one exchange."""
    with jax.enable_x64(True):
        data, ledger = federate(columns, parts, parts), Ledger()
        key = jax.random.key(0)  # nothing is drawn: everyone answers
        new = partial(SimulatedFederation, data)
        with lend(("moments", form(data.lower)), new, data, ledger) as federation:
            found = federation.aggregate(moments, (), federation.cohort(key), key)
        mean, square = (np.asarray(part, float) for part in found)
    # Less than the rounding of a sum of squares is not seen; a constant column leaves just that.
    least = len(columns) * np.finfo(float).eps * square
    deviation = np.sqrt(np.maximum(square - mean**2, least))
    return Units(mean, np.where(deviation > 0, deviation, 1.0)), ledger


def moments(payload: Any, client: Client) -> tuple[Any, Any]:
    """Return the means of a client's columns, and of their squares."""
    batch = client.data.lower.full(client.data.client)
    first = evaluate(lambda x, y, rows: rows.mean(0), None, None, batch)
    return first, evaluate(lambda x, y, rows: (rows**2).mean(0), None, None, batch)


def one_hot(places: np.ndarray, count: int) -> np.ndarray:
    """Return a column for each of `count` places; its mean is the share of the rows there."""
    return np.eye(count)[places]
