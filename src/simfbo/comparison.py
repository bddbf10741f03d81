"""Comparisons: several methods, several seeds each, on one task.

Runs of one seed share data, partition and initial point, whatever the method: all three are drawn
from the task's settings and the seed alone.
"""

import copy
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy import stats

from simfbo import report
from simfbo.algorithm_config import ALGORITHMS
from simfbo.config import RunConfig, checked
from simfbo.errors import UserError
from simfbo.history import History
from simfbo.sweep import Job

Groups = Mapping[str, Sequence[History]]
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
    shared = copy.deepcopy(tree)
    methods = shared.pop("methods", None)
    if methods is None:
        methods = {name: {"algorithm": {"name": name}} for name in names or ALGORITHMS}
    if not isinstance(methods, dict) or not methods:
        raise UserError("'methods' must hold a table for each method, as [methods.fednest].")
    unknown = [name for name in names or () if name not in methods]
    if unknown:
        raise UserError(f"There is no method '{unknown[0]}': there are {', '.join(methods)}.")
    return {
        name: _method(name, shared, methods[name], overrides)
        for name in (names or methods)
    }  # fmt: skip


def _method(name: str, shared: dict[str, Any], own: Any, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the settings of one method."""
    if not re.fullmatch(r"[\w .-]+", name):
        raise UserError(f"'{name}' names a folder: use letters, digits, '.', '-' and '_' for it.")
    if not isinstance(own, dict):
        raise UserError(f"'methods.{name}' must be a table of settings, got {own!r}.")
    if set(own) & set(_COMMON):
        key = next(key for key in _COMMON if key in own)
        raise UserError(f"'methods.{name}.{key}' is no setting: all methods share the {key}.")
    try:
        return checked(shared | {"algorithm": {"name": name}} | own, overrides)
    except UserError as error:
        raise UserError(f"In method '{name}': {error}") from None


def jobs(methods: Mapping[str, RunConfig], seeds: Sequence[int], directory: Path) -> list[Job]:
    """Return the runs of a comparison, all methods of a seed together."""
    return [
        Job(config.model_copy(update={"seed": seed}), directory / f"{name}-seed{seed}")
        for seed in seeds
        for name, config in methods.items()
    ]


def higher_is_better(metric: str) -> bool:
    """Return whether a metric is to be large: accuracies are, all others are to be small."""
    return metric.endswith("accuracy")


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
    lost = sum((history.end or {}).get("status") == "diverged" for history in histories)
    found = _spread([record[metric] for record in last])
    title = metric.replace("_", " ")
    row = {
        "method": name,
        title: f"{lost} of {len(last)} diverged" if lost else found,
        "iterations": f"{mean(r['round'] for r in last):,.0f}",
        "rounds": f"{mean(r['communication_rounds'] for r in last):,.0f}",
        "MB": f"{mean(map(_megabytes, last)):,.0f}",
        "CPU s": f"{mean(r['cpu_seconds'] for r in last):,.1f}",
    }
    for target in targets:
        row[f"to {target:g}: rounds / MB / CPU s"] = _to_target(histories, metric, target)
    return row


def _to_target(histories: Sequence[History], metric: str, target: float) -> str:
    """Return what it took to reach a target, mean over seeds."""
    sign = 1 if higher_is_better(metric) else -1
    firsts = [
        next((r for r in h.records if sign * r[metric] >= sign * target), None) for h in histories
    ]
    there = [record for record in firsts if record is not None]
    if len(there) < len(firsts):
        return f"{len(there)} of {len(firsts)} seeds" if there else "–"  # noqa: RUF001
    rounds, cpu = (mean(r[key] for r in there) for key in ("communication_rounds", "cpu_seconds"))
    return f"{rounds:,.0f} / {mean(map(_megabytes, there)):,.0f} / {cpu:.1f}"


def _megabytes(record: Mapping[str, Any]) -> float:
    return (record["bytes_up"] + record["bytes_down"]) / 1e6


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


def draw(groups: Groups, metric: str) -> Figure:
    """Return the metric against rounds, megabytes and processor seconds, a band per method.

    Lines are means over seeds; bands are 95 % confidence intervals of the mean (Student's t).
    """
    if not all(history.records for histories in groups.values() for history in histories):
        raise UserError("There is nothing to draw: a run has no evaluation yet.")
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for i, (name, histories) in enumerate(groups.items()):
        colour = report.COLOURS[i % len(report.COLOURS)]
        for ax, along in zip(axes, _AXES.values(), strict=True):
            _band(ax, histories, along, metric, colour, name)
    for ax, (name, along) in zip(axes, _AXES.items(), strict=True):
        report.style(ax, name)
        ax.set_xscale("log")
        ax.set_xlim(left=_first(groups, along))
        ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel(metric.replace("_", " "))
    _limit(axes[0], [h.column(metric) for histories in groups.values() for h in histories])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center",
                  ncols=min(8, len(groups)), frameon=False, fontsize=9)  # fmt: skip
    return figure


_AXES = {
    "communication rounds": lambda record: record["communication_rounds"],
    "megabytes sent, both ways": _megabytes,
    "processor seconds": lambda record: record["cpu_seconds"],
}


def _first(groups: Groups, along: Any) -> float:
    """Return where a logarithmic axis begins: at the earliest evaluation after the start."""
    later = [along(r) for hs in groups.values() for h in hs for r in h.records[1:]]
    return max(min(later, default=1.0), 1e-3)


def _limit(ax: Axes, columns: Sequence[Sequence[float]]) -> None:
    """Let the vertical axis show the runs: a band of few seeds may reach far beyond them."""
    if report.spans_decades(columns):
        ax.set_yscale("log")
    values = np.concatenate([np.asarray(column, float) for column in columns])
    values = values[np.isfinite(values)]
    if not len(values) or report.spans_decades(columns):
        return
    room = 0.05 * (values.max() - values.min())
    ax.set_ylim(values.min() - room, values.max() + room)


def _band(
    ax: Axes, histories: Sequence[History], along: Any, metric: str, colour: str, name: str
) -> None:
    """Draw mean and confidence band of some runs."""
    places = [[along(record) for record in history.records] for history in histories]
    values = [[record[metric] for record in history.records] for history in histories]
    grid, middle, half = band(places, values)
    later = grid > 0  # the axis is logarithmic, and the start is the same for all
    grid, middle, half = grid[later], middle[later], half[later]
    ax.plot(grid, middle, color=colour, lw=1.6, label=name)
    ax.fill_between(grid, middle - half, middle + half, color=colour, alpha=0.2, lw=0)


def band(
    places: Sequence[Sequence[float]], values: Sequence[Sequence[float]], level: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where a mean over runs stands, the mean, and its confidence interval's half-width.

    Runs are compared evaluation by evaluation, which they make after the same iterations, as far as
    the shortest goes; where each stands is averaged too. A single run has no interval.
    """
    length = min(map(len, values))
    along = np.mean([place[:length] for place in places], axis=0)
    lines = np.array([value[:length] for value in values], float)
    n = len(lines)
    if n == 1:
        return along, lines[0], np.zeros(length)
    half = stats.t.ppf((1 + level) / 2, n - 1) * lines.std(0, ddof=1) / np.sqrt(n)
    return along, lines.mean(0), half


def save(groups: Groups, metric: str, table: Sequence[Mapping[str, str]], directory: Path) -> None:
    """Write table.md, figure.png, figure.svg and report.html."""
    (directory / "table.md").write_text(markdown(table) + "\n", encoding="utf-8")
    histories = [history for group in groups.values() for history in group]
    names = [f"{name}, seed {h.header['seed']}" for name, group in groups.items() for h in group]
    report.write(
        draw(groups, metric),
        directory,
        lambda svg: report.page(histories, svg, names, _html(table)),
    )


def _html(table: Sequence[Mapping[str, str]]) -> str:
    """Return the table as HTML."""
    head = "".join(f"<th>{html.escape(key)}</th>" for key in table[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>"
        for row in table
    )
    return (
        f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
