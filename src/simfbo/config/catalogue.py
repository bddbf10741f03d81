"""The catalogue: one record per method and per task. Everything that lists them derives from it.

Light on purpose: a record names its factory, which is imported when it is used, so that
`simfbo --help` and a mistyped name answer without JAX.

A package of yours adds records through the entry-point groups `simfbo.methods` and `simfbo.tasks`;
without an entry point, `package.module:name` is accepted wherever a method or a task is named.
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
    """The record of a method: how it is built, and how it is presented.

    Attributes:
        name: in configurations and on the command line.
        title: as people call it.
        factory: (problem, local, server, ...) or (problem, steps, ...) -> Algorithm, or where to
            import it from, as "package.module:name".
        settings: the model of its settings; None to derive it from the factory's signature.
        defaults: of settings, where a configuration has others than the factory.
        sampling: how its authors sample clients, where that is not without replacement.
        one_exchange: whether it makes one exchange per cohort, so that privacy can be accounted.
        adds_up_work: whether clients that do more local work count for more.
        private: whether it needs a problem with a personal lower level.
        baseline: whether it solves no bilevel problem: it is found by name, and left out of lists.
        laws: options with which `simfbo check` tries it, by suffix of its name; `v` among them is
            a step size.
        colour: of its line in figures; the next one of the palette by default.
        when: completes "use it when", for the table of methods in the documentation.
        sampled: which part of an iteration is unbiased when clients are sampled, where that is not
            all of it.
        theory: what its paper proves, in a line of Markdown.
        paper: authors, venue and year.
        from_abstract: whether it was written from the abstract of that paper alone.
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
        factory: (settings, seed, data_dir) -> Task, or where to import it from. Without `settings`
            any function that returns a Task, called with its own parameters.
        settings: the model of its settings; None to derive it from the factory's signature.
        practical: whether its upper level is the point: everyone takes part and step sizes are
            automatic by default.
    """

    name: str
    factory: str | Callable[..., Any]
    settings: type[TaskSettings] | None = None
    practical: bool = False


R = TypeVar("R", MethodRecord, TaskRecord)


class Shelf(Generic[R]):
    """The records of one kind, by name."""

    def __init__(self, kind: type[R], what: str, group: str) -> None:
        """Begin empty; `what` is what messages call a record, `group` its entry points'."""
        self._kind, self._what, self._group = kind, what, group
        self._records: dict[str, R] = {}
        self._places: dict[str, R] = {}  # what was found at package.module:name
        self._registered: dict[str, str] | None = None

    def add(self, *records: R) -> None:
        """Register records."""
        self._records |= {record.name: record for record in records}

    def remove(self, name: str) -> None:
        """Forget a record."""
        self._records.pop(name, None)

    def names(self) -> list[str]:
        """Return all names but baselines', those of other packages last; imports none of them."""
        records = self._records
        return [name for name in self._all_names()
                if not getattr(records.get(name), "baseline", False)]  # fmt: skip

    def find(self, name: str) -> R:
        """Return the record of a name or of `package.module:name`; raise if there is none.

        Names are found in any case, and with hyphens for underscores.
        """
        name = self.known(name)
        if name not in self._records and name not in self._places:
            places = self._entry_points()
            if name not in places and ":" not in name:
                raise UserError(self._unknown(name))
            place = places.get(name, name)
            kept = self._places if place == name else self._records
            kept[name] = self._imported(place)._replace(name=name)
        return self._records.get(name) or self._places[name]

    def number(self, name: str) -> int:
        """Return how many names come before one; those at package.module:name come last."""
        return [*self.names(), *self._places].index(name)

    def usable(self) -> list[R]:
        """Return all records but those of other packages that cannot be imported."""
        found = []
        for name in self.names():
            with contextlib.suppress(UserError):
                found.append(self.find(name))
        return found

    def _imported(self, place: str) -> R:
        """Return the record at `package.module:name`, or one made for the factory there."""
        found = load(place)
        if isinstance(found, self._kind):
            return found
        if not callable(found) and not (self._kind is TaskRecord and _is_task(found)):
            wanted = "a function" if self._kind is MethodRecord else "a function or a Task"
            raise UserError(
                f"The {self._what} '{plain(place)}' must be {wanted}, got {type(found).__name__}."
            )
        title = getattr(found, "__name__", place)
        method = self._kind is MethodRecord
        record = MethodRecord(place, title, found) if method else TaskRecord(place, found)
        return record  # pyright: ignore[reportReturnType]

    def _entry_points(self) -> dict[str, str]:
        """Return where the records of other packages are, by name."""
        if self._registered is None:
            points = entry_points(group=self._group)
            self._registered = {point.name: point.value for point in points}
        return self._registered

    def known(self, name: str) -> str:
        """Return a name as it is registered, if it is one that is written otherwise."""
        if name in self._records or ":" in name:
            return name
        return {_folded(one): one for one in self._all_names()}.get(_folded(name), name)

    def _all_names(self) -> list[str]:
        """Return all names, baselines' too."""
        return list(dict.fromkeys([*self._records, *self._entry_points()]))

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name[:80].lower(), self._all_names(), 1)
        hint = f"Did you mean '{close[0]}'?" if close else f"Use {any_of(self.names())}."
        return f"Unknown {self._what} '{plain(name)}'. {hint}"


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def _is_task(found: Any) -> bool:
    from simfbo.tasks import Task  # which brings JAX, as has whoever made it

    return isinstance(found, Task)


METHODS = Shelf(MethodRecord, "algorithm", "simfbo.methods")
"""The records of all methods."""
TASKS = Shelf(TaskRecord, "task", "simfbo.tasks")
"""The records of all tasks."""


def any_of(names: Iterable[str]) -> str:
    """Return names as a choice.

    Example:
        >>> any_of(["a", "b", "c"])
        'a, b or c'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def load(place: str) -> Any:
    """Return the object at `package.module:name`; modules may lie in the current folder."""
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
    """Return a record's factory, imported if need be."""
    return load(record.factory) if isinstance(record.factory, str) else record.factory


def settings_model(record: MethodRecord | TaskRecord) -> type[Any]:
    """Return the model of a record's settings, derived from its factory where it has none."""
    if record.settings is not None:
        return record.settings
    factory = factory_of(record)
    if not callable(factory):  # a task that is ready
        return TaskSettings
    if isinstance(record, TaskRecord):
        return _derived(record.name, factory, TaskSettings, ())
    return _derived(record.name, factory, MethodSettings, tuple(record.defaults.items()))


@cache
def _derived(name: str, factory: Any, base: type[Any], defaults: Any) -> type[Any]:
    return settings_of(factory, name, base, dict(defaults))


def colour_of(name: str) -> str:
    """Return the colour of a method's line."""
    own = METHODS.find(name).colour
    return own or COLOURS[METHODS.number(name) % len(COLOURS)]
