"""The console, progress bars, tables, and folders for results, for all commands."""

import contextlib
import itertools
import json
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from simfbo.config.run import RunConfig
from simfbo.errors import UserError, unusable
from simfbo.runs.files import Json, as_folder_name
from simfbo.runs.lines import plain


class _Console(Console):
    """A console that leaves broken pipes to `simfbo.cli.output`."""

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise  # pyright: ignore


OUT = _Console(highlight=False, soft_wrap=True)


@contextlib.contextmanager
def json_only() -> Generator[None]:
    """Reserve standard output for `print_json` within the block; other output goes to stderr."""
    OUT.stderr = True
    try:
        yield
    finally:
        OUT.stderr = False


def print_json(value: Json | list[Json]) -> None:
    """Print a result for programs: strict JSON, with null for numbers that are not finite."""
    print(json.dumps(plain(value), indent=1, default=str))


def progress_bar(quiet: bool = False) -> Progress:
    """Return the progress bar for long computations."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=OUT, transient=True, disable=quiet)


@contextlib.contextmanager
def fetching(quiet: bool = False) -> Generator[None]:
    """Show the progress of downloads of data sets within the block."""
    from simfbo.datasets.package_clients import watching

    name = TextColumn("fetching {task.description}", markup=False)
    times = TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")
    columns = name, BarColumn(), DownloadColumn(), *times
    progress = Progress(*columns, console=OUT, transient=True)
    bars: dict[str, TaskID] = {}

    def show(package: str, downloaded: int, size: int) -> None:
        if package not in bars:
            bars[package] = progress.add_task(package, total=size or None)
            if OUT.is_terminal:
                progress.start()
            else:
                OUT.print(f"fetching {package}", markup=False)
        progress.update(bars[package], completed=min(downloaded, size or downloaded))

    with watching(None if quiet else show):
        try:
            yield
        finally:
            if progress.live.is_started:
                progress.stop()


def fetch_first(configs: Iterable[RunConfig], data_dir: Path | None, quiet: bool) -> None:
    """Download the data sets of runs before their workers start."""
    from simfbo import datasets

    names = {getattr(config.task, "dataset", None): None for config in configs}
    with fetching(quiet):
        for name in names:
            if name in datasets.TABLES:
                datasets.load_table(name, data_dir)
            elif name in datasets.NAMES:
                datasets.load(name, data_dir)


def print_table(rows: Sequence[Mapping[str, str]], title: str) -> None:
    """Print a table, a row per mapping."""
    table = Table(title=title)
    for name in rows[0]:
        is_text = any(row[name][:1].isalpha() for row in rows)
        table.add_column(name, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row.values())
    OUT.print(table)


def new_folder(prefix: str, config: RunConfig, *suffixes: str) -> Path:
    """Return a new folder under runs/, named after the run."""
    data = [getattr(config.task, "dataset", None), getattr(config.task, "partition", None)]
    names = [prefix, config.task.name, *data, *suffixes]
    base = Path("runs") / as_folder_name(*(str(name) for name in names if name))
    others = (base.with_name(f"{base.name}-{i}") for i in itertools.count(2))
    return next(path for path in itertools.chain([base], others) if not path.exists())


def workers(jobs: int | None) -> int:
    """Return the number of parallel runs; a run keeps about two cores busy."""
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}.")
    return jobs or max(1, (os.cpu_count() or 1) // 2)


@contextlib.contextmanager
def resumable(file: Path, command: str) -> Generator[None]:
    """Add the command to resume to an interruption within the block, once `file` exists.

    That covers Ctrl-C, and files that cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or not file.exists():
            raise
        advice = f"Resume with: simfbo {command} --resume {file.parent}"
        raise UserError(f"{unusable(error)} {advice}") from None
    except KeyboardInterrupt:
        if file.exists():
            raise interrupted(file.parent, command) from None
        raise


def interrupted(directory: Path, command: str) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt whose text is the command to resume."""
    return KeyboardInterrupt(f"interrupted. Resume with: simfbo {command} --resume {directory}")
