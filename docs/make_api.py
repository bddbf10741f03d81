"""Write docs/reference-api.md from the docstrings of the public names: `make api`.

Signatures are quoted from the source, as written there, so that the page is the same on every
machine and with every version of Python.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import simfbo
from simfbo.engines.base import Engine

PAGE = Path(__file__).with_name("reference-api.md")
# Where to import a namespace from, by the name that its section has.
NAMESPACES = {
    "simfbo": "simfbo",
    "simfbo.algorithms": "simfbo.algorithms",
    "simfbo.tasks": "simfbo.tasks",
    "simfbo.datasets": "simfbo.datasets",
    "simfbo.estimators": "simfbo.estimators",
    "simfbo.sampling": "simfbo.core.sampling",
    "simfbo.local_work": "simfbo.core.local_work",
    "simfbo.partition": "simfbo.core.partition",
    "simfbo.aggregation": "simfbo.core.aggregation",
    "simfbo.codecs": "simfbo.core.codecs",
    "simfbo.privacy": "simfbo.core.privacy",
    "simfbo.flower": "simfbo.flower",
    "simfbo.torch": "simfbo.torch",
    "simfbo.diagnostics": "simfbo.diagnostics",
    "simfbo.checks": "simfbo.checks",
    "simfbo.runs": "simfbo.runs",
    "simfbo.config.catalogue": "simfbo.config.catalogue",
}
_INTRODUCTION = """# API

Generated from the docstrings by `make api`; do not edit. Everything on this page is public
([what that means](reference-stability.md)). Letters are those of
[the notation](explanation-notation.md).
"""
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Example):")
_ITEM = re.compile(r"(\*{0,2}\w+): (.*)")
_LINK = re.compile(r"docs/([\w-]+\.md)")
_WIDTH = 110


class Section(NamedTuple):
    """A part of a docstring: its heading, empty for the text before the first, and its lines."""

    heading: str
    lines: list[str]


def page() -> str:
    """Return the whole page."""
    modules = {title: importlib.import_module(place) for title, place in NAMESPACES.items()}
    contents = [
        f"- [{title}](#{anchor(title)}): {first_line(module.__doc__ or '')}"
        for title, module in modules.items()
    ]
    parts = [_INTRODUCTION, "\n".join(_wrapped(contents)) + "\n"]
    for title, module in modules.items():
        parts += _namespace(title, module)
    return _LINK.sub(r"[\1](\1)", "\n".join(parts))


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


def first_line(text: str) -> str:
    """Return the first line of a docstring."""
    return text.strip().partition("\n")[0]


def _namespace(title: str, module: ModuleType) -> Iterator[str]:
    """Yield the section of a namespace."""
    yield f"## `{title}`\n\n{inspect.cleandoc(module.__doc__ or '')}\n"
    if module.__name__ != title:
        name = title.rpartition(".")[2]
        yield f"Import it with `from simfbo import {name}`, its names from `{module.__name__}`.\n"
    if title == "simfbo":
        rooms = [name for name in module.__all__ if isinstance(getattr(module, name), ModuleType)]
        links = ", ".join(f"[`{name}`](#{anchor(f'simfbo.{name}')})" for name in rooms)
        yield "\n".join(_wrapped([f"Namespaces: {links}."])) + "\n"
    for name in module.__all__:
        found = getattr(module, name)
        if isinstance(found, ModuleType):
            continue
        full = f"simfbo.{name}"
        if title != "simfbo" and getattr(simfbo, name, None) is found:
            yield f"### `{title}.{name}`\n\nThe same as [`{full}`](#{anchor(full)}).\n"
        else:
            yield _entry(f"{title}.{name}", found, documentation(module, name))


def _entry(full: str, found: Any, text: str) -> str:
    """Return the entry of one name."""
    parts = [f"### `{full}`\n"]
    if inspect.isclass(found):
        parts += [_code(class_signature(found)), _text(text, *_arguments(found))]
        parts += _members(found)
    elif inspect.isroutine(found):
        parts += [_code(signature(found)), _text(text), *_further(full)]
    else:
        parts += [_text(text), *_values(found)]
    return "\n".join(parts)


def _further(full: str) -> list[str]:
    """Return a link to the page of a method, if there is one."""
    namespace, _, name = full.rpartition(".")
    file = f"reference-{name}.md"
    if namespace != "simfbo.algorithms" or not PAGE.with_name(file).is_file():
        return []
    return [f"[Its page]({file}) has the equations, the cost and the choices made.\n"]


def _values(found: Any) -> list[str]:
    """Return what a tuple of names or of laws holds."""
    if not isinstance(found, tuple):
        return []
    items = [f"- `{one}`" if isinstance(one, str) else f"- {one.name}: {one.says}" for one in found]
    return ["\n".join(items) + "\n"]


def signature(function: Any, name: str = "") -> str:
    """Return a function's signature as its source has it, without self."""
    source = textwrap.dedent(inspect.getsource(function))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    parameters = [one for one in _parameters(source, node.args) if one not in ("self", "cls")]
    returns = _segment(source, node.returns).strip('"')
    ending = f" -> {returns}" if returns not in ("", "None") else ""
    return _call(name or node.name, parameters, ending)


def class_signature(found: type) -> str:
    """Return how to call a class: by its fields, or as its `__init__` has it."""
    if issubclass(found, Exception):
        return f"class {found.__name__}({found.__bases__[0].__name__})"
    if getattr(found, "_is_protocol", False):
        return f"class {found.__name__}(Protocol)"
    if fields := _fields(found):
        return _call(found.__name__, fields, "")
    return signature(_maker(found), found.__name__)


def _maker(found: type) -> Any:
    """Return the `__init__` of a class that simfbo defines; None where it has none."""
    makers = (vars(one).get("__init__") for one in found.__mro__ if _is_ours(one))
    return next(filter(None, makers), None)


def _arguments(found: type) -> list[Section]:
    """Return the arguments that the docstring of `__init__` describes."""
    described = issubclass(found, Exception) or hasattr(found, "_fields")
    text = "" if described else inspect.cleandoc(getattr(_maker(found), "__doc__", "") or "")
    return [part for part in _sections(text) if part.heading == "Args"]


def _parameters(source: str, args: ast.arguments) -> Iterator[str]:
    """Yield the parameters of a function."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for one, default in zip(plain, defaults, strict=True):
        yield _parameter(source, one, default)
    if args.vararg:
        yield f"*{_parameter(source, args.vararg, None)}"
    elif args.kwonlyargs:
        yield "*"
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(source, one, default)
    if args.kwarg:
        yield f"**{_parameter(source, args.kwarg, None)}"


def _parameter(source: str, one: ast.arg, default: ast.expr | None) -> str:
    return _declared(one.arg, _segment(source, one.annotation), _segment(source, default))


def _declared(name: str, annotation: str, default: str) -> str:
    """Return a name with its type and default."""
    annotation = annotation.strip('"')
    if not annotation:
        return f"{name}={default}" if default else name
    return f"{name}: {annotation}" + (f" = {default}" if default else "")


def _fields(found: type) -> list[str]:
    """Return the fields of a named tuple or dataclass, as its source declares them."""
    if not hasattr(found, "_fields") and not hasattr(found, "__dataclass_fields__"):
        return []
    source = textwrap.dedent(inspect.getsource(found))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    return [
        _declared(one.target.id, _segment(source, one.annotation), _default(source, one.value))
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]


def _default(source: str, value: ast.expr | None) -> str:
    """Return a field's default; of one with a factory, a call of it."""
    text = _segment(source, value)
    factory = re.fullmatch(r"field\(default_factory=(\w+)\)", text)
    return {"list": "[]", "dict": "{}"}.get(factory[1], f"{factory[1]}()") if factory else text


def _segment(source: str, node: ast.expr | None) -> str:
    """Return the source of an expression, on one line."""
    return "" if node is None else " ".join((ast.get_source_segment(source, node) or "").split())


def _call(name: str, parameters: Iterable[str], ending: str) -> str:
    """Return a signature on one line if it fits, else with a line per parameter."""
    parameters = list(parameters)
    short = f"{name}({', '.join(parameters)}){ending}"
    if len(short) <= 88:
        return short
    return "\n".join([f"{name}(", *(f"    {one}," for one in parameters), f"){ending}"])


def _members(found: type) -> Iterator[str]:
    """Yield the public methods and properties of a class."""
    if issubclass(found, Engine):
        link = f"[`Federation`](#{anchor('simfbo.Federation')})"
        yield f"Its methods and properties are those of {link}.\n"
        return
    items = [line for name, member in _public(found).items() for line in _member(name, member)]
    if items:
        yield "\n".join(["**Methods and properties**\n", *items]) + "\n"


def _public(found: type) -> dict[str, Any]:
    """Return the public methods and properties that simfbo defines, by name."""
    members: dict[str, Any] = {}
    for one in reversed([one for one in found.__mro__ if _is_ours(one)]):
        members |= {name: member for name, member in vars(one).items() if _is_member(name, member)}
    return dict(sorted(members.items()))


def _is_member(name: str, member: Any) -> bool:
    kinds = (property, classmethod, staticmethod)
    return not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))


def _is_ours(found: type) -> bool:
    return found.__module__.startswith("simfbo.")


def _member(name: str, member: Any) -> list[str]:
    """Return the lines about a method or property."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    shown = name if isinstance(member, property) else " ".join(signature(function).split())
    shown = shown.replace("( ", "(").replace(", )", ")")
    first, *rest = _sections(inspect.cleandoc(function.__doc__ or ""))
    lines = _wrapped([f"- `{shown}`: {' '.join(' '.join(first.lines).split())}"])
    for part in rest:
        if part.heading == "Args":
            lines += textwrap.indent("\n".join(_items(part.lines)), "  ").splitlines()
    return lines


def _text(text: str, *more: Section) -> str:
    """Return a docstring as Markdown, with further sections before its own."""
    first, *rest = _sections(text)
    parts = ["\n".join(first.lines).strip() + "\n"]
    for part in [*more, *rest]:
        body = textwrap.dedent("\n".join(part.lines)).strip()
        if part.heading == "Example":
            parts += [f"```pycon\n{body}\n```\n"]
        elif part.heading == "Returns":
            parts += ["\n".join(_wrapped([f"**Returns** {' '.join(body.split())}"])) + "\n"]
        else:
            parts += ["\n".join([f"**{part.heading}**\n", *_items(part.lines)]) + "\n"]
    return "\n".join(parts)


def _sections(text: str) -> list[Section]:
    """Return the parts of a docstring."""
    found = [Section("", [])]
    for line in text.splitlines():
        if heading := _SECTION.fullmatch(line):
            found.append(Section(heading[1], []))
        else:
            found[-1].lines.append(line)
    return found


def _items(lines: list[str]) -> list[str]:
    """Return the entries of Args, Attributes or Raises as a list."""
    items: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).strip().splitlines():
        if item := _ITEM.fullmatch(line):
            items.append(f"- `{item[1]}`: {item[2]}")
        elif items:
            items[-1] += f" {line.strip()}"
    return _wrapped(items)


def _wrapped(items: Iterable[str]) -> list[str]:
    """Return paragraphs or list items, wrapped."""
    return [
        line
        for item in items
        for line in textwrap.wrap(
            item,
            _WIDTH,
            subsequent_indent="  " if item.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def _code(text: str) -> str:
    return f"```py\n{text}\n```\n"


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
