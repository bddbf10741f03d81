"""Label noise: wrong labels for the label-cleaning task, and the rows that stay clean."""

from typing import NamedTuple

import numpy as np

from simfbo.core.keys import Purpose, seed_rng
from simfbo.core.partition import Rows
from simfbo.errors import UserError


class Noisy(NamedTuple):
    """Labels, some of them wrong.

    Attributes:
        labels: the labels that the clients hold.
        wrong: a mask of the wrong labels.
        rates: each client's expected share of wrong labels.
    """

    labels: np.ndarray
    wrong: np.ndarray
    rates: np.ndarray


def corrupted(labels: np.ndarray, parts: Rows, share: float, classes: int, seed: int) -> Noisy:
    """Replace labels by wrong ones, at a different rate for each client.

    Rates are spread evenly around `share`, from max(0, 2 share - 1) to min(1, 2 share). A wrong
    label is drawn uniformly from the other classes.
    """
    if not 0 < share < 1:
        raise UserError(f"The share of wrong labels must be between 0 and 1, got {share}.")
    rng, largest_deviation = seed_rng(seed, Purpose.WRONG_LABELS), min(share, 1 - share)
    spread = (
        np.linspace(-largest_deviation, largest_deviation, len(parts))
        if len(parts) > 1
        else np.zeros(1)
    )
    rates = rng.permutation(share + spread)
    noisy, wrong = labels.copy(), np.zeros(len(labels), bool)
    for rows, rate in zip(parts, rates, strict=True):
        wrong[rows] = rng.random(len(rows)) < rate
    noisy[wrong] = (labels[wrong] + rng.integers(1, classes, wrong.sum())) % classes
    return Noisy(noisy.astype(np.int32), wrong, rates)


def set_apart(parts: Rows, count: int, seed: int) -> tuple[Rows, Rows]:
    """Take about `count` rows evenly from the clients; return (remaining rows, taken rows).

    Every client keeps at least one row; missing rows are not taken from other clients instead.
    """
    if any(len(rows) < 2 for rows in parts):
        raise UserError("Every client needs at least two rows: one to train on and one clean one.")
    if count < len(parts):
        raise UserError(
            f"{count} clean rows are too few for {len(parts)} clients: use at least one per client."
        )
    rng, sizes = seed_rng(seed, Purpose.CLEAN_ROWS), np.full(len(parts), count // len(parts))
    sizes[: count % len(parts)] += 1
    shuffled = [rng.permutation(rows) for rows in parts]
    cuts = [min(size, len(rows) - 1) for size, rows in zip(sizes, shuffled, strict=True)]
    lower = [rows[cut:] for rows, cut in zip(shuffled, cuts, strict=True)]
    return lower, [rows[:cut] for rows, cut in zip(shuffled, cuts, strict=True)]
