"""What a tracker is: where the numbers of runs go besides their own folders."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from simfbo.errors import MissingExtra, missing
from simfbo.runs.files import as_folder_name, make_folder


class TrackedRun(NamedTuple):
    """What a tracker is given at the start of a run.

    Attributes:
        name: of the run.
        config: its settings by dotted key: numbers, texts, truth values or None.
        tags: algorithm, task, seed and version.
        directory: the run's folder; None if it has none.
        study: the name of the study that this run belongs to; None without one.
        parent: the identifier that `begin` gave to that study.
        id: the identifier that `begin` gave to this run when it was started; None if it is new.
        last: the last round whose record it has; -1 if it has none.
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
    """A run in a tracker, from its beginning to its end."""

    @property
    def id(self) -> str:
        """Return the identifier by which the tracker finds the run again."""
        ...

    def record(self, round: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one evaluation, by name."""
        ...

    def artefact(self, file: Path) -> None:
        """Take a file that belongs to the run."""
        ...

    def end(self, status: str) -> None:
        """End the run as finished, interrupted, diverged, starved or failed."""
        ...


class Tracker(Protocol):
    """Where numbers go: `begin` is called once for every run and for every study of many runs.

    Trackers are plain values that can be copied and sent to other processes.
    """

    @property
    def name(self) -> str:
        """Return what messages call it."""
        ...

    def begin(self, run: TrackedRun) -> Tracked:
        """Begin a run, or go on with one whose `id` is given."""
        ...


def first_free(folder: Path, names: Iterable[str | None], make: Callable[[Path], object]) -> Path:
    """Make a file or folder that is not there yet, named after a run or, if need be, numbered.

    Args:
        folder: in which to make it.
        names: of study and run, which may be anything; all but the last become folders.
        make: what makes it; raises FileExistsError if it is there.
    """
    *parents, name = (as_folder_name(one) for one in names if one)
    make_folder(folder.joinpath(*parents))
    for number in itertools.count(1):
        place = folder.joinpath(*parents, name if number == 1 else f"{name}-{number}").resolve()
        with contextlib.suppress(FileExistsError):
            make(place)
            return place
    raise AssertionError  # numbers do not end


def require_installed(package: str, extra: str) -> None:
    """Raise unless a package is installed; it is not imported."""
    if find_spec(package) is None:
        raise MissingExtra(missing(package, extra))
