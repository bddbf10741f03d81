"""Docstrings as Sphinx reads them: a Sphinx extension.

They are written to be read as they are, in Google's form with a little Markdown.
"""

import inspect
import re
from typing import Any

from sphinx.application import Sphinx

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example):$")
_DOCUMENT = re.compile(r"`?docs/([\w-]+)\.md`?")


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn Markdown into reST, in place; runs before napoleon."""
    first = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    text = [*_literal_blocks(lines[:first]), *_further(app, name)]
    lines[:] = [*text, *lines[first:]]
    lines[:] = [_DOCUMENT.sub(r":doc:`/\1`", line) for line in lines]
    if isinstance(obj, tuple) and what == "data":
        lines += ["", *map(_item, obj)]


def _further(app: Sphinx, name: str) -> list[str]:
    """Return a link to the page of a method, if there is one."""
    namespace, _, last = name.rpartition(".")
    page = f"reference-{last}"
    if namespace != "simfbo.algorithms" or page not in app.env.found_docs:
        return []
    return [f":doc:`Its page </{page}>` has the equations, the cost and the choices made.", ""]


def _item(value: Any) -> str:
    """Return what a tuple of names or of laws holds, as an item of a list."""
    return f"- ``{value}``" if isinstance(value, str) else f"- {value.name}: {value.says}"


def _literal_blocks(lines: list[str]) -> list[str]:
    """Return text with a mark before each indented block, so that it stays as it is written."""
    found: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside:
            found += [".. code-block:: text", ""]
        inside = indented or (inside and not line)
        found.append(line)
    return found


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out fields, which the class describes, and what other packages define."""
    function = inspect.unwrap(getattr(obj, "fget", None) or getattr(obj, "__func__", obj))
    module = getattr(function, "__module__", None) or ""
    ours = inspect.isfunction(function) and module.startswith("simfbo")
    return None if ours else True


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect with autodoc."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
