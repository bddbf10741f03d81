"""The progress of a run: live in a terminal, a bar in a notebook, plain lines elsewhere."""

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
    """Show the progress of a run within the block; yield the callback for `run`.

    Args:
        show: False to show nothing and yield None.
        name: of the algorithm.
        rounds: of the run.
        about: the main `metric`, and a list of those to `maximise`.
        console: a console of rich; by default one on standard error.
    """
    metrics = _Metrics(name, rounds, about or {})
    if not show:
        yield None
    elif console is None and _in_notebook():
        yield _notebook(metrics)
    else:
        console = console or require("rich.console", "cli").Console(stderr=True, highlight=False)
        if not console.is_terminal:
            yield lambda t, record: _print_line(console, metrics, record)
            return
        with _live(console, metrics) as update:
            yield update


def line(record: Json, metric: str | None) -> str:
    """Format an evaluation as a line of text."""
    sent = size(record["bytes_up"] + record["bytes_down"])
    value = f"{metric.replace('_', ' ')} {record[metric]:<9.4g} " if metric in record else ""
    return f"iteration {record['round']:>6,}   {value}sent {sent:>8}   {record['seconds']:7.2f} s"


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Render a curve as a row of blocks, with gaps for values that are not finite.

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


class _Metrics:
    """The metrics of a run so far, thinned to bounded memory."""

    def __init__(self, name: str, rounds: int, about: Json) -> None:
        self.name, self.rounds, self.done = name, rounds, 0
        self.values: dict[str, list[float]] = {}
        self._main = about.get("metric")
        self._maximise = set(about.get("maximise", ()))
        if about.get("goal") == "max":
            self._maximise.add(self._main)
        self._best: dict[str, float] = {}

    def take(self, t: int, record: Json | None) -> None:
        """Add the report of an iteration."""
        self.done = t
        if record is None:
            return
        metrics = {k: v for k, v in record.items() if k not in BOOKKEEPING}
        first = [self._main] if self._main in metrics else []
        for name in dict.fromkeys([*first, *metrics]):
            self._add(name, float(metrics[name]))

    def _add(self, name: str, value: float) -> None:
        values = self.values.setdefault(name, [])
        values.append(value)
        if len(values) >= 8 * _WIDTH:
            values[:] = [*values[:-1:2], value]
        choose = max if name in self._maximise else min
        if math.isfinite(value):
            self._best[name] = choose(self._best.get(name, value), value)

    @property
    def main(self) -> str | None:
        """The main metric; None if there are no metrics."""
        return next(iter(self.values), None)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return name, last value, best value and curve of the first metrics."""
        return [
            (
                name.replace("_", " "),
                f"{values[-1]:.4g}",
                f"{self._best.get(name, math.nan):.4g}",
                sparkline(values[len(values) > 2 :]),
            )
            for name, values in list(self.values.items())[:_ROWS]
        ]


def _print_line(console: Any, metrics: _Metrics, record: Json | None) -> None:
    if record is not None:
        metrics.take(record["round"], record)
        console.print(line(record, metrics.main), markup=False, soft_wrap=True)


@contextlib.contextmanager
def _live(console: Any, metrics: _Metrics) -> Generator[Show]:
    """Show a bar with the time left and a curve per metric, below other output."""
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
    bar_id = bar.add_task(metrics.name, total=metrics.rounds)

    def rendered() -> Any:
        rows = table("", "now", "best", "", box=None, pad_edge=False, header_style="dim")
        for row in metrics.rows():
            rows.add_row(*(require("rich.text", "cli").Text(cell) for cell in row))
        return group(bar, rows) if metrics.values else bar

    with live.Live(rendered(), console=console, transient=True, refresh_per_second=8) as display:

        def update(t: int, record: Json | None) -> None:
            metrics.take(t, record)
            bar.update(bar_id, completed=t)
            if record is not None:
                display.update(rendered())

        yield update


def _in_notebook() -> bool:
    """Check for a notebook, which can show HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _notebook(metrics: _Metrics) -> Show:
    """Show a bar in a notebook; return the callback that updates it."""
    display = require("IPython.display", "cli")
    begin, first, shown_at = time.monotonic(), -1, 0.0
    handle = display.display(
        display.HTML(bar_html(metrics.name, 0, metrics.rounds)), display_id=True
    )

    def update(t: int, record: Json | None) -> None:
        nonlocal first, shown_at
        metrics.take(t, record)
        first = t if first < 0 else first  # larger than 1 in a resumed run
        now = time.monotonic()
        if t == metrics.rounds or now - shown_at >= _PAUSE:
            shown_at = now
            left = (now - begin) / max(t - first, 1) * (metrics.rounds - t)
            values = {name: values[-1] for name, values in metrics.values.items()}
            handle.update(display.HTML(bar_html(metrics.name, t, metrics.rounds, left, values)))

    return update


def bar_html(
    name: str,
    done: int,
    rounds: int,
    left: float | None = None,
    values: Mapping[str, float] | None = None,
) -> str:
    """Render a progress bar as escaped HTML.

    Args:
        name: of the algorithm.
        done: the number of finished rounds.
        rounds: of the run.
        left: the estimated remaining seconds.
        values: the latest metrics.
    """
    words = [f"{done:,} of {rounds:,} iterations"]
    words += [] if left is None else [f"{left:.0f} s left"]
    for key, value in list((values or {}).items())[:_ROWS]:
        words.append(f"{key.replace('_', ' ')} {value:.4g}")
    text = html.escape(f"{name}: {', '.join(words)}")
    return f'<progress value="{done}" max="{rounds}" style="width:20em"></progress> {text}'
