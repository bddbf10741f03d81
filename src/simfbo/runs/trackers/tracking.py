"""The trackers of a run: settings, metrics and files, also of resumed runs."""

import contextlib
import json
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from simfbo.errors import UserError, plain
from simfbo.runs.files import Json, write_atomic
from simfbo.runs.lines import flattened
from simfbo.runs.trackers._csv import CSV
from simfbo.runs.trackers._mlflow import MLflow
from simfbo.runs.trackers._tensorboard import TensorBoard
from simfbo.runs.trackers._tracker import Tracked, TrackedRun, Tracker
from simfbo.runs.trackers._wandb import WandB

STATE = "trackers.json"
_FACTORIES: dict[str, Callable[..., Tracker]] = {
    "csv": CSV,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
Track = str | Tracker | Sequence[str | Tracker]
"""One tracker or several: values, or strings in the notation of `tracking.tracker`."""


def tracker(given: str | Tracker) -> Tracker:
    """Create a tracker from a string such as `mlflow` or `mlflow:sqlite:///all.db`.

    Args:
        given: csv, tensorboard, mlflow or wandb; after a colon the folder of csv and tensorboard,
            the store of mlflow, the project of wandb. A tracker is returned unchanged.

    Example:
        >>> tracker("wandb:my-project")
        WandB(project='my-project', mode=None)
    """
    if not isinstance(given, str):
        if not hasattr(given, "begin"):
            raise UserError(f"A tracker is a text such as 'mlflow', or has `begin`: got {given!r}.")
        return given
    name, _, place = given.partition(":")
    if name not in _FACTORIES:
        raise UserError(f"Unknown tracker '{plain(name)}'. Use csv, tensorboard, mlflow or wandb.")
    return _FACTORIES[name](*filter(None, [place]))


def listed(track: Track | None) -> list[str | Tracker]:
    """Convert one tracker, several or None to a list."""
    if track is None:
        return []
    if isinstance(track, Sequence) and not isinstance(track, str):
        return list(track)
    return [track]


def used_before(directory: Path) -> list[str]:
    """Return the trackers of a run or study in a folder, as far as they were given as strings."""
    return _read(directory)["track"]


class Study(NamedTuple):
    """A study of several runs.

    Attributes:
        name: of the study.
        directory: its folder.
        ids: its identifiers in trackers.
    """

    name: str
    directory: Path
    ids: Mapping[str, str]


class Nested(NamedTuple):
    """The trackers of the runs of a study, which may run in other processes.

    Attributes:
        track: the trackers.
        study: of the runs.
    """

    track: Sequence[str | Tracker]
    study: Study


class Tracking:
    """The trackers of one run or study: one that fails is dropped with a warning.

    As a context manager it ends the tracked run on exit, so that files can be added after a run:

        with Tracking("mlflow", directory="runs/a") as tracking:
            history = run(..., directory="runs/a", track=tracking)
            tracking.artefact("runs/a/figure.png")
    """

    def __init__(
        self,
        track: Track | None,
        directory: str | Path | None = None,
        study: Study | None = None,
    ) -> None:
        """Create the trackers.

        Args:
            track: one tracker or several, as values or as strings.
            directory: the run's folder, where identifiers in trackers are stored.
            study: of the run.
        """
        self._given = listed(track)
        self._trackers = _keyed(map(tracker, self._given))
        self._directory = None if directory is None else Path(directory)
        self._study = study
        self._open: dict[str, Tracked] = {}
        self._last: dict[str, int] = {}
        self._status = "interrupted"

    def begin(
        self,
        name: str,
        config: Mapping[str, object],
        tags: Mapping[str, str],
        records: Sequence[Json] = (),
    ) -> None:
        """Start or resume the run in all trackers.

        Args:
            name: of the run or study.
            config: its settings.
            tags: for searches in the tracker.
            records: earlier ones of a resumed run, added to trackers that lack them.
        """
        if self._open:
            raise UserError("This Tracking has begun already: use another one for each run.")
        study, begun = self._study, self._begun()
        for key, tracker in self._trackers.items():
            id, last = begun.get(key, (None, -1))
            study_name, parent = study and study.name, study and study.ids.get(key)
            run = TrackedRun(name, config, tags, self._directory, study_name, parent, id, last)
            with self._guarded(key, UserError):
                self._open[key] = tracker.begin(run)
                self._last[key] = last
        self.save()
        for record in records:
            self.record(record)

    def begin_run(self, header: Json, records: Sequence[Json] = ()) -> None:
        """Start or resume a run with the header of its history."""
        if not self._trackers:
            return
        config = dict(flattened(header.get("config") or {})) or {
            key: header[key] for key in ("algorithm", "rounds", "every", "seed")
        }
        task = (header.get("config") or {}).get("task", {})
        tags = {
            "algorithm": header["algorithm"],
            **({"task": task["name"]} if isinstance(task, dict) and "name" in task else {}),
            "seed": str(header["seed"]),
            "simfbo": header["versions"]["simfbo"],
        }
        self.begin(self._name(header), config, tags, records)

    def _name(self, header: Json) -> str:
        """Name a run after its folder, relative to that of its study."""
        if self._directory is None:
            name = (header.get("config") or {}).get("estimator", header["algorithm"])
            return f"{name}-seed{header['seed']}"
        if self._study is not None and self._directory.is_relative_to(self._study.directory):
            return self._directory.relative_to(self._study.directory).as_posix()
        return self._directory.resolve().name

    @property
    def nested(self) -> Nested | None:
        """The trackers for the runs of this study; None if it is not tracked."""
        if not self._open or self._directory is None:
            return None
        ids = {key: tracked.id for key, tracked in self._open.items()}
        pairs = zip(self._given, self._trackers, strict=True)
        track = [tracker for tracker, key in pairs if key in ids]
        return Nested(track, Study(self._directory.resolve().name, self._directory, ids))

    def record(self, record: Json) -> None:
        """Add a record of the history to the trackers that lack it."""
        number = record["round"]
        values = {k: v for k, v in record.items() if k != "round" and isinstance(v, int | float)}
        for key, tracked in list(self._open.items()):
            if number > self._last[key]:
                with self._guarded(key):
                    tracked.record(number, values)
                    self._last[key] = number

    def artefact(self, *files: str | Path) -> None:
        """Add files to the trackers; missing files are skipped."""
        for file in filter(Path.is_file, map(Path, files)):
            for key, tracked in list(self._open.items()):
                with self._guarded(key):
                    tracked.artefact(file)

    def finish(self, status: str) -> None:
        """Set the status of the run, which the trackers receive on exit from the context."""
        self._status = status

    def save(self) -> None:
        """Store the last record of each tracker, as `run` does with every checkpoint."""
        if self._directory is None or not self._open:
            return
        begun = {key: (tracked.id, self._last[key]) for key, tracked in self._open.items()}
        track = [tracker for tracker in self._given if isinstance(tracker, str)]
        state = {"track": track, "begun": self._begun() | begun}
        with contextlib.suppress(OSError):  # the run itself reports a full disk
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomic(self._directory / STATE, json.dumps(state, indent=1))

    def _begun(self) -> dict[str, tuple[str, int]]:
        """Return the stored identifier and last round of each tracker."""
        return {} if self._directory is None else _read(self._directory)["begun"]

    @contextlib.contextmanager
    def _guarded(self, key: str, *allowed: type[Exception]) -> Generator[None]:
        """Drop a tracker that raises, with a warning; `allowed` errors are propagated."""
        try:
            yield
        except allowed:
            raise
        except Exception as error:  # trackers raise arbitrary errors
            self._open.pop(key, None)
            text = plain(" ".join(str(error).split()), 200)
            warnings.warn(
                f"The tracker {self._trackers[key].name} failed and is not used any more "
                f"({type(error).__name__}: {text}); the run goes on.",
                stacklevel=4,
            )

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failed = kind is not None and not issubclass(kind, KeyboardInterrupt)
        self.save()
        for key, tracked in list(self._open.items()):
            with self._guarded(key):
                tracked.end("failed" if failed else self._status)
        self._open.clear()


def _read(directory: Path) -> Json:
    """Read the stored state of a run's trackers; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        state = json.loads((directory / STATE).read_text())
        begun = {key: (str(id), int(last)) for key, (id, last) in state["begun"].items()}
        return {"track": [str(text) for text in state["track"]], "begun": begun}
    return {"track": [], "begun": {}}


def _keyed(trackers: Iterable[Tracker]) -> dict[str, Tracker]:
    """Return trackers by unique keys that are equal in every process."""
    keyed: dict[str, Tracker] = {}
    for tracker in trackers:
        settings = repr(tracker) if is_dataclass(tracker) else ""
        key = f"{tracker.name}-{zlib.crc32(settings.encode()):08x}"
        while key in keyed:
            key += "+"
        keyed[key] = tracker
    return keyed
