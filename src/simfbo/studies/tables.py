"""Tables of comparisons: the final metric of each method, and its cost."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev

from simfbo.runs.files import Json
from simfbo.runs.history import History

Groups = Mapping[str, Sequence[History]]
_LOST = ("diverged", "starved")


def rows(groups: Groups, metric: str, targets: Sequence[float] = ()) -> list[dict[str, str]]:
    """Build the table: the final metric and cost of each method, and its cost to each target.

    A cell is the mean over seeds, with the standard deviation for the metric. Costs to a target are
    exchanges / megabytes both ways / processor seconds, if all seeds reached it.
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
    verdicts = Counter(str((history.verdict or {}).get("status", "")) for history in histories)
    if "" not in verdicts:
        counts = [f"{verdicts[status]} {status}" for status in sorted(verdicts)]
        row["verdict"] = ", ".join(counts if len(histories) > 1 else verdicts)
    for target in targets:
        row[f"to {target:g}: exchanges / MB / CPU s"] = to_target(histories, metric, target)
    return row


def lost(histories: Sequence[History]) -> str:
    """State the number of runs that diverged or starved; empty if none did."""
    ends = Counter((history.end or {}).get("status") for history in histories)
    return ", ".join(
        f"{ends[status]} of {len(histories)} {status}" for status in _LOST if ends[status]
    )


def to_target(
    histories: Sequence[History],
    metric: str,
    target: float,
    costs: Sequence[str] = ("rounds", "MB", "CPU s"),
) -> str:
    """Return the mean costs to reach a target, or the number of seeds that reached it."""
    records = firsts(histories, metric, target)
    reached = [r for r in records if r is not None]
    if len(reached) < len(records):
        return f"{len(reached)} of {len(records)} seeds" if reached else "–"  # noqa: RUF001
    return " / ".join(mean_cost(reached, name) for name in costs)


def firsts(histories: Sequence[History], metric: str, target: float) -> list[Json | None]:
    """Return each run's first record at a target or better; None if it did not reach it."""
    sign = 1 if goal(histories, metric) == "max" else -1
    return [
        next((r for r in h.records if sign * r[metric] >= sign * target), None) for h in histories
    ]


def goal(histories: Sequence[History], metric: str) -> str:
    """Return the goal of a metric, "max" or "min", from the runs' task."""
    for history in histories:
        about = history.header.get("about", {})
        if about.get("metric") == metric:
            return about["goal"]
        if "maximise" in about:
            return "max" if metric in about["maximise"] else "min"
    from simfbo.tasks.task import goal_of  # imports JAX

    return goal_of(metric)


def mean_cost(records: Sequence[Json], name: str) -> str:
    """Format the mean of a cost: seconds with one decimal, others as integers."""
    digits = 1 if name.endswith("s") and name != "rounds" else 0
    return f"{mean(COSTS[name](record) for record in records):,.{digits}f}"


def column(cost: str) -> str:
    """Return the title of a cost's column."""
    return "exchanges" if cost == "rounds" else cost


def megabytes(record: Json) -> float:
    """Return the megabytes sent until a record, both ways."""
    return (record["bytes_up"] + record["bytes_down"]) / 1e6


# The horizontal axes of figures, as functions of a record.
COSTS: dict[str, Callable[[Json], float]] = {
    "rounds": lambda record: record["communication_rounds"],
    "MB": megabytes,
    "CPU s": lambda record: record["cpu_seconds"],
    "s": lambda record: record["seconds"],
}


def _spread(values: Sequence[float]) -> str:
    """Format the mean, and the standard deviation of several values."""
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
    return f"{mean(values):.4g}{spread}"


def markdown(table: Sequence[Mapping[str, str]]) -> str:
    """Format the table as Markdown.

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
