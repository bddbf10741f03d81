"""Tables of comparisons: where each method ended, and what it cost to get there."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev

from simfbo.runs.files import Json
from simfbo.runs.history import History

Groups = Mapping[str, Sequence[History]]
_LOST = ("diverged", "starved")


def rows(groups: Groups, metric: str, targets: Sequence[float] = ()) -> list[dict[str, str]]:
    """Return the table: for each method its end, what it cost, and what it took to each target.

    A cell is the mean over seeds, with the standard deviation for the metric. Costs to a target are
    exchanges / megabytes both ways / processor seconds, where all seeds got there.
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
        **{column(name): mean_cost(last, name) for name in ("rounds", "MB", "CPU s")},
    }
    said = Counter(str((history.verdict or {}).get("status", "")) for history in histories)
    if "" not in said:
        counted = [f"{said[status]} {status}" for status in sorted(said)]
        row["verdict"] = ", ".join(counted if len(histories) > 1 else said)
    for target in targets:
        row[f"to {target:g}: exchanges / MB / CPU s"] = to_target(histories, metric, target)
    return row


def lost(histories: Sequence[History]) -> str:
    """Return how many runs diverged or starved, in words; nothing if none did."""
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


def firsts(histories: Sequence[History], metric: str, target: float) -> list[Json | None]:
    """Return each run's first record at a target or better; None where it did not get there."""
    sign = 1 if goal(histories, metric) == "max" else -1
    return [
        next((r for r in h.records if sign * r[metric] >= sign * target), None) for h in histories
    ]


def goal(histories: Sequence[History], metric: str) -> str:
    """Return whether a metric is to be large (max) or small (min), as the runs' task says."""
    for history in histories:
        about = history.header.get("about", {})
        if about.get("metric") == metric:
            return about["goal"]
        if "maximise" in about:
            return "max" if metric in about["maximise"] else "min"
    from simfbo.tasks.task import goal_of  # which brings JAX

    return goal_of(metric)


def mean_cost(records: Sequence[Json], name: str) -> str:
    """Return the mean of a cost: seconds with a decimal, the others whole."""
    digits = 1 if name.endswith("s") and name != "rounds" else 0
    return f"{mean(COSTS[name](record) for record in records):,.{digits}f}"


def column(cost: str) -> str:
    """Return the title of a cost's column: communication rounds are called exchanges."""
    return "exchanges" if cost == "rounds" else cost


def megabytes(record: Json) -> float:
    """Return the megabytes sent up to a record, both ways."""
    return (record["bytes_up"] + record["bytes_down"]) / 1e6


# What may stand along a figure's axis, read from a record.
COSTS: dict[str, Callable[[Json], float]] = {
    "rounds": lambda record: record["communication_rounds"],
    "MB": megabytes,
    "CPU s": lambda record: record["cpu_seconds"],
    "s": lambda record: record["seconds"],
}


def _spread(values: Sequence[float]) -> str:
    """Return the mean, and the standard deviation of several values."""
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
