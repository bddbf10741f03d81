"""Figures and pages of comparisons: a line and a confidence band for every method."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from simfbo.config.catalogue import colour_of
from simfbo.errors import UserError
from simfbo.runs import report, style
from simfbo.runs.files import write_atomic
from simfbo.runs.history import History
from simfbo.runs.palette import COLOURS, GREY
from simfbo.studies.tables import COSTS, Groups, goal, lost, markdown

AXES = {
    "rounds": "communication rounds",
    "MB": "megabytes sent, both ways",
    "CPU s": "processor seconds",
    "s": "seconds",
}


class Look(NamedTuple):
    """The style of a method's line.

    Attributes:
        colour: of its line.
        style: of its line.
        mark: a value of the metric at which a horizontal line in the same colour is drawn.
        main: drawn in colour; the other lines are grey, and thinner.
    """

    colour: str
    style: str = "-"
    mark: float | None = None
    main: bool = True


_STYLES = ("-", "--", "-.", ":")


def looks_of(algorithms: Mapping[str, str]) -> dict[str, Look]:
    """Return a look for each line: a colour per algorithm, a style per line of that colour.

    Args:
        algorithms: the name of the algorithm of each line.
    """
    colours = {line: colour_of(name) for line, name in algorithms.items()}
    styles = {colour: itertools.cycle(_STYLES) for colour in colours.values()}
    return {line: Look(colour, next(styles[colour])) for line, colour in colours.items()}


def looks_of_lines(lines: Sequence[str]) -> dict[str, Look]:
    """Return a look for each line: a colour each, then other line styles."""
    pairs = itertools.product(_STYLES, COLOURS)
    return {line: Look(colour, style) for line, (style, colour) in zip(lines, pairs, strict=False)}


def draw(
    groups: Groups,
    metric: str,
    *,
    along: Sequence[str] = ("rounds", "MB", "CPU s"),
    looks: Mapping[str, Look] | None = None,
    limits: tuple[float, float] | None = None,
    finding: str = "",
    about: str = "",
) -> Figure:
    """Draw a metric against costs, a panel each, with a line and a band per method.

    Lines are means over seeds; bands are 95 % confidence intervals of the mean (Student's t), on a
    logarithmic axis only the upper half of those that reach below zero.

    Args:
        groups: the runs of each method, by the label at the line's end.
        metric: the vertical axis.
        along: the horizontal axes, of `tables.COSTS`.
        looks: the style of each method; a colour each by default.
        limits: of the vertical axis.
        finding: the title; by default the final values.
        about: added to the subtitle, after the metric and the number of seeds.
    """
    if not all(history.records for histories in groups.values() for history in histories):
        raise UserError("There is nothing to draw: a run has no evaluation yet.")
    looks = looks or looks_of_lines(list(groups))
    figure, (axes,) = style.new(
        finding or ends(groups, metric),
        _about(groups, metric, about),
        size=(9.8, max(3.1, 0.5 + 0.17 * len(groups))),
        columns=len(along),
        sharey=True,
    )
    _limit(axes[0], [h.column(metric) for histories in groups.values() for h in histories], limits)
    for ax, name in zip(axes, along, strict=True):
        _draw_panel(ax, groups, metric, name, looks)
    axes[0].set_ylabel(metric.replace("_", " "), parse_math=False)
    if axes[0].get_yscale() == "log":
        style.numbers(axes[0].yaxis)
    elif metric.endswith("accuracy"):
        style.per_cent(axes[0].yaxis)
    style.label_lines(axes[-1], _labels(groups, metric, along[-1], looks))
    return figure


def ends(groups: Groups, metric: str) -> str:
    """State the final values of the methods, best first; of more than three, best and worst."""
    words = report.sentence(metric.replace("_", " "))
    final = {name: mean(h.column(metric)[-1] for h in hs) for name, hs in groups.items()}
    if any(map(lost, groups.values())) or not np.isfinite(list(final.values())).all():
        return f"{words} of {len(final)} methods"
    runs = [history for histories in groups.values() for history in histories]
    sign = -1 if goal(runs, metric) == "max" else 1
    order = sorted(final, key=lambda name: sign * final[name])
    shown = order if len(order) <= 3 else [order[0], order[-1]]
    prefixes = ["best ", "worst "] if len(order) > 3 else [""] * 3
    parts = [
        f"{prefix}{name} {final[name]:.4g}" for prefix, name in zip(prefixes, shown, strict=False)
    ]
    return f"{words} at the end: {', '.join(parts)}"


def _about(groups: Groups, metric: str, more: str) -> str:
    """Return the subtitle: the metric, the number of seeds, and a remark."""
    seeds = max(map(len, groups.values()))
    of = f"mean of {seeds} seeds with its 95 % interval" if seeds > 1 else "one seed"
    if seeds > 1 and report.spans_decades([h.column(metric) for hs in groups.values() for h in hs]):
        of += " (the upper half where it reaches below zero)"
    return f"{report.sentence(metric.replace('_', ' '))}, {of}. {more}".strip()


def _draw_panel(
    ax: Axes, groups: Groups, metric: str, cost: str, looks: Mapping[str, Look]
) -> None:
    """Draw all methods against one cost."""
    style.frame(ax, AXES[cost])
    for method, histories in groups.items():
        _band(ax, histories, COSTS[cost], metric, looks[method], method)
        if (mark := looks[method].mark) is not None:
            ax.axhline(mark, color=looks[method].colour, ls=(0, (1, 4)), lw=1.2)
    ax.set_xscale("log")
    after_start = [
        COSTS[cost](record)
        for histories in groups.values()
        for history in histories
        for record in history.records[1:]
    ]
    ax.set_xlim(left=max(min(after_start, default=1.0), 1e-3))
    style.numbers(ax.xaxis)


def _labels(groups: Groups, metric: str, cost: str, looks: Mapping[str, Look]) -> list[style.Label]:
    """Return the labels at the ends of the lines in the last panel."""
    labels = []
    for name, histories in groups.items():
        grid, line, _ = _later(histories, COSTS[cost], metric)
        main = looks[name].main
        labels.append(
            style.Label(name, grid, line, looks[name].colour if main else GREY, bold=main)
        )
    return labels


def _limit(
    ax: Axes, columns: Sequence[Sequence[float]], limits: tuple[float, float] | None
) -> None:
    """Limit the vertical axis to the runs: a confidence band of few seeds may reach far beyond."""
    values = np.concatenate([np.asarray(column, float) for column in columns])
    values = values[np.isfinite(values)]
    if report.spans_decades(columns) and not limits:
        ax.set_yscale("log")
    elif limits or len(values):
        low, high = limits or (values.min(), values.max())
        room = 0 if limits else 0.05 * (high - low)
        ax.set_ylim(low - room, high + room)


def _band(
    ax: Axes, histories: Sequence[History], along: Any, metric: str, look: Look, name: str
) -> None:
    """Draw mean and confidence band of some runs; grey lines have no band."""
    grid, line, half = _later(histories, along, metric)
    if not look.main:
        ax.plot(grid, line, color=GREY, ls=look.style, lw=1, label=name, zorder=1.9)
        return
    ax.plot(grid, line, color=look.colour, ls=look.style, lw=1.8, label=name)
    low = line - half
    if ax.get_yscale() == "log":  # which has no values below zero
        low = np.where(low > 0, low, line)
    ax.fill_between(grid, low, line + half, color=look.colour, alpha=0.13, lw=0)


def _later(
    histories: Sequence[History], along: Any, metric: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the band of some runs without the start, which a logarithmic axis cannot show."""
    costs = [[along(record) for record in history.records] for history in histories]
    values = [[record[metric] for record in history.records] for history in histories]
    grid, line, half = band(costs, values)
    return grid[grid > 0], line[grid > 0], half[grid > 0]


def band(
    places: Sequence[Sequence[float]], values: Sequence[Sequence[float]], level: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions, mean and half-width of the confidence interval over runs.

    Runs are compared evaluation by evaluation, up to the length of the shortest; positions are
    averaged too. A single run has no interval.
    """
    length = min(map(len, values))
    along = np.mean([cost[:length] for cost in places], axis=0)
    lines = np.array([value[:length] for value in values], float)
    lines[~np.isfinite(lines)] = np.nan  # a diverged run leaves a gap
    n = len(lines)
    if n == 1:
        return along, lines[0], np.zeros(length)
    half = stats.t.ppf((1 + level) / 2, n - 1) * lines.std(0, ddof=1) / np.sqrt(n)
    return along, lines.mean(0), half


def save(
    groups: Groups,
    metric: str,
    table: Sequence[Mapping[str, str]],
    directory: Path,
    looks: Mapping[str, Look] | None = None,
    note: str = "",
) -> None:
    """Write table.md, with a note below the table, figure.png, figure.svg and report.html."""
    text = [markdown(table), note] if note else [markdown(table)]
    write_atomic(directory / "table.md", "\n\n".join(text) + "\n")
    histories = [history for group in groups.values() for history in group]
    names = [f"{name}, seed {h.header['seed']}" for name, group in groups.items() for h in group]
    page = report.page(histories, names, table)
    report.write(draw(groups, metric, looks=looks), directory, page)
