"""Numbers as comma-separated values, which every spreadsheet opens."""

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
        folder: for files named after the runs; by default each run's own folder, where the file is
            `metrics.csv`.
    """

    folder: str | None = None
    name = "csv"

    def begin(self, run: TrackedRun) -> "_Table":
        """Begin a file, or go on with the run's own."""
        if run.id is not None:
            return _Table(run.id, (run.directory or Path()) / run.id, run.last)
        if self.folder is not None:
            place = first_free(Path(self.folder), (run.study, run.name), _created)
            file = place.with_name(f"{place.name}.csv")
            return _Table(str(file), file)
        if run.directory is None:
            raise UserError("The tracker csv needs a folder: use 'csv:FOLDER' or directory=...")
        make_folder(run.directory)
        return _Table(_FILE, run.directory / _FILE)


def _created(place: Path) -> None:
    """Create an empty file."""
    place.with_name(f"{place.name}.csv").touch(exist_ok=False)


class _Table:
    """A file of rows, which is written with the first one."""

    def __init__(self, name: str, file: Path, last: int = -1) -> None:
        self.id, self._file = name, file
        self._columns: list[str] = []
        rows = list(csv.DictReader(io.StringIO(file.read_text()))) if last >= 0 else []
        self._write([row for row in rows if None not in row.values() and int(row["round"]) <= last])

    def _write(self, rows: list[dict[str, str]]) -> None:
        """Replace the file by these rows."""
        if rows:
            self._columns = list(rows[-1])
            out = io.StringIO()
            writer = csv.DictWriter(out, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomic(self._file, out.getvalue())

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Append a row; a new column makes the file anew."""
        row = {"round": str(round), **{name: str(value) for name, value in values.items()}}
        if not set(row) <= set(self._columns):
            kept = (
                list(csv.DictReader(io.StringIO(self._file.read_text()))) if self._columns else []
            )
            columns = dict.fromkeys([*self._columns, *row], "")
            self._write([columns | one for one in [*kept, row]])
            return
        with self._file.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            writer.writerow(row)

    def artefact(self, file: Path) -> None:
        """Leave files where they are."""

    def end(self, status: str) -> None:
        """Leave the file as it is."""
