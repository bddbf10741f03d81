"""Pickled data frames as CSV, read without pandas and without running anything they name.

A pickle is a program: it names functions and calls them. For the few names that a data frame needs,
the reader here supplies classes that only record their arguments, and it refuses all other names;
the columns are then taken from the records.
"""

import csv
import io
import lzma
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from simfbo.errors import UserError

_SUFFIX = ".pkl.compress"
# NumPy 2 and pandas 3 moved some of the names: pickles from before and after can be read.
_CORES = ("numpy.core", "numpy._core")
_NAMES = {
    ("builtins", "slice"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *((f"{core}.multiarray", "_reconstruct") for core in _CORES),
    *((f"{core}.numeric", "_frombuffer") for core in _CORES),
    *(("pandas", name) for name in ("DataFrame", "Index", "RangeIndex")),
    ("pandas._libs.internals", "_unpickle_block"),
    ("pandas.core.frame", "DataFrame"),
    ("pandas.core.indexes.base", "Index"),
    ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.indexes.range", "RangeIndex"),
    ("pandas.core.internals.managers", "BlockManager"),
}
# Bytes become numbers of these kinds only: in an array of objects they would be pointers.
_NUMBERS = ("i8", "f8")


class _Record:
    """A record of one call in a pickle: its arguments and the state set afterwards."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Record":
        """Record a call; not in `__init__`, which pickles may skip."""
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        """Record the state."""
        self.state = state


class _Reader(pickle.Unpickler):
    """An unpickler that finds nothing but records."""

    def find_class(self, module: str, name: str) -> type[_Record]:
        """Return a class of records for a name that data frames need.

        Raises:
            UnpicklingError: If it is any other name.
        """
        if (module, name) not in _NAMES:
            asked = f"{module}.{name}"
            raise pickle.UnpicklingError(f"it asks for {asked!r}, which was not run")
        return type(name, (_Record,), {})


def csv_originals(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """Convert each pickled data frame to a CSV file with the name of the frame.

    Args:
        members: Base name, which ends in `.pkl.compress`, to the xz-compressed pickle.

    Raises:
        UserError: If a member is not such a pickle or names more than a data frame needs.
    """
    return {
        name.removesuffix(_SUFFIX) + ".csv": _readable(name, data) for name, data in members.items()
    }


def frame_csv(data: bytes) -> bytes:
    """Convert a pickled data frame to CSV: a header, then rows, floats in full precision.

    The same values give the same bytes on every machine, so the result has a fixed digest.

    Args:
        data: The uncompressed pickle.
    """
    columns = _columns(_Reader(io.BytesIO(data)).load())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        zip(*(map(_cell, column.tolist()) for column in columns.values()), strict=True)
    )
    return text.getvalue().encode()


def _readable(name: str, data: bytes) -> bytes:
    """Convert a compressed frame to CSV; report any problem in one sentence."""
    try:
        return frame_csv(lzma.decompress(data))
    except Exception as error:  # A damaged or hostile pickle may raise almost anything.
        raise UserError(
            f"{name} is not a readable data frame ({error}): download its package again, or put "
            "the CSV file from another machine into the data folder."
        ) from error


def _columns(frame: _Record) -> dict[str, np.ndarray]:
    """Return the columns of a recorded data frame in order."""
    blocks, axes = _called("BlockManager", frame.state["_mgr"])
    names = _array(_called("_new_Index", axes[0])[1]["data"]).tolist()
    found: dict[str, np.ndarray] = {}
    for block in blocks:
        values, places, _ = _called("_unpickle_block", block)
        for place, column in zip(_places(places, len(names)), _array(values), strict=True):
            found[names[place]] = column
    return {name: found[name] for name in names}


def _called(name: str, record: Any) -> tuple[Any, ...]:
    """Return the arguments of a recorded call, which must be to the given name."""
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"it has {type(record).__name__} in place of {name}")
    return record.args


def _places(record: _Record, count: int) -> Iterator[int]:
    """Return which of `count` columns a block holds."""
    if type(record).__name__ == "slice":
        return iter(range(count)[slice(*record.args)])
    return iter(_array(record).tolist())


def _array(record: _Record) -> np.ndarray:
    """Return a recorded array of numbers or of objects."""
    if type(record).__name__ == "_frombuffer":
        content, kind, shape, order = record.args
        return np.frombuffer(content, _number(kind)).reshape(shape, order=order)
    _called("_reconstruct", record)
    _, shape, kind, column_major, content = record.state
    if not isinstance(content, list):
        order = "F" if column_major else "C"
        return np.frombuffer(content, _number(kind)).reshape(shape, order=order)
    objects = np.empty(len(content), object)
    objects[:] = content
    # Objects are listed row by row, whatever the layout of the array was.
    return objects.reshape(shape)


def _number(kind: _Record) -> str:
    """Return the NumPy code of a recorded dtype of numbers."""
    code, order = _called("dtype", kind)[0], kind.state[1]
    if code not in _NUMBERS or order != "<":
        raise ValueError(f"it has numbers of the kind {order}{code}")
    return order + code


def _cell(value: object) -> str:
    """Return one value as text from which it can be read back exactly."""
    if isinstance(value, str):
        return value
    if type(value) not in (int, float):
        raise ValueError(f"it has a value of type {type(value).__name__}")
    return repr(value)
