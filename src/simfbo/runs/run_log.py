"""The journal of a run: its history and checkpoints on disk, and the way back from them."""

import hashlib
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.core.federation import Ledger, Traffic
from simfbo.errors import UserError
from simfbo.runs import checkpoint
from simfbo.runs.checkpoint import Checkpoint, DamagedError
from simfbo.runs.history import FILE, History, Writer, plain


class Progress(NamedTuple):
    """Where a run is: with what it was given, everything it needs to go on.

    Attributes:
        round: iterations done.
        state: the algorithm's.
        ledger: what was sent until then.
        refused: how many replies did not count until then.
        seconds: spent, wall-clock.
        cpu_seconds: spent by all threads.
        written: bytes of the history that belong to it.
    """

    round: int
    state: Any
    ledger: Ledger
    refused: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    written: int = 0


class Journal:
    """Writes a run down; without a directory nothing is written.

    A checkpoint counts the bytes of the history that belong to it, and they are on the disk before
    it is: what comes later is cut off when the run is resumed, and written again.
    """

    def __init__(self, directory: Path | None, header: dict[str, Any], every: float) -> None:
        """Take a folder, the history's header and the seconds between checkpoints."""
        self.history = History(plain(header))
        self._directory, self._every = directory, every
        self._writer: Writer | None = None
        self._saved_at, self._saved_round = time.monotonic(), -1

    def begin(self, first: Progress) -> Progress:
        """Return the beginning of the run, with a new history begun."""
        self._writer = Writer(self._directory)
        return self._write_header(first)

    def _write_header(self, first: Progress) -> Progress:
        self._open.write("header", self.history.header)
        return first._replace(written=self._open.position)

    def resume(self, first: Progress) -> Progress:
        """Return where the run was when it was last written down; `first`, where it never was.

        Args:
            first: the beginning of the run.
        """
        if self._directory is None:
            raise UserError("A run without a folder cannot be resumed: give its directory.")
        self._writer = Writer(self._directory, resume=True)
        checkpoint.tidy(self._directory)
        found = checkpoint.newest(self._directory, self._read(first))
        if found is None:
            self._require_own_beginning()
            self._writer.cut(0)
            return self._write_header(first)
        progress, self.history = found
        self._writer.cut(progress.written)
        checkpoint.forget_after(self._directory, progress.round)
        self._saved_round = progress.round
        return progress

    def _require_own_beginning(self) -> None:
        """Raise if a history without checkpoints is not one that this run began and may redo."""
        try:
            begun = History.parse(self._book(), FILE)
        except UserError:
            return  # not even the header was written whole
        require_same(self.history.header, begun.header)
        if (begun.end or {}).get("status") in ("finished", "diverged"):
            raise UserError(
                f"The run in {self._directory} has ended and its checkpoints are gone: run anew "
                "into another folder."
            )

    def _book(self) -> bytes:
        """Return the history as it is on the disk."""
        file = Path(self._directory or "") / FILE
        return file.read_bytes() if file.is_file() else b""

    def rewind(self, progress: Progress) -> None:
        """Take back the lines that were written after some progress."""
        for book in (self.history.records, self.history.refusals):
            book[:] = [line for line in book if line["round"] <= progress.round]
        self._open.cut(progress.written)

    def add(self, kind: str, *lines: Mapping[str, Any]) -> int:
        """Return the bytes of the history after adding lines of one kind to it."""
        book = self.history.records if kind == "record" else self.history.refusals
        book += map(dict, lines)
        self._open.write(kind, *lines)
        return self._open.position

    def save_when_due(self, progress: Progress) -> None:
        """Save a checkpoint if the last one is old enough."""
        if time.monotonic() - self._saved_at >= self._every:
            self.save(progress)

    def save(self, progress: Progress) -> None:
        """Save a checkpoint, unless it is there already."""
        if self._directory is None or progress.round == self._saved_round:
            return
        self._open.sync()
        manifest = self._manifest(progress)
        checkpoint.save(self._directory, progress.round, progress.state, manifest)
        self._saved_at, self._saved_round = time.monotonic(), progress.round

    def end(self, end: dict[str, Any]) -> History:
        """Return the history, with a last line that says how the run ended."""
        self.history.end = end
        self._open.write("end", end)
        return self.history

    def close(self) -> None:
        """Close the history."""
        if self._writer is not None:
            self._writer.close()

    @property
    def _open(self) -> Writer:
        assert self._writer is not None, "begin or resume first"
        return self._writer

    def _manifest(self, at: Progress) -> dict[str, Any]:
        """Return all of a run's progress but its arrays, as JSON values."""
        by_work = {name: list(traffic) for name, traffic in at.ledger.by_work.items()}
        return {
            "header": self.history.header,
            "round": at.round,
            "key": self._key(),
            "ledger": {"total": list(at.ledger.total), "by_work": by_work},
            "refused": at.refused,
            "seconds": at.seconds,
            "cpu_seconds": at.cpu_seconds,
            "written": at.written,
            "history": hashlib.sha256(self._book()[: at.written]).hexdigest(),
        }

    def _key(self) -> list[int]:
        """Return the random key that all others of the run come from."""
        key = jax.random.key(self.history.header["seed"])
        return np.asarray(jax.random.key_data(key)).tolist()

    def _read(self, first: Progress) -> Any:
        """Return the reader of a checkpoint: into progress, and the history that belongs to it."""

        def read(found: Checkpoint) -> tuple[Progress, History]:
            manifest = found.manifest
            require_same(self.history.header, manifest["header"])
            if manifest["key"] != self._key():
                raise UserError("The run was begun with another jax_default_prng_impl: set that.")
            history = _prefix(self._book(), manifest)
            total, by_work = manifest["ledger"]["total"], manifest["ledger"]["by_work"]
            ledger = Ledger(Traffic(*total), {name: Traffic(*t) for name, t in by_work.items()})
            spent = manifest["seconds"], manifest["cpu_seconds"]
            state = checkpoint.restore(found.arrays, first.state)
            numbers = manifest["refused"], *spent, manifest["written"]
            return Progress(manifest["round"], state, ledger, *numbers), history

        return read


def _prefix(data: bytes, manifest: Mapping[str, Any]) -> History:
    """Return the part of a history that a checkpoint counts on, after a check of its digest."""
    part = data[: manifest["written"]]
    if hashlib.sha256(part).hexdigest() != manifest["history"]:
        raise DamagedError(f"the part of {FILE} that belongs to it has changed")
    return History.parse(part, FILE)


def require_same(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise unless both headers describe one run; warn where versions differ."""
    for key in ("algorithm", "rounds", "every", "seed", "config"):
        if wanted[key] != found.get(key):
            raise UserError(
                f"The run was begun with other settings ({key}): resume it with those, or choose "
                "another folder."
            )
    before = found.get("versions") or {}
    changed = [name for name, v in wanted["versions"].items() if before.get(name) != v]
    if changed:
        warnings.warn(
            f"The run was begun with another version of {', '.join(changed)}, so what follows may "
            "differ in the last digits from what it would have been.",
            stacklevel=2,
        )
