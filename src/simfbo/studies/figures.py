"""Figures and pages of comparisons: a line and a confidence band for every method."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy import stats

from simfbo.config.catalogue import colour_of
from simfbo.errors import UserError
from simfbo.runs import report
from simfbo.runs.files import write_atomic
from simfbo.runs.history import History
from simfbo.runs.palette import COLOURS
from simfbo.studies.tables import COSTS, Groups, markdown

AXES = {
    "rounds": "communication rounds",
    "MB": "megabytes sent, both ways",
    "CPU s": "processor seconds",
    "s": "seconds",
}


class Look(NamedTuple):
    """How a method's line is drawn; `mark` is a value of the first metric, drawn across."""

    colour: str
    style: str = "-"
    mark: float | None = None


_STYLES = ("-", "--", "-.", ":")


def looks_of(algorithms: Mapping[str, str]) -> dict[str, Look]:
    """Return a look for each line: a colour per algorithm, a style per line of that colour.

    Args:
        algorithms: the name of the algorithm behind each line.
    """
    colours = {line: colour_of(name) for line, name in algorithms.items()}
    styles = {colour: itertools.cycle(_STYLES) for colour in colours.values()}
    return {line: Look(colour, next(styles[colour])) for line, colour in colours.items()}


def looks_of_lines(lines: Sequence[str]) -> dict[str, Look]:
    """Return a look for each line: a colour each and, where these are used up, another style."""
    pairs = itertools.product(_STYLES, COLOURS)
    return {line: Look(colour, style) for line, (style, colour) in zip(lines, pairs, strict=False)}


def draw(
    groups: Groups,
    *metrics: str,
    along: Sequence[str] = ("rounds", "MB", "CPU s"),
    looks: Mapping[str, Look] | None = None,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw metrics, a row each, against costs, a column each, with a band per method.

    Lines are means over seeds; bands are 95 % confidence intervals of the mean (Student's t).

    Args:
        groups: the runs of each method, by the name that the legend shows.
        metrics: what to draw.
        along: the horizontal axes, of `tables.COSTS`.
        looks: how each method is drawn; a colour each by default.
        limits: of the vertical axis.
    """
    if not all(history.records for histories in groups.values() for history in histories):
        raise UserError("There is nothing to draw: a run has no evaluation yet.")
    size = 4 * len(along), 1.3 + 2.9 * len(metrics)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(metrics), len(along), sharey="row", squeeze=False)
    looks = looks or dict(zip(groups, map(Look, itertools.cycle(COLOURS)), strict=False))
    for line, metric in zip(axes, metrics, strict=True):
        _draw_row(line, groups, metric, along, looks)
        if limits:
            line[0].set_ylim(*limits)
    for ax, look in itertools.product(axes[0], looks.values()):
        if look.mark is not None:
            ax.axhline(look.mark, color=look.colour, ls=(0, (1, 4)), lw=1.2)
    for ax, name in zip(axes[-1], along, strict=True):
        report.style(ax, AXES[name])
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(2 * len(along), 4),
                  frameon=False, fontsize=9)  # fmt: skip
    return figure


def _draw_row(
    axes: Sequence[Axes],
    groups: Groups,
    metric: str,
    along: Sequence[str],
    looks: Mapping[str, Look],
) -> None:
    """Draw one metric against every cost."""
    for ax, name in zip(axes, along, strict=True):
        for method, histories in groups.items():
            _band(ax, histories, COSTS[name], metric, looks[method], method)
        report.style(ax, "")
        ax.set_xscale("log")
        ax.set_xlim(left=_first(groups, COSTS[name]))
        ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel(metric.replace("_", " "))
    _limit(axes[0], [h.column(metric) for histories in groups.values() for h in histories])


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
    ax: Axes, histories: Sequence[History], along: Any, metric: str, look: Look, name: str
) -> None:
    """Draw mean and confidence band of some runs."""
    places = [[along(record) for record in history.records] for history in histories]
    values = [[record[metric] for record in history.records] for history in histories]
    grid, middle, half = band(places, values)
    later = grid > 0  # the axis is logarithmic, and the start is the same for all
    grid, middle, half = grid[later], middle[later], half[later]
    ax.plot(grid, middle, color=look.colour, ls=look.style, lw=1.6, label=name)
    ax.fill_between(grid, middle - half, middle + half, color=look.colour, alpha=0.13, lw=0)


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


def save(
    groups: Groups,
    metric: str,
    table: Sequence[Mapping[str, str]],
    directory: Path,
    looks: Mapping[str, Look] | None = None,
) -> None:
    """Write table.md, figure.png, figure.svg and report.html."""
    write_atomic(directory / "table.md", markdown(table) + "\n")
    histories = [history for group in groups.values() for history in group]
    names = [f"{name}, seed {h.header['seed']}" for name, group in groups.items() for h in group]
    page = report.page(histories, names, table)
    report.write(draw(groups, metric, looks=looks), directory, page)
