"""Checks the shapes in jaxtyping's annotations while tests run; see conftest.py.

jaxtyping's own import hook also wraps functions without shapes, closures at every call.
"""

import ast
import re
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

_SHAPED = re.compile(r"\b(Bool|Float|Int|Key|Shaped)\[")
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_in(packages: list[str]) -> None:
    """Check the shapes in what is imported from these packages from now on."""
    sys.meta_path.insert(0, _Finder(packages))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and results of a function for which annotations name shapes."""
    hints = dict(function.__annotations__)
    shaped = {name: hint for name, hint in hints.items() if _SHAPED.search(str(hint))}
    if not shaped:
        return function
    function.__annotations__ = shaped
    try:
        return _check(function)
    finally:
        function.__annotations__ = hints


class _Finder(MetaPathFinder):
    """Finds the modules of packages."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not any(f"{fullname}.".startswith(f"{package}.") for package in self._packages):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Compiles a module with its checks; without caches, which would be those without checks."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = _Checks().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Checks(ast.NodeTransformer):
    """Decorates functions whose annotations name shapes, and classes whose fields' do."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        hints = [one.annotation for one in every if one] + [node.returns]
        if any(hint is not None and _SHAPED.search(ast.unparse(hint)) for hint in hints):
            node.decorator_list.append(_decorator(node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        if any(_SHAPED.search(ast.unparse(field.annotation)) for field in fields):
            node.decorator_list.insert(0, _decorator(node))
        return self.generic_visit(node)


def _decorator(node: ast.AST) -> ast.expr:
    """Return the call of `checked` in this module."""
    source = f"__import__({__name__!r}).checked"
    return ast.copy_location(ast.parse(source, mode="eval").body, node)


def checked(subject: Any) -> Any:
    """Check a function, or the fields of a class."""
    return jaxtyped(subject, typechecker=check)
