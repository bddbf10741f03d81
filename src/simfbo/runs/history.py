"""The record of a run: JSON lines on disk, appended as it goes, readable at any moment.

The first line is the header (configuration, versions, seed), then one line per evaluation and per
refused reply, then an end line that says how the run ended. It is strict JSON: a number that is not
finite is written as null and read as NaN.
"""

import contextlib
import json
import math
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
        end: how it ended: `status` is finished, interrupted, diverged or starved (too few replies
            were left), with a `reason` for the last two; None if it was killed.
        state: the algorithm's last state; None in a history loaded from disk.
        refusals: one dictionary per reply that was not counted: `round`, `exchange`, `work`,
            `client` and `reason`.
    """

    header: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    state: Any = None
    refusals: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: str | Path) -> "History":
        """Return the history in a run's folder or file; a torn last line is left out."""
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise UserError(f"No run is at {path}: give a folder that `simfbo run` wrote.")
        return cls.parse(file.read_bytes(), str(file))

    @classmethod
    def parse(cls, data: bytes, name: str) -> "History":
        """Return the history in a file's bytes."""
        lines = [line for line in map(_parse, data.splitlines()) if line]
        if not lines or lines[0].pop("kind", None) != "header":
            raise UserError(f"{name} is not a history of simfbo: its first line is no header.")
        history = cls(lines[0])
        for line in lines[1:]:
            kind = line.pop("kind")
            if kind == "end":
                history.end = line
            elif kind == "refusal":
                history.refusals.append(line)
            else:
                read = {key: math.nan if line[key] is None else line[key] for key in line}
                history.records.append(read)
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
    """Appends a history to a file, whole lines at a time."""

    def __init__(self, directory: Path | None, resume: bool = False) -> None:
        """Open DIRECTORY/history.jsonl; without a directory nothing is written.

        Args:
            directory: the run's folder.
            resume: whether there may be a history already.
        """
        self._file: IO[bytes] | None = None
        if directory is None:
            return
        make_folder(directory)
        if not resume and (directory / FILE).exists():
            raise UserError(
                f"{directory} already holds a run: choose another output folder, or go on with it: "
                f"simfbo run --resume {directory}."
            )
        self._file = (directory / FILE).open("ab")
        _lock(self._file, directory)

    def cut(self, size: int) -> None:
        """Cut the file down to its first bytes."""
        if self._file is not None:
            self._file.flush()
            self._file.truncate(size)
            self._file.seek(0, os.SEEK_END)

    def write(self, kind: str, *lines: Mapping[str, Any]) -> None:
        """Append lines of one kind and flush them."""
        if self._file is not None and lines:
            text = "".join(json.dumps({"kind": kind, **plain(line)}) + "\n" for line in lines)
            try:
                self._file.write(text.encode())
                self._file.flush()
            except OSError as error:
                raise UserError(
                    f"{self._file.name} could not be written ({error.strerror}): make room; "
                    "--resume goes on from the last checkpoint."
                ) from None

    @property
    def position(self) -> int:
        """Return how many bytes there are."""
        return 0 if self._file is None else self._file.tell()

    def sync(self) -> None:
        """Return when everything is on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what did not fit has been told
                self._file.close()


def _lock(file: IO[bytes], directory: Path) -> None:
    """Take the history for this process alone, as long as it is open; the system lets go of it."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"The run in {directory} is still going on, in another process.") from None
    except OSError:  # a file system without locks
        return


def plain(values: Any) -> Any:
    """Return values as strict JSON gives them back, with null for numbers that are not finite."""
    if isinstance(values, Mapping):
        return {str(key): plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


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
    # Large products are split by the size of XLA's pool, which moves their last bits.
    found["threads"] = os.environ.get("PJRT_NPROC") or str(_cores())
    return found


def _cores() -> int:
    """Return how many cores this process may use."""
    mine = getattr(os, "sched_getaffinity", None)
    return len(mine(0)) if mine else os.cpu_count() or 1


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return one line of a history; None where it is none."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) and "kind" in found else None
