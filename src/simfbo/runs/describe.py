"""Descriptions of objects: all numbers they contain, by name, equal in every process.

A run is only resumed with the inputs that it was started with. Step sizes, samplers, Optax
transformations and losses are functions that hold their numbers in closures, which are inspected.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.data import digest

Described = dict[str, bool | int | float | str | None]
_MAX_DEPTH = 30


def describe(given: Mapping[str, Any]) -> Described:
    """Return all numbers in some objects by name.

    An array is described by a digest, a function by its name, its closure and the defaults of its
    arguments. Within closures, strings, lists, dictionaries and other mutable objects are described
    by their type alone.

    Example:
        >>> from simfbo.core.problem import Point
        >>> from simfbo.core.sampling import without_replacement
        >>> describe({"local": Point(x=0.1, y=0.2), "sampler": without_replacement(3)})
        {'local.x': 0.1, 'local.y': 0.2, 'local.v': None, 'sampler': \
'WithoutReplacement', 'sampler.size': 3}
    """
    return {
        path: value
        for name, described in given.items()
        for path, value in _described(name, described, (), False)
    }


def _described(
    path: str, value: Any, above: tuple[int, ...], enclosed: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the numbers in a value by path.

    `above` has the ids of the containing objects; `enclosed` values belong to a function's closure.
    """
    if isinstance(value, Enum):
        value = value.name
    if isinstance(value, np.generic) and value.ndim == 0 and value.dtype.kind in "biuf":
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        finite = not isinstance(value, float) or math.isfinite(value)
        yield path, value if finite else str(value)
    elif isinstance(value, str):
        yield path, "str" if enclosed else value
    elif isinstance(value, np.ndarray | jax.Array) and value.dtype != object:
        key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        yield path, digest(jax.random.key_data(value) if key else value)
    elif id(value) in above or len(above) > _MAX_DEPTH:
        yield path, type(value).__name__
    else:
        children, enclosed = _children(value, enclosed)
        if not isinstance(value, tuple | list | dict):
            yield path, str(getattr(value, "__name__", type(value).__name__))
        for name, child in children.items():
            yield from _described(f"{path}.{name}", child, (*above, id(value)), enclosed)


def _children(value: Any, enclosed: bool) -> tuple[dict[str, Any], bool]:
    """Return the children of an object by name, and a flag for those enclosed in a function."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", map(str, range(len(value))))
        return dict(zip(names, value, strict=True)), enclosed
    if isinstance(value, list | dict) and not enclosed:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {str(key): child for key, child in pairs}, enclosed
    if isinstance(value, functools.partial):
        return {"of": value.func, "given": value.args, **value.keywords}, True
    if isinstance(value, FunctionType):
        return {**_defaults(value), **_closure(value)}, True
    if wrapped := getattr(value, "__wrapped__", None):  # compiled, or cached
        return {"of": wrapped}, True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, enclosed
    return {}, enclosed


def _closure(function: FunctionType) -> dict[str, Any]:
    """Return the variables in a function's closure by name."""
    variables: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is still empty
            variables[name] = cell.cell_contents
    return variables


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's arguments, by name."""
    values = function.__defaults__ or ()
    count = function.__code__.co_argcount
    names = function.__code__.co_varnames[count - len(values) : count]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}
