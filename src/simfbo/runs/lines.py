"""Lines of JSON in a file, each with a checksum, by which damaged ones are detected."""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from simfbo.runs.files import Json

_MARK = b', "crc32": "'


class Lines(NamedTuple):
    """The lines of a history.

    Attributes:
        whole: the valid lines, as JSON objects.
        raw: the bytes of the same lines.
        damaged: the number of damaged lines, without an incomplete last one.
    """

    whole: list[Json]
    raw: list[bytes]
    damaged: int


def as_line(kind: str, values: Json) -> bytes:
    """Encode a line of a history with its checksum."""
    text = json.dumps({"kind": kind, **plain(values)}).encode()
    return text[:-1] + _MARK + b'%08x"}\n' % zlib.crc32(text)


def read_lines(data: bytes, before: bytes = b"") -> Lines:
    """Parse the lines of a history.

    The first lines of old histories have no checksums; after one with a checksum, all need one.

    Args:
        data: the history, or the end of it.
        before: bytes that precede `data`.
    """
    result, checked = Lines([], [], 0), _MARK in before
    *lines, last = data.split(b"\n")
    for raw in lines:
        checked = checked or _MARK in raw
        line = _parse(raw, checked)
        if line is not None:
            result.whole.append(line)
            result.raw.append(raw + b"\n")
    damaged = len(lines) - len(result.whole)
    if (line := _parse(last, checked)) is not None:
        result.whole.append(line)
        result.raw.append(last + b"\n")
    return result._replace(damaged=damaged)


def _parse(raw: bytes, checked: bool) -> Json | None:
    """Parse a line and remove its checksum; return None if it is damaged."""
    text, mark, digits = raw.rpartition(_MARK)
    text = text + b"}" if mark else raw
    if checked and digits != b'%08x"}' % zlib.crc32(text):
        return None
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and "kind" in line else None


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
    """Convert values to strict JSON, with None for numbers that are not finite."""
    if isinstance(values, Mapping):
        return {str(key): plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
