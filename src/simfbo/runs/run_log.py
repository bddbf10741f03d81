"""The log of a run: its history and checkpoints on disk, and how they are resumed."""

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.core.ledger import Ledger, Traffic
from simfbo.core.problem import PyTree
from simfbo.errors import UserError
from simfbo.runs import checkpoint
from simfbo.runs.checkpoint import Checkpoint, DamagedError
from simfbo.runs.files import Json, write_atomic
from simfbo.runs.history import FILE, History, Writer
from simfbo.runs.inputs import require_same
from simfbo.runs.lines import plain
from simfbo.runs.repair import Repaired, repair
from simfbo.runs.trackers import Tracking


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
        sizes: the norms of x, y and v at the start or after the first round, at least 1.
        residuals: what was seen of them (`simfbo.runs.verdict`).
        observed: what the federation knows of earlier exchanges, as JSON values.
        client_memory: what the clients remember; None if nothing.
    """

    round: int
    state: PyTree
    ledger: Ledger
    refused: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    written: int = 0
    sizes: Sequence[float] = ()
    residuals: Mapping[str, Any] = MappingProxyType({})
    observed: Mapping[str, Any] = MappingProxyType({})
    client_memory: PyTree = None

    @property
    def arrays(self) -> PyTree:
        """Return all arrays of it, as they are stored."""
        return self.state if self.client_memory is None else (self.state, self.client_memory)


class RunLog:
    """Writes the history and the checkpoints of a run; without a directory nothing is written.

    A checkpoint holds the size of the history at that moment, and that much of it is on the disk
    before the checkpoint is. Resuming cuts off what was written later; it is written again.
    """

    def __init__(
        self, directory: Path | None, header: Json, every: float, tracking: Tracking
    ) -> None:
        """Take a folder, the history's header, the seconds between checkpoints, and trackers."""
        self.history = History(plain(header))
        self._directory, self._every, self._tracking = directory, every, tracking
        self._writer: Writer | None = None
        self._saved_at, self.saved_round = time.monotonic(), -1

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
        # A checkpoint whose history is whole comes first: then nothing is lost.
        reads = self._reader(first, _prefix), self._reader(first, repair)
        found = checkpoint.newest(self._directory, *reads)
        if found is None:
            self._require_same_start()
            self._writer.cut(0)
            return self._write_header(first)
        progress, part = found
        self.history = History.parse(part.data, FILE)
        checkpoint.remove_after(self._directory, progress.round)
        if part.lost is None:
            self._writer.cut(progress.written)
            self.saved_round = progress.round
            return progress
        return self._repair(progress._replace(written=len(part.data)), part)

    def _repair(self, progress: Progress, part: Repaired) -> Progress:
        """Replace a damaged history, and the checkpoint, which knows its digest."""
        folder, damaged = Path(self._directory or ""), self._stored_history()
        if damaged:
            write_atomic(folder / f"{FILE}.damaged", damaged)
        self._open.replace(part.data)
        self.save(progress)
        kept = f"; the damaged file is kept as {FILE}.damaged" if damaged else ""
        warnings.warn(
            f"{folder / FILE} was damaged: {part.lost}. The run continues from iteration "
            f"{progress.round}{kept}.",
            stacklevel=2,
        )
        return progress

    def _require_same_start(self) -> None:
        """Raise unless a history without checkpoints is this run's own and may be overwritten."""
        stored = self._stored_history()
        if b"\n" not in stored:
            return  # not even the header was written completely
        try:
            started = History.parse(stored, FILE)
        except UserError:
            raise UserError(
                f"{FILE} in {self._directory} is damaged and there is no checkpoint: start again "
                "in another folder."
            ) from None
        require_same(self.history.header, started.header, self._directory)
        if (started.end or {}).get("status") in ("finished", "diverged"):
            raise UserError(
                f"The run in {self._directory} has ended and its checkpoints are missing: start "
                "again in another folder."
            )

    def _stored_history(self) -> bytes:
        """Return the history on disk; empty if there is none."""
        file = Path(self._directory or "") / FILE
        return file.read_bytes() if file.is_file() else b""

    def keep(self, progress: Progress) -> None:
        """Remove the lines that were written after some progress, and write its checkpoint."""
        for lines in self.history.lines.values():
            lines[:] = [line for line in lines if line["round"] <= progress.round]
        self._open.cut(progress.written)
        self.save(progress)

    def begin_tracking(self) -> None:
        """Begin in the trackers, which may take long."""
        self._tracking.begin_run(self.history.header, self.history.records)

    def add(self, kind: str, *lines: Json, track: bool = True) -> int:
        """Append lines of one kind; return the new size of the history in bytes.

        Args:
            kind: of the lines.
            lines: to append.
            track: whether trackers get them; not if they are cut off when the run is resumed.
        """
        self.history.lines[kind] += map(dict, lines)
        self._open.write(kind, *lines)
        for line in lines if track and kind == "record" else ():
            self._tracking.record(line)
        return self._open.position

    def save_when_due(self, progress: Progress) -> None:
        """Write a checkpoint if the last one is old enough."""
        if time.monotonic() - self._saved_at >= self._every:
            self.save(progress)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, unless this round has one already."""
        if self._directory is None or progress.round == self.saved_round:
            return
        self._open.sync()
        manifest = self._manifest(progress)
        checkpoint.save(self._directory, progress.round, progress.arrays, manifest)
        self._tracking.save()
        self._saved_at, self.saved_round = time.monotonic(), progress.round

    def end(self, end: Json, verdict: Json | None = None) -> History:
        """Write the verdict, if there is one, and the end line; return the history."""
        if verdict is not None:
            self.history.verdict = verdict
            self._open.write("verdict", verdict)
        if self.history.warnings:
            end = {**end, "warnings": len(self.history.warnings)}
        self.history.end = end
        self._open.write("end", end)
        self._tracking.finish(end["status"])
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
            "ledger": {
                "total": list(at.ledger.total),
                "by_step": by_step,
                "by_channel": at.ledger.by_channel,
            },
            "refused": at.refused,
            "seconds": at.seconds,
            "cpu_seconds": at.cpu_seconds,
            "written": at.written,
            "sizes": list(at.sizes),
            "residuals": dict(at.residuals),
            "observed": dict(at.observed),
            "history": hashlib.sha256(self._stored_history()[: at.written]).hexdigest(),
        }

    def _key(self) -> list[int]:
        """Return the random key that all others of the run are derived from."""
        key = jax.random.key(self.history.header["seed"])
        return np.asarray(jax.random.key_data(key)).tolist()

    def _reader(
        self, first: Progress, history: Callable[[bytes, Json], Repaired]
    ) -> Callable[[Checkpoint], tuple[Progress, Repaired]]:
        """Return a function that turns a checkpoint into the progress and its history."""

        def read(found: Checkpoint) -> tuple[Progress, Repaired]:
            manifest = found.manifest
            require_same(self.history.header, manifest["header"], self._directory)
            if manifest["key"] != self._key():
                raise UserError(
                    "The run was started with another jax_default_prng_impl: set it to that value."
                )
            part = history(self._stored_history(), manifest)
            sent = manifest["ledger"]
            by_step = {name: Traffic(*t) for name, t in sent["by_step"].items()}
            ledger = Ledger(Traffic(*sent["total"]), by_step, dict(sent.get("by_channel", {})))
            spent = manifest["seconds"], manifest["cpu_seconds"]
            arrays = checkpoint.restore(found.arrays, first.arrays)
            state, kept = (arrays, None) if first.client_memory is None else arrays
            numbers = manifest["refused"], *spent, manifest["written"]
            numbers += manifest["sizes"], manifest["residuals"], manifest["observed"]
            return Progress(manifest["round"], state, ledger, *numbers, kept), part

        return read


def _prefix(data: bytes, manifest: Json) -> Repaired:
    """Return the part of a history that belongs to a checkpoint, after verifying its digest."""
    part = data[: manifest["written"]]
    if hashlib.sha256(part).hexdigest() != manifest["history"]:
        raise DamagedError(f"its part of {FILE} has changed")
    return Repaired(part)
