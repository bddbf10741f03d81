"""Messages about invalid configurations: one short sentence that names the field."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from pydantic import BaseModel, ValidationError

from simfbo.errors import brief, plain

Key = tuple[str, ...]
Models = Mapping[str, type[BaseModel]]
_TABLE_EXPECTED = ("model_type", "model_attributes_type", "dict_type")


def dotted(key: Sequence[object]) -> str:
    """Join a key as in TOML, quoted where necessary.

    Example:
        >>> dotted(["task", "the clients"])
        'task."the clients"'
    """
    parts = (str(part) for part in key)
    return plain(".".join(p if re.fullmatch(r"[\w-]+", p) else f'"{plain(p, 40)}"' for p in parts))


def sentence(error: ValidationError, root: type[BaseModel], models: Models, table: Key = ()) -> str:
    """Describe the first mistake in a configuration.

    Args:
        error: of the validation.
        root: the model of the whole configuration.
        models: the models of the tables `task` and `algorithm`.
        table: the table that was validated; empty for the whole configuration.

    Returns:
        One sentence with the field and the expected value.
    """
    first = error.errors(include_url=False)[0]
    place = _place((*table, *first["loc"]))
    field, message = dotted(place), first["msg"].removeprefix("Value error, ")
    if not place:
        return f"{message}."
    if first["type"] == "extra_forbidden":
        return f"Unknown setting '{field}'.{_hint(place, root, models)}"
    if first["type"] in _TABLE_EXPECTED:
        message = "Input should be a table of settings"
    value = brief(first["input"])
    if message.startswith("Input should "):
        return f"'{field}' {message.removeprefix('Input ')}, got {value}."
    return f"'{field}' is invalid: {message}, got {value}."


def _place(location: tuple[object, ...]) -> Key:
    """Return the key of an error, without pydantic's discriminator tags."""
    if location[:2] in (("local_work", "tau"), ("gate", "max_norm")):
        return (*map(str, location[:2]), *map(str, location[3:]))
    return tuple(map(str, location))


def _hint(place: Key, root: type[BaseModel], models: Models) -> str:
    """Suggest a similar known key, or else list the settings of its table."""
    if place == ("methods",):
        return " A file with methods is for simfbo compare."
    keys = list(_keys(root, models))
    siblings = [key for key in keys if key[:-1] == place[:-1]]
    word = place[-1][:80].lower().replace("-", "_")
    with_same_name = [key for key in keys if key[-1] == word]
    with_same_word = [key for key in siblings if word in key[-1].split("_")]
    close = with_same_name or with_same_word or _close(word, siblings) or _close(word, keys)
    if close:
        suggestions = "' or '".join(map(dotted, close[:2]))
        return f" Did you mean '{suggestions}'?"
    if len(place) == 2 and place[0] in models:
        others = sorted(key[-1] for key in siblings if key[-1] != "name")
        if not others:
            return f" There are no settings in '{place[0]}'."
        return f" The settings in '{place[0]}' are {', '.join(others)}."
    return ""


def _close(word: str, keys: Sequence[Key]) -> list[Key]:
    """Return the keys whose last part is similar to a word."""
    matches = difflib.get_close_matches(word, {key[-1] for key in keys}, 1)
    return [key for key in keys if key[-1] in matches]


def _keys(model: type[BaseModel], models: Models, path: Key = ()) -> Iterator[Key]:
    """Yield the keys of a model and of those inside it."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        chosen = [models[name]] if not path and name in models else models_in(field.annotation)
        inner_keys = {key for inner in chosen for key in _keys(inner, models, (*path, name))}
        yield from sorted(inner_keys)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)
