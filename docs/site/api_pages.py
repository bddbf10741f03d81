"""The API reference: a page per namespace, from which a page per public name hangs.

A public name without a docstring ends the build.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

# Where to import a namespace from, by the name that users know.
NAMESPACES = {
    "simfbo": "simfbo",
    "simfbo.core": "simfbo.core",
    "simfbo.ranges": "simfbo.ranges",
    "simfbo.algorithms": "simfbo.algorithms",
    "simfbo.tasks": "simfbo.tasks",
    "simfbo.datasets": "simfbo.datasets",
    "simfbo.estimators": "simfbo.estimators",
    "simfbo.sampling": "simfbo.core.sampling",
    "simfbo.local_work": "simfbo.core.local_work",
    "simfbo.partition": "simfbo.core.partition",
    "simfbo.aggregation": "simfbo.robust.aggregation",
    "simfbo.codecs": "simfbo.codecs",
    "simfbo.privacy": "simfbo.privacy",
    "simfbo.trackers": "simfbo.runs.trackers",
    "simfbo.flower": "simfbo.flower",
    "simfbo.torch": "simfbo.torch",
    "simfbo.diagnostics": "simfbo.diagnostics",
    "simfbo.checks": "simfbo.checks",
    "simfbo.runs": "simfbo.runs",
    "simfbo.config.catalogue": "simfbo.config.catalogue",
}
# Names that differ in capitals only would be one file on some file systems.
FILES = {
    "simfbo.datasets.Status": "simfbo.datasets.Status-class",
    "simfbo.tasks.Quadratic": "simfbo.tasks.Quadratic-class",
}


class Name(NamedTuple):
    """A public name: its namespace and, if it is a re-export, the full name it is known by."""

    namespace: str
    name: str
    same_as: str | None

    @property
    def full(self) -> str:
        """The name with its namespace."""
        return f"{self.namespace}.{self.name}"


def public_names() -> list[Name]:
    """Return every public name but the namespaces themselves."""
    found: list[Name] = []
    home = importlib.import_module("simfbo")
    for title, place in NAMESPACES.items():
        module = importlib.import_module(place)
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                continue
            again = title != "simfbo" and getattr(home, name, None) is value
            found.append(Name(title, name, f"simfbo.{name}" if again else None))
    return found


def documentation(module: ModuleType, name: str) -> str:
    """Return the docstring of a public name; of a value, the text below its assignment."""
    found = getattr(module, name)
    if isinstance(found, ModuleType) or inspect.isclass(found) or inspect.isroutine(found):
        return inspect.cleandoc(found.__doc__ or "")
    body = ast.parse(inspect.getsource(module)).body
    for statement, text in pairwise(body):
        assigned = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0])
        if assigned == name and isinstance(text, ast.Expr):
            return inspect.cleandoc(ast.literal_eval(text.value))
    return ""


def undocumented() -> list[str]:
    """Return the public names that have no docstring worth the name."""
    modules = {title: importlib.import_module(place) for title, place in NAMESPACES.items()}
    names = [one for one in public_names() if len(_text(modules, one)) < 20]
    return [one.full for one in names] + [title for title, m in modules.items() if not m.__doc__]


def _text(modules: dict[str, ModuleType], one: Name) -> str:
    return documentation(modules[one.namespace], one.name)


def pages() -> Iterator[tuple[str, str]]:
    """Yield path and text of the page of every namespace."""
    names = public_names()
    for title in NAMESPACES:
        own = [one.name for one in names if one.namespace == title]
        yield f"api/{title}.rst", _page(title, own)


def _page(title: str, names: list[str]) -> str:
    """Return the page of a namespace; autosummary makes those of its names from the table."""
    lines = [title, "=" * len(title), "", f".. automodule:: {title}", "   :no-members:", ""]
    lines += _import_hint(title)
    lines += [f".. currentmodule:: {title}", "", ".. autosummary::", "   :toctree: .", ""]
    return "\n".join([*lines, *(f"   {name}" for name in names), ""])


def _import_hint(title: str) -> list[str]:
    place = NAMESPACES[title]
    if place == title:
        return []
    name = title.rpartition(".")[2]
    return [f"Import it with ``from simfbo import {name}``, its names from ``{place}``.", ""]
