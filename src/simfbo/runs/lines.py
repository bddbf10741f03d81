"""Lines of JSON in a file, each with its own checksum, so that a damaged one is noticed."""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from simfbo.runs.files import Json

_MARK = b', "crc32": "'


class Lines(NamedTuple):
    """What can be read of a history.

    Attributes:
        whole: its undamaged lines, as JSON objects.
        raw: the same lines as they are in the file.
        damaged: how many others there are; an incomplete last one does not count.
    """

    whole: list[Json]
    raw: list[bytes]
    damaged: int


def as_line(kind: str, values: Json) -> bytes:
    """Return a line of a history, with the checksum of everything before it."""
    text = json.dumps({"kind": kind, **plain(values)}).encode()
    return text[:-1] + _MARK + b'%08x"}\n' % zlib.crc32(text)


def read_lines(data: bytes, before: bytes = b"") -> Lines:
    """Return the lines of a history that are whole.

    Once a line has a checksum, all later ones must: before, there were none.

    Args:
        data: the history, or the last part of it.
        before: what stands before that part.
    """
    found, checked = Lines([], [], 0), _MARK in before
    *lines, last = data.split(b"\n")
    for raw in lines:
        checked = checked or _MARK in raw
        line = _parse(raw, checked)
        if line is not None:
            found.whole.append(line)
            found.raw.append(raw + b"\n")
    damaged = len(lines) - len(found.whole)
    if (line := _parse(last, checked)) is not None:
        found.whole.append(line)
        found.raw.append(last + b"\n")
    return found._replace(damaged=damaged)


def _parse(raw: bytes, checked: bool) -> Json | None:
    """Return one line of a history, without its checksum; None if it is damaged."""
    text, mark, digits = raw.rpartition(_MARK)
    text = text + b"}" if mark else raw
    if checked and digits != b'%08x"}' % zlib.crc32(text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "kind" in found else None


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries with their dotted keys.

    Example:
        >>> dict(flattened({"task": {"name": "fair"}, "seed": 0}))
        {'task.name': 'fair', 'seed': 0}
    """
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain(values: Any) -> Any:
    """Return values as strict JSON gives them back, with None for numbers that are not finite."""
    if isinstance(values, Mapping):
        return {str(key): plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
