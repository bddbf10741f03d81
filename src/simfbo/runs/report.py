"""Reports: a metric against rounds, bytes and seconds, in figures and in a self-contained page.

Figures need Matplotlib (`simfbo[plots]`); `summary` and `page` do not.
"""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simfbo.core.exchange import Reason
from simfbo.errors import UserError
from simfbo.runs import style
from simfbo.runs._svg import as_svg, only_light
from simfbo.runs.client_scores import ClientScores, is_column
from simfbo.runs.files import Json, make_folder, write_atomic
from simfbo.runs.history import BOOKKEEPING, FILE, History
from simfbo.runs.lines import plain
from simfbo.runs.names import differences, groups, without_seed
from simfbo.runs.names import labels as names_of
from simfbo.runs.page import frozen
from simfbo.runs.palette import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Limits of a page: records of one run and of all runs, columns in the map of rejected replies.
_POINTS, _ALL_POINTS, _COLUMNS = 4000, 20_000, 96


def metrics(history: History) -> list[str]:
    """Return the names of a history's metrics, with the main one first."""
    return [name for name in history.records[-1] if name not in BOOKKEEPING]


def labels(histories: Sequence[History]) -> list[str]:
    """Return the labels of runs in a figure: the algorithm and the settings that differ."""
    return names_of([history.header for history in histories])


def draw(
    histories: Sequence[History], metric: str | None = None, names: Sequence[str] | None = None
) -> "Figure":
    """Draw a metric against communication rounds, megabytes and seconds.

    Args:
        histories: the runs, one line each.
        metric: the first run's main metric by default.
        names: of the runs, at the ends of their lines; runs with the same name share a colour.

    Returns:
        A Matplotlib figure.
    """
    if not histories or not all(history.records for history in histories):
        raise UserError("There is nothing to draw: a run has no evaluation yet.")
    if metric is None and not metrics(histories[0]):
        raise UserError("There is nothing to draw: the run had no `evaluate`, hence no metrics.")
    metric = metric or metrics(histories[0])[0]
    names = labels(histories) if names is None else names
    figure, (axes,) = style.new(
        _finding(histories, metric, names),
        "and how each run got there",
        size=(9.5, 3.0 + max(0, len(set(names)) - 12) * 0.16),
        columns=3,
        sharey=True,
    )
    for ax, (name, _) in zip(axes, _axes(histories[0]), strict=True):
        style.frame(ax, name)
        style.numbers(ax.xaxis)
    axes[0].set_ylabel(_words(metric), parse_math=False)
    drawn = _draw_lines(axes, histories, metric, names)
    if spans_decades([history.column(metric) for history in histories]):
        axes[0].set_yscale("log")
        style.numbers(axes[0].yaxis)
    style.label_lines(axes[-1], drawn)
    return figure


def _finding(histories: Sequence[History], metric: str, names: Sequence[str]) -> str:
    """Describe the final values of a metric in a sentence."""
    finals = [history.column(metric)[-1] for history in histories]
    if len(finals) > 3 or max(map(len, names)) > 30:
        low, high = np.nanmin(finals), np.nanmax(finals)
        return f"{len(finals)} runs end with a {_words(metric)} of {low:.4g} to {high:.4g}"
    values = [f"{name} {value:.4g}" for name, value in zip(names, finals, strict=True)]
    return f"{sentence(_words(metric))} at the end: {', '.join(values)}"


def _draw_lines(
    axes: Sequence["Axes"], histories: Sequence[History], metric: str, names: Sequence[str]
) -> list[style.Label]:
    """Draw every run against every cost; return labels for the last axes, one for each name."""
    colours, labels_by_name = _colours(histories, names), {}
    for history, name in zip(histories, names, strict=True):
        label, values = None if name in labels_by_name else name, history.column(metric)
        for ax, (_, costs) in zip(axes, _axes(history), strict=True):
            ax.plot(costs, values, color=colours[name], lw=1.6, label=label)
        seconds = _axes(history)[-1][1]
        labels_by_name.setdefault(name, style.Label(name, seconds, values, colours[name]))
    return list(labels_by_name.values())


def _colours(histories: Sequence[History], names: Sequence[str]) -> dict[str, str]:
    """Assign a colour to each name: that of its algorithm, if it is not in use."""
    colours: dict[str, str] = {}
    for history, name in zip(histories, names, strict=True):
        preferred = history.header.get("about", {}).get("colour")
        used = colours.values()
        free = [colour for colour in (preferred, *COLOURS) if colour and colour not in used]
        colours.setdefault(name, free[0] if free else COLOURS[len(colours) % len(COLOURS)])
    return colours


def save(histories: Sequence[History], directory: Path, metric: str | None = None) -> list[Path]:
    """Write figure.png, figure.svg and report.html; return their paths."""
    return write(draw(histories, metric), directory, page(histories))


def write(figure: "Figure", directory: Path, html: str) -> list[Path]:
    """Write a figure as PNG and SVG, and a page; return their paths."""
    make_folder(directory)
    svg, png = as_svg(figure), io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    content = {
        "figure.png": png.getvalue(),
        "figure.svg": svg,
        "report.html": html,
    }
    for name, data in content.items():
        write_atomic(directory / name, data)
    return [directory / name for name in content]


def as_image(figure: "Figure") -> str:
    """Convert a figure to an HTML image with embedded data and a white background."""
    data = base64.b64encode(only_light(as_svg(figure)).encode()).decode()
    return f'<img style="background:#fff" src="data:image/svg+xml;base64,{data}">'


def summary(history: History) -> str:
    """Summarise the outcome of a run in a few sentences."""
    if not history.records:
        return "The run ended before its first evaluation."
    header, last = history.header, history.records[-1]
    end = (history.end or {}).get("status", "stopped without an end record")
    server_metrics = [name for name in metrics(history) if not is_column(name)]
    result = ", ".join(f"{name.replace('_', ' ')} {last[name]:.4g}" for name in server_metrics)
    lines = [
        f"{header['algorithm']} on {describe(header['config'])}: {end} after {last['round']:,} of "
        f"{header['rounds']:,} iterations.",
        f"Result: {result or 'no metrics, as the run had no `evaluate`'}.",
        *_clients(history.client_scores),
        f"Cost: {last['communication_rounds']:,} communication rounds, "
        f"{size(last['bytes_down'])} sent to clients, {size(last['bytes_up'])} sent back"
        f"{estimated(last)}, {last['seconds']:.1f} s of computing.",
    ]
    if last.get("projected"):
        lines.append(f"The projection of v was active {last['projected']:,} times.")
    if history.refusals:
        lines.append(_excluded(history))
    lines += [
        f"Warning in iteration {line['round']:,}: {line['text']}." for line in history.warnings
    ]
    if history.verdict is not None:
        lines.append(f"{sentence(history.verdict['text'])}.")
    return "\n".join(lines)


def _clients(scores: ClientScores | None) -> list[str]:
    """Describe the clients' metrics and the missing replies in sentences."""
    if scores is None:
        return []
    lines = [f"Clients' {scores.summary(name)}." for name in scores.values]
    missing = scores.missing
    shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return [*lines, *([f"Without a finite reply of: {shown}."] if missing else [])]


def estimated(record: Json) -> str:
    """Return the relative uncertainty of the bytes in words; empty if they are exact."""
    uncertainty = record.get("bytes_uncertainty", 0)
    return f" (estimated, to {100 * uncertainty:.2g} %)" if uncertainty else ""


def _excluded(history: History) -> str:
    """Summarise the rejected replies in a sentence."""
    clients = {refusal["client"] for refusal in history.refusals}
    reason, count = Counter(line["reason"] for line in history.refusals).most_common(1)[0]
    text = {member.value: member.text for member in Reason}.get(reason, reason)
    return (
        f"Excluded replies: {len(history.refusals):,}, from {len(clients):,} "
        f"client{'s' * (len(clients) != 1)}; most frequent reason ({count:,}): the client {text}. "
        f"They are listed in {FILE}."
    )


def sentence(text: str) -> str:
    """Capitalise the first letter of a text."""
    return text[:1].upper() + text[1:]


def describe(config: Json) -> str:
    """Describe a task's configuration in words."""
    task = dict(config.get("task", {}))
    name = task.pop("name", "a task")
    details = [str(task[key]) for key in ("dataset", "model", "partition") if task.get(key)]
    if task.get("clients"):
        details.append(f"{task['clients']} clients")
    return f"{name} ({', '.join(details)})" if details else name


def size(count: int) -> str:
    """Format a number of bytes with a unit.

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
    histories: Sequence[History],
    names: Sequence[str] | None = None,
    table: Sequence[Mapping[str, str]] = (),
) -> str:
    """Return the page of `simfbo watch` as self-contained HTML with the data of the runs.

    Args:
        histories: the runs.
        names: of the runs; `labels` by default. Names that differ only in ", seed ..." at the end
            share a line.
        table: rows to show below the figure, all with the same keys.
    """
    headers = [history.header for history in histories]
    has_names, names = names is not None, labels(histories) if names is None else names
    titles = list(map(without_seed, names, headers))
    keys = titles if has_names else groups(headers)
    points = min(_POINTS, _ALL_POINTS // max(1, len(histories)))
    runs = [
        {"name": name, "title": title, "group": key, "lines": _lines(history, points)}
        for name, title, key, history in zip(names, titles, keys, histories, strict=True)
    ]
    return frozen(runs, differences(headers), list(map(summary, histories)), list(map(dict, table)))


def _lines(history: History, points: int) -> list[Json]:
    """Convert a history to the lines of the page, with about `points` records at most."""
    every, last = -(-len(history.records) // points) or 1, len(history.records) - 1
    indices = {*range(0, last + 1, every), *_extremes(history), last} if last >= 0 else set()
    records = [history.records[i] for i in sorted(indices)]
    lines_by_kind = {
        "header": [history.header],
        "record": records,
        "refusal": _counted(history),
        "warning": history.warnings,
        "verdict": [history.verdict],
        "end": [history.end],
    }
    return [
        {"kind": kind, **plain(line)}
        for kind, lines in lines_by_kind.items()
        for line in lines
        if line
    ]


def _extremes(history: History) -> list[int]:
    """Return the indices of the smallest and largest value of each metric."""
    indices: list[int] = []
    for name in metrics(history):
        values = [record.get(name, np.nan) for record in history.records]
        if not np.isnan(values).all():
            indices += [int(np.nanargmin(values)), int(np.nanargmax(values))]
    return indices


def _counted(history: History) -> list[Json]:
    """Count the rejected replies by client, reason and interval of rounds."""
    width = -(-max((line["round"] for line in history.refusals), default=0) // _COLUMNS) or 1
    counts = Counter(
        (line["round"] // width * width, line["client"], line["reason"])
        for line in history.refusals
    )
    return [
        {"round": t, "client": client, "reason": reason, "count": count}
        for (t, client, reason), count in counts.items()
    ]


def _axes(history: History) -> list[tuple[str, Any]]:
    """Return names and values of the three horizontal axes."""
    up, down = np.array(history.column("bytes_up")), np.array(history.column("bytes_down"))
    return [
        ("communication rounds", history.column("communication_rounds")),
        ("megabytes sent, both ways", (up + down) / 1e6),
        ("seconds of computing", history.column("seconds")),
    ]


def spans_decades(columns: Sequence[Sequence[float]]) -> bool:
    """Check if all values are positive and span more than two decades."""
    values = np.concatenate([np.asarray(column, float) for column in columns])
    return bool((values > 0).all() and values.max() > 100 * values.min())


def _words(name: str) -> str:
    return name.replace("_", " ")
