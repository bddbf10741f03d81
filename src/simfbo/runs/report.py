"""Reports: a metric against rounds, bytes and seconds, as figures and one self-contained page."""

import html
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from simfbo.errors import UserError
from simfbo.runs.history import History, make_folder

BOOKKEEPING = ("round", "communication_rounds", "floats_down", "floats_up", "bytes_down",
               "bytes_up", "refused", "seconds", "cpu_seconds", "projected")  # fmt: skip
COLOURS = ("#0b6e99", "#d1495b", "#3a7d44", "#8d5fb0", "#c77d0a", "#4a4e69", "#d6679c", "#7f5539")


def metrics(history: History) -> list[str]:
    """Return the names of a history's metrics, the main one first."""
    return [name for name in history.records[-1] if name not in BOOKKEEPING]


def labels(histories: Sequence[History]) -> list[str]:
    """Return what runs are called in a figure: the algorithm, and whatever sets them apart."""
    flat = [dict(_flatten(history.header)) for history in histories]
    keys = {key: None for header in flat for key in header if not key.startswith("versions.")}
    varying = {
        _last(key): key for key in keys if len({repr(header.get(key)) for header in flat}) > 1
    }
    apart = [
        pair for pair in varying.items() if pair[1] not in ("algorithm", "config.algorithm.name")
    ]
    return [
        ", ".join([header["algorithm"], *(f"{name} {header.get(key)}" for name, key in apart)])
        for header in flat
    ]


def draw(
    histories: Sequence[History], metric: str | None = None, names: Sequence[str] | None = None
) -> Figure:
    """Return the figure: the metric against communication rounds, megabytes and seconds.

    Args:
        histories: the runs, one line each.
        metric: which; the first run's main one by default.
        names: what the runs are called; runs of one name share a colour.

    Returns:
        A Matplotlib figure.
    """
    if not histories or not all(history.records for history in histories):
        raise UserError("There is nothing to draw: a run has no evaluation yet.")
    if metric is None and not metrics(histories[0]):
        raise UserError("There is nothing to draw: the run had no `evaluate`, so no metric.")
    metric = metric or metrics(histories[0])[0]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    names = labels(histories) if names is None else names
    distinct = list(dict.fromkeys(names))
    for i, (history, name) in enumerate(zip(histories, names, strict=True)):
        colour = COLOURS[distinct.index(name) % len(COLOURS)]
        shown = name if name not in names[:i] else None
        for ax, (_, along) in zip(axes, _axes(history), strict=True):
            ax.plot(along, history.column(metric), color=colour, lw=1.6, label=shown)
    for ax, (name, _) in zip(axes, _axes(histories[0]), strict=True):
        style(ax, name)
    axes[0].set_ylabel(metric.replace("_", " "))
    if spans_decades([history.column(metric) for history in histories]):
        axes[0].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def save(histories: Sequence[History], directory: Path, metric: str | None = None) -> list[Path]:
    """Write figure.png, figure.svg and report.html, and return their paths."""
    return write(draw(histories, metric), directory, lambda svg: page(histories, svg))


def write(figure: Figure, directory: Path, as_page: Callable[[str], str]) -> list[Path]:
    """Write a figure in two forms and the page around it, and return their paths."""
    make_folder(directory)
    FigureCanvasAgg(figure).print_png(str(directory / "figure.png"))
    svg = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(svg)
    text = svg.getvalue().decode()
    (directory / "figure.svg").write_text(text, encoding="utf-8")
    (directory / "report.html").write_text(as_page(text), encoding="utf-8")
    return [directory / name for name in ("figure.png", "figure.svg", "report.html")]


def summary(history: History) -> str:
    """Return what a run came to, in a few plain sentences."""
    if not history.records:
        return "The run ended before its first evaluation."
    header, last = history.header, history.records[-1]
    end = (history.end or {}).get("status", "stopped without a word")
    found = ", ".join(f"{name.replace('_', ' ')} {last[name]:.4g}" for name in metrics(history))
    lines = [
        f"{header['algorithm']} on {describe(header['config'])}: {end} after {last['round']:,} of "
        f"{header['rounds']:,} iterations.",
        f"Result: {found or 'no metric was asked for'}.",
        f"Cost: {last['communication_rounds']:,} communication rounds, "
        f"{size(last['bytes_down'])} sent to clients, {size(last['bytes_up'])} sent back, "
        f"{last['seconds']:.1f} s of computing.",
    ]
    if last.get("projected"):
        lines.append(f"The projection of v acted {last['projected']:,} times.")
    if history.refusals:
        lines.append(_refused(history))
    return "\n".join(lines)


def _refused(history: History) -> str:
    """Return which replies did not count, in a sentence."""
    clients = {refusal["client"] for refusal in history.refusals}
    kinds = Counter(re.sub(r"\d[\d.e+-]*", "…", line["reason"]) for line in history.refusals)
    reason, count = kinds.most_common(1)[0]
    return (
        f"Replies that did not count: {len(history.refusals):,}, of {len(clients):,} clients, most "
        f"often because the client {reason} ({count:,}); the history lists them."
    )


def describe(config: dict[str, Any]) -> str:
    """Return a task's configuration in words."""
    task = dict(config.get("task", {}))
    name = task.pop("name", "a task")
    parts = [str(task[key]) for key in ("dataset", "model", "partition") if task.get(key)]
    if task.get("clients"):
        parts.append(f"{task['clients']} clients")
    return f"{name} ({', '.join(parts)})" if parts else name


def size(count: int) -> str:
    """Return bytes in a unit that reads well.

    Example:
        >>> size(644_080)
        '644 kB'
    """
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def page(
    histories: Sequence[History], svg: str, names: Sequence[str] | None = None, table: str = ""
) -> str:
    """Return one HTML page that needs nothing else; `table` (HTML) stands below the figure."""
    runs = "".join(map(_section, histories, labels(histories) if names is None else names))
    drawing = svg[svg.index("<svg") :]
    return _PAGE.replace("{figure}", drawing).replace("{runs}", table + runs)


def _section(history: History, name: str) -> str:
    """Return the part of the page on one run."""
    columns = ["round", "bytes_down", "bytes_up", "seconds", *metrics(history)]
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(name, record)}</td>" for name in columns) + "</tr>"
        for record in history.records
    )
    settings = html.escape(json.dumps(history.header, indent=2))
    return (
        f"<section><h2>{html.escape(name)}</h2>"
        f"<p>{html.escape(summary(history)).replace(chr(10), '<br>')}</p>"
        f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<details><summary>Settings, seed and versions</summary><pre>{settings}</pre></details>"
        "</section>"
    )


def _cell(name: str, record: dict[str, Any]) -> str:
    value = record.get(name)
    if name.startswith("bytes"):
        return size(int(value or 0))
    if name == "seconds":
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if value is not None else ""


def _axes(history: History) -> list[tuple[str, Any]]:
    """Return the three horizontal axes: a name and the values."""
    up, down = np.array(history.column("bytes_up")), np.array(history.column("bytes_down"))
    return [
        ("communication rounds", history.column("communication_rounds")),
        ("megabytes sent, both ways", (up + down) / 1e6),
        ("seconds of computing", history.column("seconds")),
    ]


def style(ax: Axes, name: str) -> None:
    """Name the horizontal axis and quieten the frame."""
    ax.set_xlabel(name)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def spans_decades(columns: Sequence[Sequence[float]]) -> bool:
    """Return whether the values are positive and span more than two decades."""
    values = np.concatenate([np.asarray(column, float) for column in columns])
    return bool((values > 0).all() and values.max() > 100 * values.min())


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries with their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1].replace("_", " ")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>simfbo report</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px;
       padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
figure { margin: 0; } svg { width: 100%; height: auto; }
.wide { overflow-x: auto; max-height: 24rem; overflow-y: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #e4e4e4; }
th { position: sticky; top: 0; background: #fff; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .85rem; }
</style></head><body>
<h1>simfbo report</h1>
<figure>{figure}</figure>
{runs}
</body></html>
"""
