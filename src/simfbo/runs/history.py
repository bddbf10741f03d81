"""The history of a run: JSON lines on disk, appended during the run, readable at any moment.

The first line is the header (configuration, versions, seed), followed by one line per evaluation,
per rejected reply and per warning, a verdict, and an end line with the outcome. It is strict JSON:
a number that is not finite is written as null and read as NaN. Every line ends with a checksum, so
that damaged lines are detected and skipped.
"""

import contextlib
import html
import math
import os
import platform
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from simfbo.errors import ResumableError, UserError, require
from simfbo.runs.files import Json, lock, make_folder, require_no_way_out, write_atomic
from simfbo.runs.lines import as_line, read_lines

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from simfbo.runs.client_scores import ClientScores

FILE = "history.jsonl"
# The entries of a record that are not metrics.
CHANNEL_BYTES = ("bytes_x", "bytes_y", "bytes_v", "bytes_other", "bytes_coded")
BOOKKEEPING = (
    "round",
    "communication_rounds",
    "floats_down",
    "floats_up",
    "bytes_down",
    "bytes_up",
    "bytes_uncertainty",
    *CHANNEL_BYTES,
    "bytes_evaluation",
    "refused",
    "seconds",
    "cpu_seconds",
    "projected",
)


@dataclass
class History:
    """The measurements of a run.

    Attributes:
        header: algorithm, seed, rounds, configuration and versions.
        records: one dictionary per evaluation: `round`, the traffic so far, `seconds`, the metrics.
        end: the outcome: `status` is finished, interrupted, diverged or starved (too few replies),
            with a `reason` for the last two; None if the process was killed.
        state: x, y and v of the last iteration, as a `Point`; None in a history loaded from disk.
        method_state: the complete final state of the method; None in a history loaded from disk.
        refusals: one dictionary per rejected reply: `round`, `exchange`, `client_step`, `client`,
            `reason` (a value of `simfbo.core.exchange.Reason`) and `text`, the reason in words.
        verdict: the convergence of a finished run: `converged`, the sentence `text`, and the
            residuals; None for methods that do not send any.
        warnings: one dictionary per detected anomaly: `round`, `exchange`, `client_step`, `about`
            (its kind: "few" clients carry most of the sum, "opposed" to the others, the "same"
            messages), `clients`, `share` (of the sum of norms) and `text`.
        clients: one dictionary per evaluation on clients: `round`, the clients' `weights` and their
            `values` by metric; None or NaN for a client that did not reply.
    """

    header: Json
    records: list[Json] = field(default_factory=list)
    end: Json | None = None
    state: Any = None
    method_state: Any = None
    refusals: list[Json] = field(default_factory=list)
    verdict: Json | None = None
    warnings: list[Json] = field(default_factory=list)
    clients: list[Json] = field(default_factory=list)

    @property
    def lines(self) -> dict[str, list[Json]]:
        """The lists that grow during a run, by the kind of their lines."""
        return {
            "record": self.records,
            "refusal": self.refusals,
            "warning": self.warnings,
            "clients": self.clients,
        }

    @property
    def client_scores(self) -> "ClientScores | None":
        """All clients' metrics at the last evaluation; None without `client_metrics`."""
        from simfbo.runs.client_scores import ClientScores  # imports NumPy

        if not self.clients:
            return None
        last = self.clients[-1]
        return ClientScores.of(last["weights"], last["values"], self.header["client_metrics"])

    @classmethod
    def load(cls, path: str | Path) -> "History":
        """Read the history in a run's folder or file.

        An incomplete last line is ignored. Damaged lines are skipped with a warning; a damaged
        header is replaced by the copy in a checkpoint.
        """
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        data = file.read_bytes() if file.is_file() else b""
        damaged, header = read_lines(data).damaged, None
        if damaged or not data:
            header = _header_in_checkpoint(file)
        if header is None and not file.is_file():
            raise UserError(f"There is no run at {path}: pass the folder of a run.")
        history = cls.parse(data, str(file), header)
        if damaged or not data:
            warnings.warn(f"{file} is damaged: what cannot be read is left out.", stacklevel=2)
        return history

    @classmethod
    def parse(cls, data: bytes, name: str, header: Json | None = None) -> "History":
        """Parse the bytes of a history.

        Args:
            data: the bytes.
            name: of the file in messages.
            header: replaces the one in the file.
        """
        lines = read_lines(data).whole
        first = lines[0] if lines and lines[0].get("kind") == "header" else None
        if header is None and first is None:
            raise UserError(f"{name} is not a history of simfbo: its first line is not a header.")
        fields = {key: value for key, value in (header or first or {}).items() if key != "kind"}
        history = cls(fields)
        for line in lines[0 if first is None else 1 :]:
            kind = line.pop("kind")
            if kind == "end":
                history.end = line
            elif kind == "verdict":
                history.verdict = line
            elif kind in ("refusal", "warning", "clients"):
                history.lines[kind].append(line)
            else:
                record = {key: math.nan if line[key] is None else line[key] for key in line}
                history.records.append(record)
        return history

    def column(self, name: str) -> list[Any]:
        """Return one value of every record, as in `history.column("test_accuracy")`."""
        if not self.records or name not in self.records[-1]:
            columns = ", ".join(self.records[-1]) if self.records else "no records yet"
            raise UserError(f"The history has no '{name}'; it has {columns}.")
        return [record.get(name) for record in self.records]

    def frame(self) -> "pandas.DataFrame":
        """Return a pandas DataFrame with a row for each evaluation and a column for each number.

        The columns are those of the records: `round`, the traffic so far, the metrics.
        """
        return require("pandas", "pandas").DataFrame(self.records)

    def summary(self) -> str:
        """Summarise the outcome in a few sentences: result, clients, cost and convergence.

        `summary.txt` in the folder of `simfbo run` has the same text.
        """
        from simfbo.runs import report  # imports JAX

        return report.summary(self)

    def card(self) -> str:
        """Return the model card in Markdown: data, method, results, cost, privacy and limits.

        It is determined by the history, without dates and times; `card.md` in the folder of
        `simfbo run` has the same text.
        """
        from simfbo.runs import card

        return card.card(self)

    def plot(self, metric: str | None = None) -> "Figure":
        """Draw a metric against communication rounds, megabytes and seconds.

        Args:
            metric: the main metric by default.
        """
        from simfbo.runs import report  # imports JAX

        return report.draw([self], metric)

    def _repr_html_(self) -> str:
        """Render the summary, and the curve if Matplotlib is installed, in a notebook."""
        from simfbo.runs import report

        text = html.escape(report.summary(self)).replace("\n", "<br>")
        with contextlib.suppress(UserError):  # no metrics, or no Matplotlib
            return f"<p>{text}</p>{report.as_image(self.plot())}"
        return f"<p>{text}</p>"


class Writer:
    """Appends lines to the history in a folder, which is locked."""

    def __init__(self, directory: Path | None, resume: bool = False) -> None:
        """Open DIRECTORY/history.jsonl; without a directory nothing is written.

        Args:
            directory: the run's folder.
            resume: accept an existing history.
        """
        self._file: IO[bytes] | None = None
        if directory is None:
            return
        make_folder(directory)
        if resume:
            require_no_way_out(directory)
        elif any(directory.glob(FILE)) or any(directory.glob("checkpoint-*.npz")):
            text = f"{directory} already holds a run: choose another folder, or"
            raise ResumableError(text, directory)
        self._open(directory / FILE)

    def _open(self, path: Path) -> None:
        """Open a file for appending and lock it."""
        file = path.open("ab")
        if not lock(file):
            file.close()
            raise UserError(
                f"The run in {path.parent} is in progress in another process: wait until it ends."
            )
        self._file = file

    def replace(self, data: bytes) -> None:
        """Replace the content of the file atomically."""
        if self._file is not None:
            old, path = self._file, Path(self._file.name)
            write_atomic(path, data)
            self._open(path)
            old.close()

    def cut(self, size: int) -> None:
        """Truncate the file to its first `size` bytes."""
        if self._file is not None:
            self._file.flush()
            self._file.truncate(size)
            self._file.seek(0, os.SEEK_END)

    def write(self, kind: str, *lines: Json) -> None:
        """Append lines of one kind and flush them."""
        if self._file is not None and lines:
            data = b"".join(as_line(kind, line) for line in lines)
            try:
                self._file.write(data)
                self._file.flush()
            except OSError as error:
                file = Path(self._file.name)
                text = f"{file} could not be written ({error.strerror}): free some space, then"
                raise ResumableError(text, file.parent) from None

    @property
    def position(self) -> int:
        """The size of the file in bytes."""
        return 0 if self._file is None else self._file.tell()

    def sync(self) -> None:
        """Sync the file to disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and release the lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `write` has reported a full disk
                self._file.close()


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages, and the number of threads."""
    packages = ("simfbo", "jax", "jaxlib", "optax", "numpy")
    result = {"python": platform.python_version()} | {name: _version(name) for name in packages}
    # XLA splits large products by the size of its thread pool, which changes their last bits.
    result["threads"] = os.environ.get("PJRT_NPROC") or str(_cores())
    return result


@lru_cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cores() -> int:
    """Return the number of cores available to this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _header_in_checkpoint(file: Path) -> Json | None:
    """Return the header in the checkpoints beside a history; None if there are none."""
    from simfbo.runs import checkpoint  # imports JAX

    if file.name != FILE or not checkpoint.files(file.parent):
        return None
    with warnings.catch_warnings(), contextlib.suppress(UserError):
        warnings.simplefilter("ignore")
        return checkpoint.newest(file.parent, lambda stored: stored.manifest["header"])
    return None
