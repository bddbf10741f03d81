"""Complaints: what is wrong with a configuration, in one short sentence that names the field."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

Key = tuple[str, ...]
Chosen = Mapping[str, str]
_TABLE_EXPECTED = ("model_type", "model_attributes_type", "dict_type")


def plain(text: str, longest: int = 80) -> str:
    r"""Return a text on one line, without its middle where it is long.

    Example:
        >>> plain("one\ntwo")
        'one\\ntwo'
    """
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= longest else f"{text[: longest - 13]}...{text[-10:]}"


def brief(value: Any) -> str:
    """Return a value as it can stand in a sentence, whatever it is.

    Example:
        >>> brief([1] * 1000)
        '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,..., 1, 1, 1]'
    """
    try:
        return plain(repr(value))
    except (ValueError, RecursionError):  # integers of thousands of digits, lists in lists in lists
        return "a value too long to show"


def dotted(key: Sequence[Any]) -> str:
    """Return a key as in TOML, quoted where it has to be.

    Example:
        >>> dotted(["task", "the clients"])
        'task."the clients"'
    """
    parts = (str(part) for part in key)
    return plain(".".join(p if re.fullmatch(r"[\w-]+", p) else f'"{plain(p, 40)}"' for p in parts))


def sentence(error: ValidationError, root: type[BaseModel], chosen: Chosen) -> str:
    """Return the first complaint about a configuration.

    Args:
        error: what the validation found.
        root: the model of the whole configuration.
        chosen: the name given in a table, of those that hold one model of several.

    Returns:
        One sentence that names the field and says what was expected.
    """
    first = error.errors(include_url=False)[0]
    place = _place(first["loc"], chosen)
    field, message = dotted(place), first["msg"].removeprefix("Value error, ")
    if not place:
        return f"{message}."
    if first["type"] == "extra_forbidden":
        return f"'{field}' is no setting.{_hint(place, root, chosen)}"
    if first["type"] in ("missing", "union_tag_not_found"):
        return f"'{field}.name' is missing from the configuration: use {_known(root, place)}."
    if first["type"] == "union_tag_invalid":
        known, name = _known(root, place), first["input"]["name"]
        return f"'{field}.name' is wrong: use {known}, got {brief(name)}."
    if first["type"] in _TABLE_EXPECTED:
        message = "input should be a table of settings"
    return f"'{field}' is wrong: {message[0].lower()}{message[1:]}, got {brief(first['input'])}."


def _place(found: tuple[Any, ...], chosen: Chosen) -> Key:
    """Return the key of an error, without the names by which a model was chosen."""
    if found[:2] == ("local_work", "tau"):
        return (*map(str, found[:2]), *map(str, found[3:]))
    skipped = 2 if found and found[0] in chosen else 1
    return (*map(str, found[:1]), *map(str, found[skipped:]))


def _known(root: type[BaseModel], place: Key) -> str:
    """Return the names that a table may have, as a or b."""
    models = _models(root.model_fields[place[0]].annotation)
    *others, last = (name for model in models for name in _names(model))
    return f"{', '.join(others)} or {last}" if others else last


def _hint(place: Key, root: type[BaseModel], chosen: Chosen) -> str:
    """Return ' Did you mean ...?' where a known key is close; else what there is in its table."""
    if place == ("methods",):
        return " A file with methods is for simfbo compare."
    keys = list(_keys(root, chosen))
    own = [key for key in keys if key[:-1] == place[:-1]]
    word = place[-1][:80].lower().replace("-", "_")
    same = [key for key in keys if key[-1] == word]
    parts = [key for key in own if word in key[-1].split("_")]
    close = same or parts or _close(word, own) or _close(word, keys)
    if close:
        meant = "' or '".join(map(dotted, close[:2]))
        return f" Did you mean '{meant}'?"
    if len(place) == 2 and (name := chosen.get(place[0])):
        others = sorted(key[-1] for key in own if key[-1] != "name")
        return f" The settings of {plain(name)} are {', '.join(others)}."
    return ""


def _close(word: str, keys: Sequence[Key]) -> list[Key]:
    """Return the keys whose last part is most like a word; none where none is."""
    found = difflib.get_close_matches(word, {key[-1] for key in keys}, 1)
    return [key for key in keys if key[-1] in found]


def _keys(model: type[BaseModel], chosen: Chosen, path: Key = ()) -> Iterator[Key]:
    """Yield the keys of a model and of those inside it; of several, of the one chosen."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        inner = list(_models(field.annotation))
        own = [model for model in inner if not path and chosen.get(name) in _names(model)]
        found = {key for model in own or inner for key in _keys(model, chosen, (*path, name))}
        yield from sorted(found)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _names(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names by which a model is chosen."""
    return get_args(model.model_fields["name"].annotation) if "name" in model.model_fields else ()
