"""How a run feeds its trackers: from the settings to the last file, also when it is resumed."""

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
_KNOWN: dict[str, Callable[..., Tracker]] = {
    "csv": CSV,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
Track = str | Tracker | Sequence[str | Tracker]
"""A tracker or several: values, or texts as `tracking.tracker` reads them."""


def tracker(given: str | Tracker) -> Tracker:
    """Return the tracker that a text names, as `mlflow` or `mlflow:sqlite:///all.db`.

    Args:
        given: csv, tensorboard, mlflow or wandb; after a colon the folder of csv and tensorboard,
            the store of mlflow, the project of wandb. A tracker is returned as it is.

    Example:
        >>> tracker("wandb:my-project")
        WandB(project='my-project', mode=None)
    """
    if not isinstance(given, str):
        if not hasattr(given, "begin"):
            raise UserError(f"A tracker is a text such as 'mlflow', or has `begin`: got {given!r}.")
        return given
    name, _, place = given.partition(":")
    if name not in _KNOWN:
        raise UserError(f"Unknown tracker '{plain(name)}'. Use csv, tensorboard, mlflow or wandb.")
    return _KNOWN[name](*filter(None, [place]))


def listed(track: Track | None) -> list[str | Tracker]:
    """Return the trackers that are given one by one, as a list, or not at all."""
    if track is None:
        return []
    if isinstance(track, Sequence) and not isinstance(track, str):
        return list(track)
    return [track]


def used_before(directory: Path) -> list[str]:
    """Return the texts that named the trackers of a run or study in a folder."""
    return _read(directory)["track"]


class Study(NamedTuple):
    """The study that runs belong to.

    Attributes:
        name: of the study.
        directory: its folder.
        ids: its identifiers in trackers.
    """

    name: str
    directory: Path
    ids: Mapping[str, str]


class Nested(NamedTuple):
    """How the runs of a study are tracked, in whatever process they run.

    Attributes:
        track: the trackers.
        study: to which the runs belong.
    """

    track: Sequence[str | Tracker]
    study: Study


class Tracking:
    """The trackers of one run or study: one that fails is dropped with a warning.

    As a context it ends what is tracked when it is left, so that files can be added after a run:

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
        """Take trackers, and where to remember which run is which of theirs.

        Args:
            track: a tracker or several, as values or as texts.
            directory: the run's folder.
            study: the study it belongs to.
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
        """Begin in all trackers, or go on where they were.

        Args:
            name: of the run or study.
            config: its settings.
            tags: what it can be found by.
            records: those it has already; trackers that lack some are given them.
        """
        if self._open:
            raise UserError("This Tracking has begun already: use another one for each run.")
        study, begun = self._study, self._begun()
        for key, one in self._trackers.items():
            known, last = begun.get(key, (None, -1))
            parent = study and study.ids.get(key)
            place = self._directory, study and study.name, parent
            with self._guarded(key, UserError):
                self._open[key] = one.begin(TrackedRun(name, config, tags, *place, known, last))
                self._last[key] = last
        self.save()
        for record in records:
            self.record(record)

    def begin_run(self, header: Json, records: Sequence[Json] = ()) -> None:
        """Begin a run with the header of its history."""
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
        """Return what a run is called: its folder, seen from its study's."""
        if self._directory is None:
            name = (header.get("config") or {}).get("estimator", header["algorithm"])
            return f"{name}-seed{header['seed']}"
        if self._study is not None and self._directory.is_relative_to(self._study.directory):
            return self._directory.relative_to(self._study.directory).as_posix()
        return self._directory.resolve().name

    @property
    def nested(self) -> Nested | None:
        """Return how the runs of this study are tracked; None if they are not."""
        if not self._open or self._directory is None:
            return None
        ids = {key: one.id for key, one in self._open.items()}
        given = [one for one, key in zip(self._given, self._trackers, strict=True) if key in ids]
        return Nested(given, Study(self._directory.resolve().name, self._directory, ids))

    def record(self, record: Json) -> None:
        """Give a record of the history to the trackers that do not have it yet."""
        number = record["round"]
        values = {k: v for k, v in record.items() if k != "round" and isinstance(v, int | float)}
        for key, one in list(self._open.items()):
            if number > self._last[key]:
                with self._guarded(key):
                    one.record(number, values)
                    self._last[key] = number

    def artefact(self, *files: str | Path) -> None:
        """Give files to the trackers; those that do not exist are passed over."""
        for file in filter(Path.is_file, map(Path, files)):
            for key, one in list(self._open.items()):
                with self._guarded(key):
                    one.artefact(file)

    def finish(self, status: str) -> None:
        """Say how the run ended; the trackers are told when the context is left."""
        self._status = status

    def save(self) -> None:
        """Write down which records the trackers have, as `run` does with every checkpoint."""
        if self._directory is None or not self._open:
            return
        begun = {key: (one.id, self._last[key]) for key, one in self._open.items()}
        texts = [one for one in self._given if isinstance(one, str)]
        state = {"track": texts, "begun": self._begun() | begun}
        with contextlib.suppress(OSError):  # a full disk is the run's own to report
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomic(self._directory / STATE, json.dumps(state, indent=1))

    def _begun(self) -> dict[str, tuple[str, int]]:
        """Return identifier and last round of earlier starts, by tracker."""
        return {} if self._directory is None else _read(self._directory)["begun"]

    @contextlib.contextmanager
    def _guarded(self, key: str, *allowed: type[Exception]) -> Generator[None]:
        """Drop a tracker that raises, with a warning, unless the user can put it right."""
        try:
            yield
        except allowed:
            raise
        except Exception as error:  # a tracker can raise anything
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
        for key, one in list(self._open.items()):
            with self._guarded(key):
                one.end("failed" if failed else self._status)
        self._open.clear()


def _read(directory: Path) -> Json:
    """Return what was written down of the trackers of a run; nothing if that is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads((directory / STATE).read_text())
        begun = {key: (str(name), int(last)) for key, (name, last) in found["begun"].items()}
        return {"track": [str(one) for one in found["track"]], "begun": begun}
    return {"track": [], "begun": {}}


def _keyed(trackers: Iterable[Tracker]) -> dict[str, Tracker]:
    """Return trackers by names that tell them apart, also in another process."""
    found: dict[str, Tracker] = {}
    for one in trackers:
        settings = repr(one) if is_dataclass(one) else ""
        key = f"{one.name}-{zlib.crc32(settings.encode()):08x}"
        while key in found:
            key += "+"
        found[key] = one
    return found
