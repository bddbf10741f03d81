"""Metrics as comma-separated values."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simfbo.errors import UserError
from simfbo.runs.files import make_folder, write_atomic
from simfbo.runs.trackers._tracker import TrackedRun, first_free

_FILE = "metrics.csv"


@dataclass(frozen=True)
class CSV:
    """One file per run, a row per evaluation.

    Attributes:
        folder: of files named after the runs; by default each run's folder, with the file
            `metrics.csv`.
    """

    folder: str | None = None
    name = "csv"

    def begin(self, run: TrackedRun) -> "_Table":
        """Create a file, or continue that of a resumed run."""
        if run.id is not None:
            return _Table(run.id, (run.directory or Path()) / run.id, run.last)
        if self.folder is not None:
            path = first_free(Path(self.folder), (run.study, run.name), _create)
            file = path.with_name(f"{path.name}.csv")
            return _Table(str(file), file)
        if run.directory is None:
            raise UserError("The tracker csv needs a folder: use 'csv:FOLDER' or directory=...")
        make_folder(run.directory)
        return _Table(_FILE, run.directory / _FILE)


def _create(path: Path) -> None:
    path.with_name(f"{path.name}.csv").touch(exist_ok=False)


class _Table:
    """A file of rows, created with the first one."""

    def __init__(self, name: str, file: Path, last: int = -1) -> None:
        self.id, self._file = name, file
        self._columns: list[str] = []
        rows = list(csv.DictReader(io.StringIO(file.read_text()))) if last >= 0 else []
        self._write([row for row in rows if None not in row.values() and int(row["round"]) <= last])

    def _write(self, rows: list[dict[str, str]]) -> None:
        """Replace the content of the file."""
        if rows:
            self._columns = list(rows[-1])
            out = io.StringIO()
            writer = csv.DictWriter(out, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomic(self._file, out.getvalue())

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Append a row; the file is rewritten if there is a new column."""
        row = {"round": str(round), **{name: str(value) for name, value in values.items()}}
        if not set(row) <= set(self._columns):
            text = self._file.read_text() if self._columns else ""
            rows = [*csv.DictReader(io.StringIO(text)), row]
            columns = dict.fromkeys([*self._columns, *row], "")
            self._write([columns | cells for cells in rows])
            return
        with self._file.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            writer.writerow(row)

    def artefact(self, file: Path) -> None:
        """Do nothing."""

    def end(self, status: str) -> None:
        """Do nothing."""
