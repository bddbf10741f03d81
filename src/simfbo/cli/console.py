"""What all commands print with: the console, progress bars, tables, and folders for results."""

import contextlib
import itertools
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from simfbo.config.run import RunConfig
from simfbo.errors import UserError
from simfbo.runs.files import as_folder_name

OUT = Console(highlight=False, soft_wrap=True)


def progress_bar(quiet: bool = False) -> Progress:
    """Return the progress bar of long work."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    return Progress(*columns, console=OUT, transient=True, disable=quiet)


def print_table(rows: Sequence[Mapping[str, str]], title: str) -> None:
    """Print a table, a row per mapping."""
    table = Table(title=title)
    for name in rows[0]:
        words = any(row[name][:1].isalpha() for row in rows)
        table.add_column(name, justify="left" if words else "right")
    for row in rows:
        table.add_row(*row.values())
    OUT.print(table)


def new_folder(prefix: str, config: RunConfig, *suffixes: str) -> Path:
    """Return a folder under runs/ that does not exist yet, named after what is run."""
    data = [getattr(config.task, "dataset", None), getattr(config.task, "partition", None)]
    names = [prefix, config.task.name, *data, *suffixes]
    base = Path("runs") / as_folder_name(*(str(name) for name in names if name))
    others = (base.with_name(f"{base.name}-{i}") for i in itertools.count(2))
    return next(path for path in itertools.chain([base], others) if not path.exists())


def workers(jobs: int | None) -> int:
    """Return how many runs go side by side; a run keeps about two cores busy."""
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}.")
    return jobs or max(1, (os.cpu_count() or 1) // 2)


@contextlib.contextmanager
def resumable(file: Path, command: str) -> Generator[None]:
    """Say how to resume after Ctrl-C within the block, once there is the file that it takes."""
    try:
        yield
    except KeyboardInterrupt:
        if file.exists():
            raise interrupted(file.parent, command) from None
        raise


def interrupted(directory: Path, command: str) -> KeyboardInterrupt:
    """Return Ctrl-C with a sentence that says how to resume."""
    return KeyboardInterrupt(f"interrupted. Resume with: simfbo {command} --resume {directory}")
