"""Comparisons: several methods, several seeds each, on one task.

Runs of one seed share data, partition and initial point, whatever the method: all three are drawn
from the task's settings and the seed alone.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from simfbo.config.algorithms import ALGORITHMS
from simfbo.config.messages import brief, dotted, plain
from simfbo.config.run import RunConfig, checked, copied
from simfbo.errors import UserError
from simfbo.runs.history import History
from simfbo.studies.sweep import Job

Groups = Mapping[str, Sequence[History]]
_LOST = ("diverged", "starved")
_COMMON = ("task", "seed", "engine")  # what a method may not set for itself


def plan(
    tree: dict[str, Any], overrides: Mapping[str, Any], names: Sequence[str] | None = None
) -> dict[str, RunConfig]:
    """Return the settings of each method of a comparison, by name.

    Args:
        tree: the TOML file as dictionaries: settings of all, and a table `methods.NAME` for each
            method with those of its own.
        overrides: values by dotted key that win over both.
        names: which methods; all of the file by default. Without a file, names of algorithms.

    Returns:
        A configuration per method, alike in task and seed.
    """
    shared = copied(tree)
    methods = shared.pop("methods", None)
    if methods is None:
        methods = {name: {"algorithm": {"name": name}} for name in names or ALGORITHMS}
    if not isinstance(methods, dict) or not methods:
        raise UserError("'methods' must hold a table for each method, as [methods.fednest].")
    unknown = [name for name in names or () if name not in methods]
    if unknown:
        known = plain(", ".join(methods), 150)
        raise UserError(f"There is no method '{plain(unknown[0])}': there are {known}.")
    return {
        name: _method(name, shared, methods[name], overrides)
        for name in (names or methods)
    }  # fmt: skip


def checked_seeds(found: Any) -> list[int]:
    """Return the seeds of a comparison, if that is what they are."""
    whole = isinstance(found, list) and all(
        type(seed) is int and 0 <= seed < 2**32 for seed in found
    )
    if not whole or not found or len(set(found)) < len(found):
        raise UserError(
            "'seeds' must be a list of different whole numbers from 0 to 4294967295, got "
            f"{brief(found)}."
        )
    return found


def _method(name: str, shared: dict[str, Any], own: Any, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the settings of one method."""
    if not re.fullmatch(r"[\w .-]{1,60}", name):
        raise UserError(
            f"'{plain(name)}' names a folder: use letters, digits, '.', '-' and '_' for it, up to "
            "60 of them."
        )
    field = dotted(["methods", name])
    if not isinstance(own, dict):
        raise UserError(f"'{field}' must be a table of settings, got {brief(own)}.")
    if set(own) & set(_COMMON):
        key = next(key for key in _COMMON if key in own)
        raise UserError(f"'{field}.{key}' is no setting: all methods share the {key}.")
    if "algorithm" in shared:
        raise UserError("'algorithm' is each method's own: put it into a table [methods.NAME].")
    try:
        return checked(merged(shared, {"algorithm": {"name": name}} | own), overrides)
    except UserError as error:
        raise UserError(f"In method '{name}': {error}") from None


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return both sets of settings, table by table; one's own win."""
    both = {
        key: merged(base[key], own[key])
        for key in base.keys() & own.keys()
        if isinstance(base[key], dict) and isinstance(own[key], dict)
    }
    return {**base, **own, **both}


def jobs(methods: Mapping[str, RunConfig], seeds: Sequence[int], directory: Path) -> list[Job]:
    """Return the runs of a comparison, all methods of a seed together."""
    return [
        Job(checked(config.model_dump(), {"seed": seed}), directory / f"{name}-seed{seed}")
        for seed in seeds
        for name, config in methods.items()
    ]


def higher_is_better(metric: str) -> bool:
    """Return whether a metric is to be large: accuracies and the like; losses are to be small."""
    return metric.endswith(("accuracy", "auc")) or metric == "irrelevant_shut"


def rows(groups: Groups, metric: str, targets: Sequence[float] = ()) -> list[dict[str, str]]:
    """Return the table: for each method its end, what it cost, and what it took to each target.

    A cell is the mean over seeds, with the standard deviation for the metric. Costs to a target are
    communication rounds / megabytes both ways / processor seconds, where all seeds got there.
    """
    return [_row(name, histories, metric, targets) for name, histories in groups.items()]


def _row(
    name: str, histories: Sequence[History], metric: str, targets: Sequence[float]
) -> dict[str, str]:
    last = [history.records[-1] for history in histories]
    values = [record[metric] for record in last]
    row = {
        "method": name,
        metric.replace("_", " "): lost(histories) or _spread(values),
        "iterations": f"{mean(r['round'] for r in last):,.0f}",
        **{name: mean_cost(last, name) for name in ("rounds", "MB", "CPU s")},
    }
    for target in targets:
        row[f"to {target:g}: rounds / MB / CPU s"] = to_target(histories, metric, target)
    return row


def lost(histories: Sequence[History]) -> str:
    """Return how many runs did not get to their end, in words; nothing where all did."""
    ends = Counter((history.end or {}).get("status") for history in histories)
    return ", ".join(f"{ends[how]} of {len(histories)} {how}" for how in _LOST if ends[how])


def to_target(
    histories: Sequence[History],
    metric: str,
    target: float,
    costs: Sequence[str] = ("rounds", "MB", "CPU s"),
) -> str:
    """Return what it took to reach a target, mean over seeds: one number for each of the costs."""
    found = firsts(histories, metric, target)
    there = [record for record in found if record is not None]
    if len(there) < len(found):
        return f"{len(there)} of {len(found)} seeds" if there else "–"  # noqa: RUF001
    return " / ".join(mean_cost(there, name) for name in costs)


def firsts(histories: Sequence[History], metric: str, target: float) -> list[dict[str, Any] | None]:
    """Return each run's first record at a target or better; None where it did not get there."""
    sign = 1 if higher_is_better(metric) else -1
    return [
        next((r for r in h.records if sign * r[metric] >= sign * target), None) for h in histories
    ]


def mean_cost(records: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the mean of a cost: seconds with a decimal, the others whole."""
    digits = 1 if name.endswith("s") and name != "rounds" else 0
    return f"{mean(COSTS[name](record) for record in records):,.{digits}f}"


def megabytes(record: Mapping[str, Any]) -> float:
    """Return the megabytes sent until a record, both ways."""
    return (record["bytes_up"] + record["bytes_down"]) / 1e6


# What may stand along a figure's axis, read from a record.
COSTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "rounds": lambda record: record["communication_rounds"],
    "MB": megabytes,
    "CPU s": lambda record: record["cpu_seconds"],
    "s": lambda record: record["seconds"],
}


def _spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation, as far as there are several values."""
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
    return f"{mean(values):.4g}{spread}"


def markdown(table: Sequence[Mapping[str, str]]) -> str:
    """Return the table as Markdown.

    Example:
        >>> print(markdown([{"method": "a", "MB": "3"}]))
        | method | MB |
        |---|---|
        | a | 3 |
    """
    head = list(table[0])
    lines = [head, *([row[key] for key in head] for row in table)]
    text = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([text[0], "|" + "---|" * len(head), *text[1:]])
