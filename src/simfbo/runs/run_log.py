"""The log of a run: its history and checkpoints on disk, and how they are resumed."""

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.core.ledger import Ledger, Traffic
from simfbo.core.problem import PyTree
from simfbo.errors import UserError
from simfbo.runs import checkpoint
from simfbo.runs.checkpoint import Checkpoint, DamagedError
from simfbo.runs.files import Json
from simfbo.runs.history import FILE, History, Writer, plain


class Progress(NamedTuple):
    """How far a run is: together with the arguments of `run`, all that is needed to continue it.

    Attributes:
        round: the last completed iteration; -1 before the first evaluation.
        state: the algorithm's state.
        ledger: the traffic so far.
        refused: the number of excluded replies so far.
        seconds: wall-clock time so far.
        cpu_seconds: processor time so far, over all threads.
        written: size of the history in bytes.
        memory: what the federation remembers of earlier exchanges, as JSON values.
    """

    round: int
    state: PyTree
    ledger: Ledger
    refused: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    written: int = 0
    memory: Mapping[str, Any] = {}


class RunLog:
    """Writes the history and the checkpoints of a run; without a directory nothing is written.

    A checkpoint holds the size of the history at that moment, and that much of it is on the disk
    before the checkpoint is. Resuming cuts off what was written later; it is written again.
    """

    def __init__(self, directory: Path | None, header: Json, every: float) -> None:
        """Take a folder, the history's header and the seconds between checkpoints."""
        self.history = History(plain(header))
        self._directory, self._every = directory, every
        self._writer: Writer | None = None
        self._saved_at, self._saved_round = time.monotonic(), -1

    def start(self, first: Progress) -> Progress:
        """Start a new history; return the progress to start from."""
        self._writer = Writer(self._directory)
        return self._write_header(first)

    def _write_header(self, first: Progress) -> Progress:
        self._open.write("header", self.history.header)
        return first._replace(written=self._open.position)

    def resume(self, first: Progress) -> Progress:
        """Return the progress of the newest usable checkpoint; `first` if there is none.

        Args:
            first: the start of the run.
        """
        if self._directory is None:
            raise UserError("resume=True needs the run's folder: pass directory=...")
        self._writer = Writer(self._directory, resume=True)
        checkpoint.tidy(self._directory)
        found = checkpoint.newest(self._directory, self._reader(first))
        if found is None:
            self._require_same_start()
            self._writer.cut(0)
            return self._write_header(first)
        progress, self.history = found
        self._writer.cut(progress.written)
        checkpoint.remove_after(self._directory, progress.round)
        self._saved_round = progress.round
        return progress

    def _require_same_start(self) -> None:
        """Raise unless a history without checkpoints is this run's own and may be overwritten."""
        try:
            started = History.parse(self._stored_history(), FILE)
        except UserError:
            return  # not even the header was written completely
        require_same(self.history.header, started.header)
        if (started.end or {}).get("status") in ("finished", "diverged"):
            raise UserError(
                f"The run in {self._directory} has ended and its checkpoints are missing: start "
                "again in another folder."
            )

    def _stored_history(self) -> bytes:
        """Return the history on disk; empty if there is none."""
        file = Path(self._directory or "") / FILE
        return file.read_bytes() if file.is_file() else b""

    def rewind(self, progress: Progress) -> None:
        """Remove the lines that were written after some progress."""
        for lines in self.history.lines.values():
            lines[:] = [line for line in lines if line["round"] <= progress.round]
        self._open.cut(progress.written)

    def add(self, kind: str, *lines: Json) -> int:
        """Append lines of one kind; return the new size of the history in bytes."""
        self.history.lines[kind] += map(dict, lines)
        self._open.write(kind, *lines)
        return self._open.position

    def save_when_due(self, progress: Progress) -> None:
        """Write a checkpoint if the last one is old enough."""
        if time.monotonic() - self._saved_at >= self._every:
            self.save(progress)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, unless this round has one already."""
        if self._directory is None or progress.round == self._saved_round:
            return
        self._open.sync()
        manifest = self._manifest(progress)
        checkpoint.save(self._directory, progress.round, progress.state, manifest)
        self._saved_at, self._saved_round = time.monotonic(), progress.round

    def end(self, end: Json) -> History:
        """Write the end line; return the history."""
        if self.history.warnings:
            end = {**end, "warnings": len(self.history.warnings)}
        self.history.end = end
        self._open.write("end", end)
        return self.history

    def close(self) -> None:
        """Close the history."""
        if self._writer is not None:
            self._writer.close()

    @property
    def _open(self) -> Writer:
        assert self._writer is not None, "call start or resume first"
        return self._writer

    def _manifest(self, at: Progress) -> Json:
        """Return all of a run's progress except its arrays, as JSON values."""
        by_step = {name: list(traffic) for name, traffic in at.ledger.by_step.items()}
        return {
            "header": self.history.header,
            "round": at.round,
            "key": self._key(),
            "ledger": {"total": list(at.ledger.total), "by_step": by_step},
            "refused": at.refused,
            "seconds": at.seconds,
            "cpu_seconds": at.cpu_seconds,
            "written": at.written,
            "memory": at.memory,
            "history": hashlib.sha256(self._stored_history()[: at.written]).hexdigest(),
        }

    def _key(self) -> list[int]:
        """Return the random key that all others of the run are derived from."""
        key = jax.random.key(self.history.header["seed"])
        return np.asarray(jax.random.key_data(key)).tolist()

    def _reader(self, first: Progress) -> Callable[[Checkpoint], tuple[Progress, History]]:
        """Return a function that turns a checkpoint into the progress and its history."""

        def read(found: Checkpoint) -> tuple[Progress, History]:
            manifest = found.manifest
            require_same(self.history.header, manifest["header"])
            if manifest["key"] != self._key():
                raise UserError(
                    "The run was started with another jax_default_prng_impl: set it to that value."
                )
            history = _prefix(self._stored_history(), manifest)
            total, by_step = manifest["ledger"]["total"], manifest["ledger"]["by_step"]
            ledger = Ledger(Traffic(*total), {name: Traffic(*t) for name, t in by_step.items()})
            spent = manifest["seconds"], manifest["cpu_seconds"]
            state = checkpoint.restore(found.arrays, first.state)
            numbers = manifest["refused"], *spent, manifest["written"], manifest.get("memory", {})
            return Progress(manifest["round"], state, ledger, *numbers), history

        return read


def _prefix(data: bytes, manifest: Json) -> History:
    """Return the part of a history that belongs to a checkpoint, after verifying its digest."""
    part = data[: manifest["written"]]
    if hashlib.sha256(part).hexdigest() != manifest["history"]:
        raise DamagedError(f"its part of {FILE} has changed")
    return History.parse(part, FILE)


def require_same(wanted: Json, found: Json) -> None:
    """Raise unless both headers describe the same run; warn if versions differ."""
    for key in ("algorithm", "rounds", "every", "seed", "config"):
        if wanted[key] != found.get(key):
            raise UserError(
                f"The run was started with different settings ({key}): resume it with the same "
                "ones, or choose another folder."
            )
    before = found.get("versions") or {}
    changed = [name for name, v in wanted["versions"].items() if before.get(name) != v]
    if changed:
        warnings.warn(
            f"The run was started with another version of {', '.join(changed)}: from here on, "
            "results may differ in the last digits.",
            stacklevel=2,
        )
