"""Fourteen tables, split into training and test rows; clients are natural where a table has them.

`split(name, seed)` takes three quarters of each client's rows for training. Made-up clients are
drawn at random.
"""

from typing import NamedTuple

import numpy as np
import pandas
from sklearn import datasets

from simfbo.datasets import load_frame

# How many made-up clients hold the rows; None: the table's own clients do.
TABLES = {
    "breast cancer": 6,
    "wine": 3,
    "digits": 10,
    "districts": None,
    "mortgages": 20,
    "voters": None,
    "values": None,
    "vaccinations": None,
    "diabetes": 10,
    "houses": 6,
    "schools": None,
    "exam": None,
    "attainment": None,
    "pupils": None,
}
BUNDLED = {
    "breast cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
    "digits": datasets.load_digits,
    "diabetes": datasets.load_diabetes,
}
NUMBERS = ("diabetes", "houses", "schools", "exam", "attainment", "pupils")


class Rows(NamedTuple):
    """Rows of a table: features with text and gaps, the target, and the client of each row."""

    frame: pandas.DataFrame
    target: np.ndarray
    clients: np.ndarray


def load(name: str, seed: int) -> Rows:
    """Load a table; the target is text for classes, and numbers otherwise."""
    if name in BUNDLED:
        found = BUNDLED[name](as_frame=True)
        frame, target, column = found.data, found.target.to_numpy(), None
    else:
        frame, target, column, _ = load_frame(name)
    made_up = TABLES[name]
    if column is None:
        clients = np.random.default_rng([seed, 1]).integers(0, made_up, len(target))
    else:
        frame, clients = frame.drop(columns=column), frame[column].to_numpy()
    return Rows(frame, target.astype(float) if name in NUMBERS else target.astype(str), clients)


def split(name: str, seed: int) -> tuple[Rows, Rows]:
    """Return training and test rows."""
    rows, rng = load(name, seed), np.random.default_rng([seed, 0])
    train = np.zeros(len(rows.target), bool)
    for client in np.unique(rows.clients):
        own = rng.permutation(np.flatnonzero(rows.clients == client))
        train[own[: -(-3 * len(own) // 4)]] = True
    return part(rows, train), part(rows, ~train)


def part(rows: Rows, chosen: np.ndarray) -> Rows:
    """Return some of the rows."""
    return Rows(rows.frame[chosen], rows.target[chosen], rows.clients[chosen])
