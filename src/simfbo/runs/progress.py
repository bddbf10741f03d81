"""A run as people watch it: live in a terminal, a bar in a notebook, plain lines elsewhere."""

import contextlib
import html
import math
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from simfbo.errors import require
from simfbo.runs.files import Json
from simfbo.runs.history import BOOKKEEPING
from simfbo.runs.report import size

Show = Callable[[int, Json | None], None]
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH, _ROWS = 32, 5  # characters of a sparkline, metrics that are shown
_PAUSE = 0.2  # seconds between two updates of a notebook


@contextlib.contextmanager
def shown(
    show: bool, name: str, rounds: int, about: Json | None = None, console: Any = None
) -> Generator[Show | None]:
    """Show the progress of a run within the block; yield what `run` calls to that end.

    Args:
        show: whether to show anything.
        name: of the algorithm.
        rounds: of the run.
        about: names the main `metric`, and which ones to `maximise`.
        console: a console of rich; by default one on standard error.
    """
    watched = _Watched(name, rounds, about or {})
    if not show:
        yield None
    elif console is None and _in_notebook():
        yield _notebook(watched)
    else:
        console = console or require("rich.console", "cli").Console(stderr=True, highlight=False)
        if not console.is_terminal:
            yield lambda t, record: _print_line(console, watched, record)
            return
        with _live(console, watched) as update:
            yield update


def line(record: Json, metric: str | None) -> str:
    """Return one evaluation as a line of text."""
    sent = size(record["bytes_up"] + record["bytes_down"])
    value = f"{metric.replace('_', ' ')} {record[metric]:<9.4g} " if metric in record else ""
    return f"iteration {record['round']:>6,}   {value}sent {sent:>8}   {record['seconds']:7.2f} s"


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Return a curve as a row of blocks; a gap where a value is not finite.

    Example:
        >>> sparkline([0, 1, 2, 3])
        '▁▃▆█'
    """
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / ((high - low) or 1.0)
    return "".join(_BLOCKS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


class _Watched:
    """What is shown of a run: its metrics so far, thinned so that memory stays flat."""

    def __init__(self, name: str, rounds: int, about: Json) -> None:
        self.name, self.rounds, self.done = name, rounds, 0
        self.metrics: dict[str, list[float]] = {}
        self._main = about.get("metric")
        self._maximise = set(about.get("maximise", ()))
        if about.get("goal") == "max":
            self._maximise.add(self._main)
        self._best: dict[str, float] = {}

    def take(self, t: int, record: Json | None) -> None:
        """Take what `run` reports."""
        self.done = t
        if record is None:
            return
        found = {k: v for k, v in record.items() if k not in BOOKKEEPING}
        first = [self._main] if self._main in found else []
        for name in dict.fromkeys([*first, *found]):
            self._add(name, float(found[name]))

    def _add(self, name: str, value: float) -> None:
        values = self.metrics.setdefault(name, [])
        values.append(value)
        if len(values) >= 8 * _WIDTH:
            values[:] = [*values[:-1:2], value]
        choose = max if name in self._maximise else min
        if math.isfinite(value):
            self._best[name] = choose(self._best.get(name, value), value)

    @property
    def main(self) -> str | None:
        """Return the metric that matters; None if there is none."""
        return next(iter(self.metrics), None)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return name, last value, best value and curve of the first metrics."""
        return [
            (name.replace("_", " "), f"{values[-1]:.4g}", f"{self._best.get(name, math.nan):.4g}",
             sparkline(values[len(values) > 2 :]))
            for name, values in list(self.metrics.items())[:_ROWS]
        ]  # fmt: skip


def _print_line(console: Any, watched: _Watched, record: Json | None) -> None:
    """Print a line for an evaluation."""
    if record is not None:
        watched.take(record["round"], record)
        console.print(line(record, watched.main), markup=False, soft_wrap=True)


@contextlib.contextmanager
def _live(console: Any, watched: _Watched) -> Generator[Show]:
    """Show a bar with the time left, and a row with a curve per metric, below what is printed."""
    progress, live = require("rich.progress", "cli"), require("rich.live", "cli")
    group, table = require("rich.console", "cli").Group, require("rich.table", "cli").Table
    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
        console=console,
    )
    number = bar.add_task(watched.name, total=watched.rounds)

    def drawn() -> Any:
        rows = table("", "now", "best", "", box=None, pad_edge=False, header_style="dim")
        for row in watched.rows():
            rows.add_row(*(require("rich.text", "cli").Text(cell) for cell in row))
        return group(bar, rows) if watched.metrics else bar

    with live.Live(drawn(), console=console, transient=True, refresh_per_second=8) as display:

        def update(t: int, record: Json | None) -> None:
            watched.take(t, record)
            bar.update(number, completed=t)
            if record is not None:
                display.update(drawn())

        yield update


def _in_notebook() -> bool:
    """Return whether this is a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _notebook(watched: _Watched) -> Show:
    """Show a bar in a notebook; return what updates it."""
    display = require("IPython.display", "cli")
    begin, first, shown_at = time.monotonic(), -1, 0.0
    handle = display.display(
        display.HTML(bar_html(watched.name, 0, watched.rounds)), display_id=True
    )

    def update(t: int, record: Json | None) -> None:
        nonlocal first, shown_at
        watched.take(t, record)
        first = t if first < 0 else first  # not the start where a run is resumed
        now = time.monotonic()
        if t == watched.rounds or now - shown_at >= _PAUSE:
            shown_at = now
            left = (now - begin) / max(t - first, 1) * (watched.rounds - t)
            values = {name: values[-1] for name, values in watched.metrics.items()}
            handle.update(display.HTML(bar_html(watched.name, t, watched.rounds, left, values)))

    return update


def bar_html(
    name: str,
    done: int,
    rounds: int,
    left: float | None = None,
    values: Mapping[str, float] | None = None,
) -> str:
    """Return a progress bar as HTML, with everything escaped.

    Args:
        name: what is run.
        done: rounds so far.
        rounds: in all.
        left: seconds that it may still take.
        values: the latest metrics.
    """
    parts = [f"{done:,} of {rounds:,} iterations"]
    parts += [] if left is None else [f"{left:.0f} s left"]
    parts += [f"{key.replace('_', ' ')} {value:.4g}" for key, value in (values or {}).items()][
        :_ROWS
    ]
    text = html.escape(f"{name}: {', '.join(parts)}")
    return f'<progress value="{done}" max="{rounds}" style="width:20em"></progress> {text}'
