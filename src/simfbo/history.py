"""The record of a run: JSON lines on disk, appended as it goes, readable at any moment.

The first line is the header (configuration, versions, seed), then one line per evaluation, then an
end line that says how the run ended.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from simfbo.errors import UserError

if TYPE_CHECKING:
    import pandas

FILE = "history.jsonl"


@dataclass
class History:
    """What a run measured.

    Attributes:
        header: algorithm, seed, rounds, configuration and versions.
        records: one dictionary per evaluation: `round`, what was sent, `seconds`, the metrics.
        end: how it ended: `status` is finished, interrupted or diverged; None if it was killed.
        state: the algorithm's last state; None in a history loaded from disk.
    """

    header: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    state: Any = None

    @classmethod
    def load(cls, path: str | Path) -> "History":
        """Return the history in a run's folder or file; a torn last line is left out."""
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise UserError(f"No run is at {path}: give a folder that `simfbo run` wrote.")
        lines = [line for line in map(_parse, file.read_bytes().splitlines()) if line]
        if not lines or lines[0].pop("kind", None) != "header":
            raise UserError(f"{file} is not a history of simfbo: its first line is no header.")
        history = cls(lines[0])
        for line in lines[1:]:
            if line.pop("kind") == "end":
                history.end = line
            else:
                history.records.append(line)
        return history

    def column(self, name: str) -> list[Any]:
        """Return one value of every record, as `history.column("test_accuracy")`."""
        if not self.records or name not in self.records[-1]:
            known = ", ".join(self.records[-1]) if self.records else "nothing yet"
            raise UserError(f"The history holds no '{name}'; it holds {known}.")
        return [record.get(name) for record in self.records]

    def frame(self) -> "pandas.DataFrame":
        """Return the records as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise UserError("Install pandas for this: pip install 'simfbo[pandas]'.") from None
        return pandas.DataFrame(self.records)


class Writer:
    """Appends a history to a file, a whole line at a time."""

    def __init__(self, directory: Path | None) -> None:
        """Open DIRECTORY/history.jsonl; without a directory nothing is written."""
        self._file: IO[str] | None = None
        if directory is not None:
            make_folder(directory)
            if (directory / FILE).exists():
                raise UserError(f"{directory} already holds a run: choose another output folder.")
            self._file = (directory / FILE).open("a", encoding="utf-8")

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line and flush it."""
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def make_folder(path: Path) -> None:
    """Make a folder that can be written to, or raise with a sentence."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"{path} cannot be used as a folder to write to: choose another one.")


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    found = {"python": platform.python_version()}
    for package in ("simfbo", "jax", "jaxlib", "optax", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return one line of a history; None where it is none."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) and "kind" in found else None
