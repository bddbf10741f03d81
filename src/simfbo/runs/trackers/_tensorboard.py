"""TensorBoard: event files, with settings under HPARAMS and figures under IMAGES."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simfbo.errors import require
from simfbo.runs.history import BOOKKEEPING
from simfbo.runs.trackers._tracker import TrackedRun, first_free, require_installed


@dataclass(frozen=True)
class TensorBoard:
    """One folder of event files per run.

    `tensorboard --logdir FOLDER` shows all runs below a folder, by the names of their own.

    Attributes:
        folder: for folders named after the runs; by default each run's own folder, or
            runs/tensorboard for runs without one.
    """

    folder: str | None = None
    name = "tensorboard"

    def __post_init__(self) -> None:
        """Refuse to track with a package that is not there, before a run begins."""
        require_installed("tensorboardX", "tensorboard")

    def begin(self, run: TrackedRun) -> "_Events":
        """Open a writer, in the folder of an earlier start if there was one."""
        package = require("tensorboardX", "tensorboard")
        if run.id is not None:
            return _Events(package, run.id, (run.directory or Path()) / run.id, run)
        if self.folder is None and run.directory is not None:
            return _Events(package, ".", run.directory, run)
        folder = Path("runs", "tensorboard") if self.folder is None else Path(self.folder)
        place = first_free(folder, (run.study, run.name), Path.mkdir)
        return _Events(package, str(place), place, run)


class _Events:
    """The event files of one run.

    They are written at once. tensorboardX's `SummaryWriter` writes in another thread, and its
    `flush` does not wait for that thread's queue, which is lost when the process is killed.
    """

    def __init__(self, package: Any, name: str, folder: Path, run: TrackedRun) -> None:
        self.id = name
        self._summary, self._proto = package.summary, package.proto.event_pb2
        suffix = f".{time.time_ns()}"  # two starts within a second must not share a file
        folder.mkdir(parents=True, exist_ok=True)
        writer = package.event_file_writer.EventsWriter
        self._writer = writer(str(folder / "events"), suffix)
        self._config, self._seen = run.config, False
        if run.id is not None:  # drops what an earlier start wrote about later rounds
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(run.last + 1, session_log=start)
        text = "".join(f"    {key}: {value}\n" for key, value in {**run.tags, **run.config}.items())
        self._add(summary=self._summary.text("settings", text))

    def _add(self, step: int = 0, **content: Any) -> None:
        """Write an event."""
        event = self._proto.Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Write scalars; the first time also the settings, as hyperparameters of these metrics."""
        tagged = {_tag(name): value for name, value in values.items()}
        if not self._seen:
            self._seen = True
            self._describe(tagged)
        for tag, value in tagged.items():
            self._add(round, summary=self._summary.scalar(tag, value))
        self._writer.flush()

    def _describe(self, values: Mapping[str, float]) -> None:
        """Write the settings as hyperparameters."""
        known = {key: _plain(value) for key, value in self._config.items() if value is not None}
        metrics = {tag: value for tag, value in values.items() if tag.startswith("metrics/")}
        for summary in self._summary.hparams(known, metrics):
            self._add(summary=summary)

    def artefact(self, file: Path) -> None:
        """Show a picture or a text; other files stay where they are."""
        if file.suffix == ".png":
            from matplotlib.image import imread

            picture = imread(file)[..., :3]
            self._add(summary=self._summary.image(file.stem, picture, dataformats="HWC"))
        elif file.suffix in (".md", ".txt", ".toml"):
            self._add(summary=self._summary.text(file.name, file.read_text()))
        self._writer.flush()

    def end(self, status: str) -> None:
        """Close the files."""
        self._add(summary=self._summary.text("status", status))
        self._writer.close()


def _tag(name: str) -> str:
    """Return a name in the section of metrics, or in that of what they cost."""
    return f"{'resources' if name in BOOKKEEPING else 'metrics'}/{name}"


def _plain(value: object) -> bool | float | str:
    """Return a setting as TensorBoard takes it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return str(value)
