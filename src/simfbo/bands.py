"""Figures and pages of comparisons: a line and a confidence band for every method."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy import stats

from simfbo import report
from simfbo.comparison import Groups, markdown, megabytes
from simfbo.errors import UserError
from simfbo.history import History


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
    "megabytes sent, both ways": megabytes,
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
    lines[~np.isfinite(lines)] = np.nan  # a diverged run leaves a gap
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
