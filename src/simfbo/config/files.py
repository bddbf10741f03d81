"""Configuration files: conversion between TOML and nested dictionaries."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from simfbo.errors import UserError, plain
from simfbo.runs.files import Json

_LONGEST = 20_000_000  # characters of a file: a million clients' local steps


def read(file: Path) -> Json:
    """Read a TOML file to nested dictionaries."""
    name = plain(str(file), 1000)
    text = _text(file, name)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError(f"{name} is nested too deeply.") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not valid TOML: {plain(str(error), 150)}.") from None
    except ValueError:  # Python converts no integers of thousands of digits
        raise UserError(f"{name} holds a number with too many digits.") from None


def _text(file: Path, name: str) -> str:
    """Read the text of a file; `name` is its name in messages."""
    try:
        with file.open(encoding="utf-8-sig") as stream:
            text = stream.read(_LONGEST + 1)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{name} is not valid TOML: save it as UTF-8 text.") from None
    if len(text) > _LONGEST:
        raise UserError(f"{name} is too long for a configuration file.")
    return text


def merged(base: Json, own: Json) -> Json:
    """Merge two sets of settings, table by table; `own` overrides `base`."""
    both = {
        key: merged(base[key], own[key])
        for key in base.keys() & own.keys()
        if isinstance(base[key], dict) and isinstance(own[key], dict)
    }
    return {**base, **own, **both}


def as_toml(settings: BaseModel) -> str:
    """Write settings as the text of a TOML file."""
    return tomli_w.dumps(dict(_values(settings)))


def _values(model: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yield names and TOML values, the name of a method or task first."""
    fields = type(model).model_fields
    for name in sorted(fields, key=lambda name: name != "name"):
        value = getattr(model, name)
        if fields[name].exclude:
            continue
        if isinstance(value, BaseModel):
            yield name, dict(_values(value))
        elif value is not None:
            yield name, value
        elif fields[name].default is not None:
            yield name, "none"  # TOML has no null


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE` to (key, value), the value as TOML or else as text.

    Example:
        >>> parse_override("algorithm.local.y=0.1")
        ('algorithm.local.y', 0.1)
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"Write '{plain(text)}' as KEY=VALUE, for example task.clients=50.")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):  # not TOML, too many digits, too deep
        return key.strip(), value.strip()
    return key.strip(), parsed["value"] if len(parsed) == 1 else value.strip()
