"""Reports: a metric against rounds, bytes and seconds, as figures and one self-contained page.

Matplotlib (`simfbo[plots]`) is needed to draw, not for `summary` and `page`.
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

# What a page holds: records of a run, of all runs, and columns of a map of excluded replies.
_POINTS, _ALL_POINTS, _COLUMNS = 4000, 20_000, 96


def metrics(history: History) -> list[str]:
    """Return the names of a history's metrics, the main one first."""
    return [name for name in history.records[-1] if name not in BOOKKEEPING]


def labels(histories: Sequence[History]) -> list[str]:
    """Return the names of runs in a figure: the algorithm, and the settings that differ."""
    return names_of([history.header for history in histories])


def draw(
    histories: Sequence[History], metric: str | None = None, names: Sequence[str] | None = None
) -> "Figure":
    """Draw a metric against communication rounds, megabytes and seconds.

    Args:
        histories: the runs, one line each.
        metric: which one; the first run's main metric by default.
        names: the runs' names at the lines' ends; runs of the same name share a colour.

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
        _finding(histories, metric, names), "and how each run got there",
        size=(9.5, 3.0 + max(0, len(set(names)) - 12) * 0.16), columns=3, sharey=True,
    )  # fmt: skip
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
    """Return where the runs end."""
    ends = [history.column(metric)[-1] for history in histories]
    if len(ends) > 3 or max(map(len, names)) > 30:
        low, high = np.nanmin(ends), np.nanmax(ends)
        return f"{len(ends)} runs end with a {_words(metric)} of {low:.4g} to {high:.4g}"
    each = [f"{name} {value:.4g}" for name, value in zip(names, ends, strict=True)]
    return f"{sentence(_words(metric))} at the end: {', '.join(each)}"


def _draw_lines(
    axes: Sequence["Axes"], histories: Sequence[History], metric: str, names: Sequence[str]
) -> list[style.Label]:
    """Draw every run against every cost; return labels for the last, one for each name."""
    colours, found = _colours(histories, names), {}
    for history, name in zip(histories, names, strict=True):
        shown, values = None if name in found else name, history.column(metric)
        for ax, (_, along) in zip(axes, _axes(history), strict=True):
            ax.plot(along, values, color=colours[name], lw=1.6, label=shown)
        last = _axes(history)[-1][1]
        found.setdefault(name, style.Label(name, last, values, colours[name]))
    return list(found.values())


def _colours(histories: Sequence[History], names: Sequence[str]) -> dict[str, str]:
    """Return a colour per name: its algorithm's own, unless another name has that already."""
    found: dict[str, str] = {}
    for history, name in zip(histories, names, strict=True):
        own = history.header.get("about", {}).get("colour")
        free = [colour for colour in (own, *COLOURS) if colour and colour not in found.values()]
        found.setdefault(name, free[0] if free else COLOURS[len(found) % len(COLOURS)])
    return found


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
    """Return a figure as an HTML image that holds its data, on white whatever the page's theme."""
    data = base64.b64encode(only_light(as_svg(figure)).encode()).decode()
    return f'<img style="background:#fff" src="data:image/svg+xml;base64,{data}">'


def summary(history: History) -> str:
    """Return the outcome of a run in a few sentences."""
    if not history.records:
        return "The run ended before its first evaluation."
    header, last = history.header, history.records[-1]
    end = (history.end or {}).get("status", "stopped without an end record")
    own = [name for name in metrics(history) if not is_column(name)]
    found = ", ".join(f"{name.replace('_', ' ')} {last[name]:.4g}" for name in own)
    lines = [
        f"{header['algorithm']} on {describe(header['config'])}: {end} after {last['round']:,} of "
        f"{header['rounds']:,} iterations.",
        f"Result: {found or 'no metrics, as the run had no `evaluate`'}.",
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
    """Return the clients' metrics in sentences, and who did not reply."""
    if scores is None:
        return []
    lines = [f"Clients' {scores.summary(name)}." for name in scores.values]
    missing = scores.missing
    shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return [*lines, *([f"Without a finite reply of: {shown}."] if missing else [])]


def estimated(record: Json) -> str:
    """Return how exact the bytes are, where they are estimated."""
    doubt = record.get("bytes_uncertainty", 0)
    return f" (estimated, to {100 * doubt:.2g} %)" if doubt else ""


def _excluded(history: History) -> str:
    """Return how many replies were excluded, and the most frequent reason."""
    clients = {refusal["client"] for refusal in history.refusals}
    reason, count = Counter(line["reason"] for line in history.refusals).most_common(1)[0]
    text = {known.value: known.text for known in Reason}.get(reason, reason)
    return (
        f"Excluded replies: {len(history.refusals):,}, from {len(clients):,} "
        f"client{'s' * (len(clients) != 1)}; most frequent reason ({count:,}): the client {text}. "
        f"They are listed in {FILE}."
    )


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def describe(config: Json) -> str:
    """Return a task's configuration in words."""
    task = dict(config.get("task", {}))
    name = task.pop("name", "a task")
    parts = [str(task[key]) for key in ("dataset", "model", "partition") if task.get(key)]
    if task.get("clients"):
        parts.append(f"{task['clients']} clients")
    return f"{name} ({', '.join(parts)})" if parts else name


def size(count: int) -> str:
    """Return a number of bytes in a readable unit.

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
    """Return a self-contained HTML page: what `simfbo watch` shows, with the data inside.

    Args:
        histories: the runs.
        names: of the runs; `labels` by default. Those that differ only in ", seed ..." at their end
            are drawn as one line.
        table: rows to show below the figure, all with the same keys.
    """
    headers = [history.header for history in histories]
    names, given = labels(histories) if names is None else names, names is not None
    titles = list(map(without_seed, names, headers))
    keys = titles if given else groups(headers)
    most = min(_POINTS, _ALL_POINTS // max(1, len(histories)))
    runs = [
        {"name": name, "title": title, "group": key, "lines": _lines(history, most)}
        for name, title, key, history in zip(names, titles, keys, histories, strict=True)
    ]
    return frozen(runs, differences(headers), list(map(summary, histories)), list(map(dict, table)))


def _lines(history: History, most: int) -> list[Json]:
    """Return the lines of a history as the page reads them, with about so many records at most."""
    every, last = -(-len(history.records) // most) or 1, len(history.records) - 1
    places = {*range(0, last + 1, every), *_extremes(history), last} if last >= 0 else set()
    records = [history.records[i] for i in sorted(places)]
    found = {
        "header": [history.header],
        "record": records,
        "refusal": _counted(history),
        "warning": history.warnings,
        "verdict": [history.verdict],
        "end": [history.end],
    }
    return [
        {"kind": kind, **plain(line)} for kind, lines in found.items() for line in lines if line
    ]


def _extremes(history: History) -> list[int]:
    """Return where metrics are smallest and largest."""
    found: list[int] = []
    for name in metrics(history):
        values = [record.get(name, np.nan) for record in history.records]
        if not np.isnan(values).all():
            found += [int(np.nanargmin(values)), int(np.nanargmax(values))]
    return found


def _counted(history: History) -> list[Json]:
    """Return the excluded replies, those of one client in neighbouring rounds as one line."""
    width = -(-max((line["round"] for line in history.refusals), default=0) // _COLUMNS) or 1
    found = Counter(
        (line["round"] // width * width, line["client"], line["reason"])
        for line in history.refusals
    )
    return [
        {"round": t, "client": client, "reason": reason, "count": count}
        for (t, client, reason), count in found.items()
    ]


def _axes(history: History) -> list[tuple[str, Any]]:
    """Return the three horizontal axes, each with a name and the values."""
    up, down = np.array(history.column("bytes_up")), np.array(history.column("bytes_down"))
    return [
        ("communication rounds", history.column("communication_rounds")),
        ("megabytes sent, both ways", (up + down) / 1e6),
        ("seconds of computing", history.column("seconds")),
    ]


def spans_decades(columns: Sequence[Sequence[float]]) -> bool:
    """Return whether all values are positive and span more than two decades."""
    values = np.concatenate([np.asarray(column, float) for column in columns])
    return bool((values > 0).all() and values.max() > 100 * values.min())


def _words(name: str) -> str:
    return name.replace("_", " ")
