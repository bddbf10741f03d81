"""The catalogue: one record per method and per task, from which all lists are derived.

A record names its factory, which is imported on use: this module does not import JAX, so that
`simfbo --help` and a mistyped name are answered fast.

Other packages add records through the entry-point groups `simfbo.methods` and `simfbo.tasks`.
Without an entry point, `package.module:name` is accepted in place of a name.
"""

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, NamedTuple, TypeVar

from simfbo.config.fields import MethodSettings, TaskSettings
from simfbo.config.signatures import settings_of
from simfbo.errors import UserError, plain
from simfbo.runs.files import Json
from simfbo.runs.palette import COLOURS

__all__ = ["METHODS", "TASKS", "MethodRecord", "Shelf", "TaskRecord"]


class MethodRecord(NamedTuple):
    """The record of a method: its construction and presentation.

    Attributes:
        name: in configurations and on the command line.
        title: in reports and figures.
        factory: (problem, local, server, ...) or (problem, steps, ...) -> Algorithm, or its import
            path, as "package.module:name".
        settings: the model of its settings; None to derive it from the factory's signature.
        defaults: of settings that differ from the factory's.
        sampling: the default sampling, if it is not without replacement.
        one_exchange: one exchange per cohort, so that privacy can be accounted.
        adds_up_work: clients with more local work have more weight.
        private: needs a problem with a personal lower level.
        baseline: solves no bilevel problem: it is found by name, but not listed.
        laws: options for `simfbo check`, by suffix of the name; `v` among them is a step size.
        colour: of its line in figures; the next one of the palette by default.
        when: completes "use it when", for the table of methods in the documentation.
        sampled: the part of an iteration that is unbiased under client sampling, if not all of it.
        theory: the result proved in its paper, in a line of Markdown.
        paper: authors, venue and year.
        from_abstract: written from the abstract of that paper alone.
    """

    name: str
    title: str
    factory: str | Callable[..., Any]
    settings: type[MethodSettings] | None = None
    defaults: Mapping[str, Any] = {}
    sampling: str | None = None
    one_exchange: bool = False
    adds_up_work: bool = False
    private: bool = False
    baseline: bool = False
    laws: Mapping[str, Json] = {"": {}}
    colour: str = ""
    when: str = ""
    sampled: str = ""
    theory: str = ""
    paper: str = ""
    from_abstract: bool = False


class TaskRecord(NamedTuple):
    """The record of a task.

    Attributes:
        name: in configurations and on the command line.
        factory: (settings, seed, data_dir) -> Task, or its import path. Without `settings` any
            function that returns a Task, called with its own parameters.
        settings: the model of its settings; None to derive it from the factory's signature.
        practical: full participation and automatic step sizes are the defaults.
    """

    name: str
    factory: str | Callable[..., Any]
    settings: type[TaskSettings] | None = None
    practical: bool = False


R = TypeVar("R", MethodRecord, TaskRecord)


class Shelf(Generic[R]):
    """The records of one kind, by name."""

    def __init__(self, kind: type[R], what: str, group: str) -> None:
        """Create an empty registry; `what` is the noun in messages, `group` the entry points'."""
        self._kind, self._what, self._group = kind, what, group
        self._records: dict[str, R] = {}
        self._places: dict[str, R] = {}  # records imported from package.module:name
        self._registered: dict[str, str] | None = None

    def add(self, *records: R) -> None:
        """Register records."""
        self._records |= {record.name: record for record in records}

    def remove(self, name: str) -> None:
        """Remove a record."""
        self._records.pop(name, None)

    def names(self) -> list[str]:
        """Return all names except baselines, without importing; other packages' names come last."""
        records = self._records
        return [
            name for name in self._all_names() if not getattr(records.get(name), "baseline", False)
        ]

    def find(self, name: str) -> R:
        """Return the record of a name or of `package.module:name`; raise if there is none.

        Case is ignored, and hyphens equal underscores.
        """
        name = self.known(name)
        if name not in self._records and name not in self._places:
            places = self._entry_points()
            if name not in places and ":" not in name:
                raise UserError(self._unknown(name))
            place = places.get(name, name)
            target = self._places if place == name else self._records
            target[name] = self._imported(place)._replace(name=name)
        return self._records.get(name) or self._places[name]

    def number(self, name: str) -> int:
        """Return the index of a name; those at package.module:name come last."""
        return [*self.names(), *self._places].index(name)

    def usable(self) -> list[R]:
        """Return all records except those of other packages that cannot be imported."""
        records = []
        for name in self.names():
            with contextlib.suppress(UserError):
                records.append(self.find(name))
        return records

    def _imported(self, place: str) -> R:
        """Return the record at `package.module:name`, or create one for the factory there."""
        loaded = load(place)
        if isinstance(loaded, self._kind):
            return loaded
        if not callable(loaded) and not (self._kind is TaskRecord and _is_task(loaded)):
            wanted = "a function" if self._kind is MethodRecord else "a function or a Task"
            raise UserError(
                f"The {self._what} '{plain(place)}' must be {wanted}, got {type(loaded).__name__}."
            )
        title = getattr(loaded, "__name__", place)
        method = self._kind is MethodRecord
        record = MethodRecord(place, title, loaded) if method else TaskRecord(place, loaded)
        return record  # pyright: ignore[reportReturnType]

    def _entry_points(self) -> dict[str, str]:
        """Return the import paths of other packages' records, by name."""
        if self._registered is None:
            points = entry_points(group=self._group)
            self._registered = {point.name: point.value for point in points}
        return self._registered

    def known(self, name: str) -> str:
        """Return the registered spelling of a name; unregistered names are returned unchanged."""
        if name in self._records or ":" in name:
            return name
        return {_folded(registered): registered for registered in self._all_names()}.get(
            _folded(name), name
        )

    def _all_names(self) -> list[str]:
        """Return all names, including baselines."""
        return list(dict.fromkeys([*self._records, *self._entry_points()]))

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name[:80].lower(), self._all_names(), 1)
        hint = f"Did you mean '{close[0]}'?" if close else f"Use {any_of(self.names())}."
        return f"Unknown {self._what} '{plain(name)}'. {hint}"


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def _is_task(loaded: Any) -> bool:
    from simfbo.tasks import Task  # imports JAX, which the task's author has done before

    return isinstance(loaded, Task)


METHODS = Shelf(MethodRecord, "algorithm", "simfbo.methods")
"""The records of all methods."""
TASKS = Shelf(TaskRecord, "task", "simfbo.tasks")
"""The records of all tasks."""


def any_of(names: Iterable[str]) -> str:
    """Join names to a choice.

    Example:
        >>> any_of(["a", "b", "c"])
        'a, b or c'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def load(place: str) -> Any:
    """Import the object at `package.module:name`; modules may be in the current folder."""
    module, _, attribute = place.partition(":")
    if not (module and attribute):
        raise UserError(f"Write '{plain(place)}' as package.module:name.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module can raise anything
        raise UserError(f"'{plain(place)}' cannot be imported: {plain(str(error), 200)}.") from None


def factory_of(record: MethodRecord | TaskRecord) -> Any:
    """Return a record's factory, importing it if necessary."""
    return load(record.factory) if isinstance(record.factory, str) else record.factory


def settings_model(record: MethodRecord | TaskRecord) -> type[Any]:
    """Return the model of a record's settings, derived from its factory if it has none."""
    if record.settings is not None:
        return record.settings
    factory = factory_of(record)
    if not callable(factory):  # a Task object
        return TaskSettings
    if isinstance(record, TaskRecord):
        return _derived(record.name, factory, TaskSettings, ())
    return _derived(record.name, factory, MethodSettings, tuple(record.defaults.items()))


@cache
def _derived(name: str, factory: Any, base: type[Any], defaults: Any) -> type[Any]:
    return settings_of(factory, name, base, dict(defaults))


def colour_of(name: str) -> str:
    """Return the colour of a method's line."""
    colour = METHODS.find(name).colour
    return colour or COLOURS[METHODS.number(name) % len(COLOURS)]
