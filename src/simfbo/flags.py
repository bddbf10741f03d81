"""The values of flags: text in, numbers out, or a sentence."""

import argparse
import math
from typing import Any

from simfbo.complaints import brief, plain
from simfbo.errors import UserError

_MOST_SEEDS = 10_000


def whole(text: str) -> int:
    """Return a flag's whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give a whole number, got {brief(text)}") from None


def seconds_of(text: str) -> float:
    """Return a flag's number of seconds."""
    try:
        if (seconds := float(text)) >= 0:
            return seconds
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"give a number of seconds, got {brief(text)}")


def local_steps(text: str) -> dict[str, Any]:
    """Return the settings that `--tau` stands for.

    Example:
        >>> local_steps("1..10")
        {'local_work.low': 1, 'local_work.high': 10}
    """
    try:
        if ".." in text:
            low, high = map(int, text.split(".."))
            return {"local_work.low": low, "local_work.high": high}
        taus = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--tau takes 5, 1..10 or 1,2,3; got '{plain(text)}'.") from None
    tau = taus if len(taus) > 1 else taus[0]
    return {"local_work.tau": tau, "local_work.low": None, "local_work.high": None}


def span(text: str) -> tuple[str, tuple[float, float]]:
    """Return (key, (low, high)) of KEY=LOW..HIGH.

    Example:
        >>> span("algorithm.steps.y=0.01..1")
        ('algorithm.steps.y', (0.01, 1.0))
    """
    key, _, span = text.partition("=")
    try:
        low, high = map(float, span.split(".."))
    except ValueError:
        raise UserError(f"--range takes KEY=LOW..HIGH, got '{plain(text)}'.") from None
    return key, (low, high)


def whole_numbers(text: str, flag: str) -> list[int]:
    """Return the numbers in 0..2 or 0,5,7.

    Example:
        >>> whole_numbers("0..2", "--seeds")
        [0, 1, 2]
    """
    try:
        if ".." in text:
            low, high = map(int, text.split(".."))
            if high - low >= _MOST_SEEDS:
                raise UserError(f"{flag} takes up to {_MOST_SEEDS:,} numbers, got '{plain(text)}'.")
            return list(range(low, high + 1))
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} takes 0..2 or 0,5,7; got '{plain(text)}'.") from None


def numbers(text: str, flag: str) -> list[float]:
    """Return the numbers in 0.9,0.95."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(map(math.isfinite, found)):
        raise UserError(f"{flag} takes numbers as 0.9,0.95; got '{plain(text)}'.")
    return found
