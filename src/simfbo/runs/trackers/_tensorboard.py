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

    `tensorboard --logdir FOLDER` shows all runs below a folder, by the names of their folders.

    Attributes:
        folder: of folders named after the runs; by default each run's folder, or runs/tensorboard
            for runs without one.
    """

    folder: str | None = None
    name = "tensorboard"

    def __post_init__(self) -> None:
        """Reject a missing package before a run starts."""
        require_installed("tensorboardX", "tensorboard")

    def begin(self, run: TrackedRun) -> "_Events":
        """Open a writer, for a resumed run in its previous folder."""
        package = require("tensorboardX", "tensorboard")
        if run.id is not None:
            return _Events(package, run.id, (run.directory or Path()) / run.id, run)
        if self.folder is None and run.directory is not None:
            return _Events(package, ".", run.directory, run)
        folder = Path("runs", "tensorboard") if self.folder is None else Path(self.folder)
        path = first_free(folder, (run.study, run.name), Path.mkdir)
        return _Events(package, str(path), path, run)


class _Events:
    """The event files of one run, written synchronously.

    tensorboardX's `SummaryWriter` writes in another thread, and its `flush` does not wait for that
    thread's queue, which is lost when the process is killed.
    """

    def __init__(self, package: Any, name: str, folder: Path, run: TrackedRun) -> None:
        self.id = name
        self._summary, self._proto = package.summary, package.proto.event_pb2
        suffix = f".{time.time_ns()}"  # unique, even if a run is resumed within a second
        folder.mkdir(parents=True, exist_ok=True)
        writer = package.event_file_writer.EventsWriter
        self._writer = writer(str(folder / "events"), suffix)
        self._config, self._has_settings = run.config, False
        if run.id is not None:  # drops events of later rounds
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(run.last + 1, session_log=start)
        text = "".join(f"    {key}: {value}\n" for key, value in {**run.tags, **run.config}.items())
        self._add(summary=self._summary.text("settings", text))

    def _add(self, step: int = 0, **content: Any) -> None:
        event = self._proto.Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Write scalars; the first time also the settings, as hyperparameters of these metrics."""
        scalars = {_tag(name): value for name, value in values.items()}
        if not self._has_settings:
            self._has_settings = True
            settings = {k: _plain(value) for k, value in self._config.items() if value is not None}
            metrics = {tag: value for tag, value in scalars.items() if tag.startswith("metrics/")}
            for summary in self._summary.hparams(settings, metrics):
                self._add(summary=summary)
        for tag, value in scalars.items():
            self._add(round, summary=self._summary.scalar(tag, value))
        self._writer.flush()

    def artefact(self, file: Path) -> None:
        """Add an image or a text; ignore other files."""
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
    """Prefix a name with its section: metrics or resources."""
    return f"{'resources' if name in BOOKKEEPING else 'metrics'}/{name}"


def _plain(value: object) -> bool | float | str:
    """Convert a setting to a type that TensorBoard accepts."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return str(value)
