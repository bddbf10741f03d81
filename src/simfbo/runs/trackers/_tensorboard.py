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
    """The event files of one run."""

    def __init__(self, package: Any, name: str, folder: Path, run: TrackedRun) -> None:
        self.id = name
        purge = None if run.id is None else run.last + 1
        suffix = f".{time.time_ns()}"  # two starts within a second must not share a file
        self._writer = package.SummaryWriter(str(folder), purge_step=purge, filename_suffix=suffix)
        self._summaries, self._config, self._seen = package.summary, run.config, False
        text = "".join(f"    {key}: {value}\n" for key, value in {**run.tags, **run.config}.items())
        self._writer.add_text("settings", text)

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Write scalars; the first time also the settings, as hyperparameters of these metrics."""
        tagged = {_tag(name): value for name, value in values.items()}
        if not self._seen:
            self._seen = True
            self._describe(tagged)
        for tag, value in tagged.items():
            self._writer.add_scalar(tag, value, round)
        self._writer.flush()

    def _describe(self, values: Mapping[str, float]) -> None:
        """Write the settings as hyperparameters."""
        known = {key: _plain(value) for key, value in self._config.items() if value is not None}
        metrics = {tag: value for tag, value in values.items() if tag.startswith("metrics/")}
        for summary in self._summaries.hparams(known, metrics):
            self._writer.file_writer.add_summary(summary)

    def artefact(self, file: Path) -> None:
        """Show a picture or a text; other files stay where they are."""
        if file.suffix == ".png":
            from matplotlib.image import imread

            picture = imread(file)[..., :3]
            self._writer.add_image(file.stem, picture, dataformats="HWC")
        elif file.suffix in (".md", ".txt", ".toml"):
            self._writer.add_text(file.name, file.read_text())
        self._writer.flush()

    def end(self, status: str) -> None:
        """Close the files."""
        self._writer.add_text("status", status)
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
