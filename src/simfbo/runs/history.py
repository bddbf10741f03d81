"""The history of a run: JSON lines on disk, appended during the run, readable at any moment.

The first line is the header (configuration, versions, seed), followed by one line per evaluation,
per refused reply and per warning, and an end line that says how the run ended. It is strict JSON: a
number that is not finite is written as null and read as NaN.
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

from simfbo.errors import ResumableError, UserError, require
from simfbo.runs.files import Json, lock, make_folder

if TYPE_CHECKING:
    import pandas

FILE = "history.jsonl"
# What records hold besides metrics.
BOOKKEEPING = ("round", "communication_rounds", "floats_down", "floats_up", "bytes_down",
               "bytes_up", "refused", "seconds", "cpu_seconds", "projected")  # fmt: skip


@dataclass
class History:
    """What a run measured.

    Attributes:
        header: algorithm, seed, rounds, configuration and versions.
        records: one dictionary per evaluation: `round`, the traffic so far, `seconds`, the metrics.
        end: how the run ended: `status` is finished, interrupted, diverged or starved (too few
            replies), with a `reason` for the last two; None if the process was killed.
        state: the algorithm's last state; None in a history loaded from disk.
        refusals: one dictionary per excluded reply: `round`, `exchange`, `client_step`, `client`,
            `reason` (a value of `simfbo.core.exchange.Reason`) and `text`, the reason in words.
        warnings: one dictionary per warning of clients whose messages stand out: `round`,
            `exchange`, `client_step`, `about` (what is said of them: "few" carry most of the sum,
            "opposed" to others, the "same" messages), `clients`, `share` (of the sum of norms) and
            `text`.
    """

    header: Json
    records: list[Json] = field(default_factory=list)
    end: Json | None = None
    state: Any = None
    refusals: list[Json] = field(default_factory=list)
    warnings: list[Json] = field(default_factory=list)

    @property
    def lines(self) -> dict[str, list[Json]]:
        """Return the lists that grow during a run, by the kind of their lines."""
        return {"record": self.records, "refusal": self.refusals, "warning": self.warnings}

    @classmethod
    def load(cls, path: str | Path) -> "History":
        """Read the history in a run's folder or file; an incomplete last line is ignored."""
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise UserError(f"There is no run at {path}: pass the folder of a run.")
        return cls.parse(file.read_bytes(), str(file))

    @classmethod
    def parse(cls, data: bytes, name: str) -> "History":
        """Return the history in a file's bytes; `name` is what messages call the file."""
        lines = [line for line in map(_parse, data.splitlines()) if line]
        if not lines or lines[0].pop("kind", None) != "header":
            raise UserError(f"{name} is not a history of simfbo: its first line is not a header.")
        history = cls(lines[0])
        for line in lines[1:]:
            kind = line.pop("kind")
            if kind == "end":
                history.end = line
            elif kind in ("refusal", "warning"):
                history.lines[kind].append(line)
            else:
                read = {key: math.nan if line[key] is None else line[key] for key in line}
                history.records.append(read)
        return history

    def column(self, name: str) -> list[Any]:
        """Return one value of every record, as in `history.column("test_accuracy")`."""
        if not self.records or name not in self.records[-1]:
            known = ", ".join(self.records[-1]) if self.records else "no records yet"
            raise UserError(f"The history has no '{name}'; it has {known}.")
        return [record.get(name) for record in self.records]

    def frame(self) -> "pandas.DataFrame":
        """Return the records as a pandas DataFrame."""
        return require("pandas", "pandas").DataFrame(self.records)


class Writer:
    """Appends whole lines to the history in a folder, which it locks."""

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
            taken = f"{directory} already holds a run: choose another folder, or"
            raise ResumableError(taken, directory)
        self._file = (directory / FILE).open("ab")
        if not lock(self._file):
            self._file.close()
            raise UserError(
                f"The run in {directory} is in progress in another process: wait until it ends."
            )

    def cut(self, size: int) -> None:
        """Truncate the file to its first `size` bytes."""
        if self._file is not None:
            self._file.flush()
            self._file.truncate(size)
            self._file.seek(0, os.SEEK_END)

    def write(self, kind: str, *lines: Json) -> None:
        """Append lines of one kind and flush them."""
        if self._file is not None and lines:
            text = "".join(json.dumps({"kind": kind, **plain(line)}) + "\n" for line in lines)
            try:
                self._file.write(text.encode())
                self._file.flush()
            except OSError as error:
                file = Path(self._file.name)
                failed = f"{file} could not be written ({error.strerror}): free some space, then"
                raise ResumableError(failed, file.parent) from None

    @property
    def position(self) -> int:
        """Return the size of the file in bytes."""
        return 0 if self._file is None else self._file.tell()

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, which releases the lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk has been reported by `write`
                self._file.close()


def plain(values: Any) -> Any:
    """Return values as strict JSON gives them back, with None for numbers that are not finite."""
    if isinstance(values, Mapping):
        return {str(key): plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    found = {"python": platform.python_version()}
    for package in ("simfbo", "jax", "jaxlib", "optax", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    # XLA splits large products by the size of its thread pool, which changes their last bits.
    found["threads"] = os.environ.get("PJRT_NPROC") or str(_cores())
    return found


def _cores() -> int:
    """Return how many cores this process may use."""
    mine = getattr(os, "sched_getaffinity", None)
    return len(mine(0)) if mine else os.cpu_count() or 1


def _parse(line: bytes) -> Json | None:
    """Return one line of a history; None if it is damaged."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) and "kind" in found else None
