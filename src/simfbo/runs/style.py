"""The style of all figures: the finding as title, labels at line ends, light and dark pages.

Matplotlib (`simfbo[plots]`) is imported on use.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simfbo.errors import plain, require
from simfbo.runs._svg import as_svg
from simfbo.runs.files import write_atomic
from simfbo.runs.palette import GRID, INK, MUTED, WHITE, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE, TEXT, SMALL = 13.0, 10.0, 9.0  # sizes of text, points
_WIDE = {"bold": 0.68, "normal": 0.58}  # mean width of a letter, in its size
_GAP = 1.3  # distance of neighbouring labels, in units of their size
_LONGEST = 34  # letters of a label
_EDGE = 4.0  # points around a figure


class Label(NamedTuple):
    """A label at the end of a line.

    Attributes:
        text: arbitrary text, which is escaped.
        x: abscissae of the line.
        y: ordinates of the line.
        colour: of the line; the text has a readable shade of it.
        bold: for the main line of a figure.
    """

    text: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    colour: str
    bold: bool = False


def new(
    finding: str,
    about: str = "",
    *,
    size: tuple[float, float] = (9.0, 3.6),
    rows: int = 1,
    columns: int = 1,
    **subplots: Any,
) -> "tuple[Figure, Any]":
    """Create a figure with a title and with axes in rows and columns.

    Args:
        finding: the title, one sentence with the result that the figure shows.
        about: the subtitle, a description of the plot.
        size: width and height of the axes in inches; the title comes on top.
        rows: of axes.
        columns: of axes.
        subplots: passed on to `Figure.subplots`.
    """
    lines = [(line, TITLE, "bold", INK) for line in _wrapped(finding, size[0], TITLE, "bold")]
    lines += [(line, TEXT, "normal", MUTED) for line in _wrapped(about, size[0], TEXT, "normal")]
    block = sum(1.4 * points for _, points, _, _ in lines) + 2 * _EDGE
    height = size[1] + block / 72
    figure = require("matplotlib.figure", "plots").Figure(
        figsize=(size[0], height), facecolor=WHITE, layout="constrained"
    )
    figure.get_layout_engine().set(
        rect=(0, 0, 1, size[1] / height), w_pad=_EDGE / 72, h_pad=_EDGE / 72
    )
    figure.set_label(plain(finding, 400))
    top = 72 * height - _EDGE
    for text, points, weight, colour in lines:
        font: Any = {"size": points, "weight": weight, "color": colour}
        left = _EDGE / 72 / size[0]
        figure.text(left, top / 72 / height, text, va="top", parse_math=False, **font)
        top -= 1.4 * points
    return figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def _wrapped(text: str, inches: float, points: float, weight: str) -> list[str]:
    letters = int((72 * inches - 2 * _EDGE) / (points * _WIDE[weight]))
    return textwrap.wrap(plain(text, 400).replace(" %", "\u00a0%"), letters)


def frame(ax: "Axes", along: str, up: str = "", heading: str = "") -> None:
    """Label the axes and remove superfluous spines and ticks."""
    ax.set_xlabel(along, color=INK, size=TEXT, parse_math=False)
    ax.set_ylabel(up, color=INK, size=TEXT, parse_math=False)
    if heading:
        ax.set_title(heading, loc="left", color=INK, size=TEXT, weight="bold", parse_math=False)
    ax.grid(color=GRID, lw=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(which="both", colors=MUTED, labelsize=SMALL, length=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED)


def key(ax: "Axes", **where: Any) -> None:
    """Add a legend, for axes without space for labels at the marks."""
    style = {"frameon": False, "fontsize": SMALL, "handletextpad": 0.4}
    for text in ax.legend(**style, **where).get_texts():
        text.set(color=INK, parse_math=False)


def per_cent(axis: Any) -> None:
    """Format the ticks of an axis of shares in per cent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")


def numbers(axis: Any, decade: Sequence[float] = (1,)) -> None:
    """Set a few ticks with plain decimal numbers, such as 0.1, 1 and 1,000.

    Args:
        axis: with its scale already set.
        decade: ticks of a logarithmic axis within a decade.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    logarithmic = axis.get_scale() == "log"
    axis.set_major_locator(LogLocator(subs=decade, numticks=4) if logarithmic else MaxNLocator(4))
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.set_minor_formatter(NullFormatter())


def label_lines(ax: "Axes", labels: Sequence[Label], size: float = SMALL) -> None:
    """Write labels to the right of an axes, each at the height where its line ends.

    Overlapping labels are moved apart and connected to their lines by leaders. Limits and scales
    must be set before. A line outside the limits has no label.
    """
    ends = [(label, end) for label in labels if (end := _last_visible_point(ax, label))]
    if not ends:
        return
    figure: Any = ax.get_figure()
    figure.draw_without_rendering()  # determines the height of the axes
    height = ax.bbox.height * 72 / figure.dpi
    to_axes = ax.transAxes.inverted()
    heights = [height * to_axes.transform(ax.transData.transform(end))[1] for _, end in ends]
    fractions = spread(heights, _GAP * size, 0, height) / height
    for (label, end), fraction in zip(ends, fractions, strict=True):
        _write(ax, label, end, float(fraction), size)


def _write(
    ax: "Axes", label: Label, end: tuple[float, float], fraction: float, size: float
) -> None:
    """Write a label with a leader at a fraction of the height of the axes."""
    leader = {
        "arrowstyle": "-",
        "color": label.colour,
        "lw": 0.6,
        "shrinkA": 1,
        "shrinkB": 1,
        "alpha": 0.8 if label.bold else 0.5,
        "relpos": (0, 0.5),
    }
    ax.annotate(
        plain(label.text, _LONGEST),
        end,
        (1.03, fraction),
        textcoords="axes fraction",
        ha="left",
        va="center",
        size=size,
        color=readable(label.colour),
        weight="bold" if label.bold else "normal",
        parse_math=False,
        arrowprops=leader,
        annotation_clip=False,
    )


def _last_visible_point(ax: "Axes", label: Label) -> tuple[float, float] | None:
    """Return the last point of a line within the limits of its axes."""
    x, y = np.asarray(label.x, float), np.asarray(label.y, float)
    inside = [
        (low <= values) & (values <= high)
        for values, (low, high) in ((x, sorted(ax.get_xlim())), (y, sorted(ax.get_ylim())))
    ]
    visible = np.flatnonzero(inside[0] & inside[1])
    return (float(x[visible[-1]]), float(y[visible[-1]])) if len(visible) else None


def spread(places: Sequence[float], gap: float, low: float, high: float) -> np.ndarray:
    """Move points as little as possible, by least squares, to be a gap apart.

    Example:
        >>> spread([5.0, 5.0, 0.0], 2.0, 0.0, 10.0)
        array([4., 6., 0.])
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(places, kind="stable")
    steps = gap * np.arange(len(order))
    fitted = isotonic_regression(np.asarray(places, float)[order] - steps).x
    moved = np.empty(len(order))
    moved[order] = np.clip(fitted, low, max(low, high - steps[-1])) + steps
    return moved


def save_svg(figure: "Figure", file: Path) -> None:
    """Write a figure as reproducible SVG for light and dark pages."""
    write_atomic(file, as_svg(figure))
