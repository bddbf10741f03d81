"""Flags: those that make up a configuration, and the values of all: text in, numbers out."""

import argparse
import math
from pathlib import Path
from typing import Any

from simfbo.config.algorithms import ALGORITHMS
from simfbo.config.messages import brief, plain
from simfbo.config.tasks import TASKS
from simfbo.errors import UserError

_MOST_SEEDS = 10_000

# Flags that have a name of their own, and the setting each stands for.
SHORTCUTS = {
    "task": "task.name",
    "dataset": "task.dataset",
    "partition": "task.partition",
    "clients": "task.clients",
    "algorithm": "algorithm.name",
    "cohort": "sampling.size",
    "rounds": "rounds",
    "every": "every",
    "seed": "seed",
    "engine": "engine",
    "steps": "steps",
}


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


def add_settings(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the flags that make up a configuration, or the common part of several."""
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help=", ".join(TASKS))
    add("--config", type=Path, metavar="FILE", help="TOML file; flags win over it")
    add("--dataset", help="as digits, mnist or schools: simfbo data lists them")
    add("--partition", help="iid (default), shards or dirichlet")
    add("--clients", type=whole, metavar="N", help="number of clients")
    if not several:
        add("--algorithm", help=" or ".join(ALGORITHMS))
        add("--seed", type=whole, help="of every random draw (default 0)")
    add(
        "--cohort",
        type=whole,
        metavar="P",
        help="clients that take part in a round (default 10, or everyone: see the task)",
    )
    add("--tau", metavar="T", help="local steps: a number, LOW..HIGH for a draw per client, or a "
        "list 1,2,3")  # fmt: skip
    add("--rounds", type=whole, metavar="T", help="iterations (default 500)")
    add(
        "--every",
        type=whole,
        metavar="K",
        help="evaluate every K iterations (default: 20 times)",
    )
    add("--engine", help="simulated (default, fast) or debug")
    add("--steps", help="auto: find step sizes; given: those of the settings")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; repeatable")
    add("--data-dir", type=Path, metavar="DIR", help="folder of the data (or SIMFBO_DATA_DIR)")
