"""The lines of a Flower run's history on arrival: a progress bar in the terminal, and trackers."""

from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from simfbo.cli.console import OUT
from simfbo.runs.files import Json
from simfbo.runs.history import BOOKKEEPING, FILE, History
from simfbo.runs.trackers.tracking import Tracking

_SHOWN = 4  # metrics beside the bar


class RunBar:
    """A progress bar with the latest metrics, and a line for every excluded client."""

    def __init__(self) -> None:
        self._hidden = {*BOOKKEEPING, "kind"}
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        times = (
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = Progress(*columns, *times, console=OUT)
        self._task = self._bar.add_task("waiting for the nodes", total=None)

    def __enter__(self) -> "RunBar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, line: Json) -> None:
        """Show a line of the history, or the digest of the started app."""
        if line["kind"] == "app":
            self._bar.console.print(f"App {line['digest']}", soft_wrap=True)
        elif line["kind"] == "header":
            self._bar.update(self._task, total=line["rounds"])
        elif line["kind"] == "record":
            metrics = {name: value for name, value in line.items() if name not in self._hidden}
            numbers = [
                f"{name} {v:.4g}" for name, v in metrics.items() if isinstance(v, int | float)
            ]
            shown = ", ".join(numbers[:_SHOWN])
            self._bar.update(self._task, completed=line["round"], description=shown or "training")
        elif line["kind"] == "refusal":
            text = f"iteration {line['round']}: client {line['client']} {line['text']}"
            self._bar.console.print(text, markup=False)
        elif line["kind"] == "warning":
            self._bar.console.print(f"iteration {line['round']}: {line['text']}", markup=False)


class Lines:
    """Passes the lines of a run's history to the progress bar and the trackers."""

    def __init__(self, folder: Path, tracking: Tracking, bar: RunBar) -> None:
        self._folder, self._tracking, self._bar, self._begun = folder, tracking, bar, False

    def show(self, line: Json) -> None:
        """Show and track a line."""
        self._bar.show(line)
        if line["kind"] == "header" and not self._begun:
            self._begun = True
            history_exists = (self._folder / FILE).is_file()
            self._tracking.begin_run(
                line, History.load(self._folder).records if history_exists else ()
            )
        elif line["kind"] == "record":
            self._tracking.record(line)
            self._tracking.save()
