"""Pickles read without executing them.

A pickle is a program: it names functions and calls them. For the few names in a known file, the
reader here supplies classes that only record their arguments, and it rejects all other names; the
arrays are then taken from the records.
"""

import io
import pickle
from collections.abc import Collection
from typing import Any

import numpy as np

# NumPy 2 moved some of the names; both locations are accepted.
CORES = ("numpy.core", "numpy._core")
ARRAYS = frozenset(
    {
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        *((f"{core}.multiarray", "_reconstruct") for core in CORES),
    }
)
"""The names that pickled arrays need."""
# Only numeric dtypes may be read from bytes: in an array of objects they would be pointers.
_NUMBERS = ("i8", "f8")


class Record:
    """A record of one call in a pickle: its arguments and the state set afterwards."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Record":
        """Record a call; not in `__init__`, which pickles may skip."""
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        """Record the state."""
        self.state = state


class _Reader(pickle.Unpickler):
    """An unpickler that creates records only."""

    def __init__(self, data: bytes, names: Collection[tuple[str, str]]) -> None:
        """Prepare to read a pickle that may use the given names."""
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> type[Record]:
        """Return a class of records for an allowed name.

        Raises:
            UnpicklingError: For any other name.
        """
        if (module, name) not in self._names:
            requested = f"{module}.{name}"
            raise pickle.UnpicklingError(f"it asks for {requested!r}, which was not run")
        return type(name, (Record,), {})


def load(data: bytes, names: Collection[tuple[str, str]]) -> Any:
    """Read a pickle, with a record in place of every call.

    Args:
        data: The pickle.
        names: The modules and names that it may use.
    """
    return _Reader(data, names).load()


def called(name: str, record: Any) -> tuple[Any, ...]:
    """Return the arguments of a recorded call, which must be to the given name."""
    if not isinstance(record, Record) or type(record).__name__ != name:
        raise ValueError(f"it has {type(record).__name__} in place of {name}")
    return record.args


def array(record: Record) -> np.ndarray:
    """Return a recorded array of numbers or of objects."""
    if type(record).__name__ == "_frombuffer":
        content, kind, shape, order = record.args
        return np.frombuffer(content, _number(kind)).reshape(shape, order=order)
    called("_reconstruct", record)
    _, shape, kind, column_major, content = record.state
    if not isinstance(content, list):
        order = "F" if column_major else "C"
        return np.frombuffer(_bytes(content), _number(kind)).reshape(shape, order=order)
    objects = np.empty(len(content), object)
    objects[:] = content
    # Objects are listed in row-major order, independent of the array's layout.
    return objects.reshape(shape)


def _bytes(content: Any) -> bytes:
    """Return bytes, which pickles of protocol 2 store as encoded text."""
    if not isinstance(content, Record):
        return content
    text, encoding = called("encode", content)
    if encoding != "latin1":
        raise ValueError(f"it has bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _number(kind: Record) -> str:
    """Return the NumPy code of a recorded dtype of numbers."""
    code, order = called("dtype", kind)[0], kind.state[1]
    if code not in _NUMBERS or order != "<":
        raise ValueError(f"it has numbers of the kind {order}{code}")
    return order + code
