"""Limits on the memory for Flower's arrays from untrusted nodes.

An array is sent in chunks, and its description lists them. Flower joins the listed chunks even if
the same one is listed many times, so a message of a few megabytes could become hundreds of
gigabytes; and a header of NumPy's format may announce any size.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
)

_LEFT: ContextVar[list[int] | None] = ContextVar("bytes left", default=None)
_HEADER = 4096  # an upper bound on the header of a block
_inflate = Array.inflate.__func__  # pyright: ignore[reportFunctionMemberAccess]


@contextmanager
def inflating_at_most(largest: int) -> Generator[None]:
    """Limit the bytes of the arrays that Flower assembles; raise `ValueError` above."""
    token = _LEFT.set([largest + _HEADER])
    try:
        yield
    finally:
        _LEFT.reset(token)


def bytes_in(array: Array) -> bytes:
    """Return the content of an array of bytes; raise `ValueError` for any other array."""
    stream = BytesIO(array.data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("another version of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    block = array.data[stream.tell() :]
    if dtype != np.uint8 or shape != (len(block),):
        raise ValueError("no array of bytes")
    return block


def _bounded_inflate(
    cls: type[Array], object_content: bytes, children: dict[str, Any] | None = None
) -> Array:
    """Assemble an array like Flower, unless it exceeds the remaining bytes."""
    remaining = _LEFT.get()
    if remaining is not None:
        remaining[0] -= _listed_bytes(object_content, children or {})
        if remaining[0] < 0:
            raise ValueError("more bytes of arrays than requested")
    return _inflate(cls, object_content, children)


def _listed_bytes(object_content: bytes, chunks: dict[str, Any]) -> int:
    """Return the size of an array of these chunks."""
    numbers = get_object_children_ids_from_object_content(object_content)
    listed = json.loads(get_object_body(object_content, Array))["arraychunk_ids"]
    return sum(len(chunks[numbers[k]].data) for k in listed)


Array.inflate = classmethod(_bounded_inflate)  # pyright: ignore[reportAttributeAccessIssue]
