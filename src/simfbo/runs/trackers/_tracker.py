"""The protocols of trackers, which store the metrics of runs outside their folders."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from simfbo.errors import MissingExtra, missing
from simfbo.runs.files import as_folder_name, make_folder


class TrackedRun(NamedTuple):
    """The description of a run that is passed to `Tracker.begin`.

    Attributes:
        name: of the run.
        config: its settings by dotted key: numbers, strings, booleans or None.
        tags: algorithm, task, seed and version.
        directory: the run's folder, if any.
        study: the name of the run's study, if any.
        parent: the identifier of that study in the tracker.
        id: the identifier of a resumed run in the tracker; None for a new run.
        last: the round of the last record in the tracker; -1 if there is none.
    """

    name: str
    config: Mapping[str, object]
    tags: Mapping[str, str]
    directory: Path | None = None
    study: str | None = None
    parent: str | None = None
    id: str | None = None
    last: int = -1


class Tracked(Protocol):
    """A run that is recorded by a tracker."""

    @property
    def id(self) -> str:
        """The identifier by which `Tracker.begin` resumes the run."""
        ...

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation."""
        ...

    def artefact(self, file: Path) -> None:
        """Add a file."""
        ...

    def end(self, status: str) -> None:
        """End the run as finished, interrupted, diverged, starved or failed."""
        ...


class Tracker(Protocol):
    """A store of metrics: `begin` is called once for every run and for every study of many runs.

    Trackers are plain values that can be copied and sent to other processes.
    """

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    def begin(self, run: TrackedRun) -> Tracked:
        """Start a run, or resume the one with `run.id`."""
        ...


def first_free(folder: Path, names: Iterable[str | None], make: Callable[[Path], object]) -> Path:
    """Create a new file or folder named after a run, with a number if the name is in use.

    Args:
        folder: the parent folder.
        names: arbitrary names of study and run; all but the last become folders.
        make: creates the file or folder; raises FileExistsError if it exists.
    """
    *parents, last = (as_folder_name(name) for name in names if name)
    make_folder(folder.joinpath(*parents))
    for number in itertools.count(1):
        path = folder.joinpath(*parents, last if number == 1 else f"{last}-{number}").resolve()
        with contextlib.suppress(FileExistsError):
            make(path)
            return path
    raise AssertionError  # unreachable


def require_installed(package: str, extra: str) -> None:
    """Raise unless a package is installed, without importing it."""
    if find_spec(package) is None:
        raise MissingExtra(missing(package, extra))
