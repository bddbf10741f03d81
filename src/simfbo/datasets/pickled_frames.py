"""Pickled data frames as CSV, read without pandas and without executing the pickle."""

import csv
import io
import lzma
from collections.abc import Iterator, Mapping

import numpy as np

from simfbo.datasets import records
from simfbo.datasets.records import CORES, Record
from simfbo.errors import UserError

_SUFFIX = ".pkl.compress"
# pandas 3 moved some of the names; both locations are accepted.
_NAMES = {
    ("builtins", "slice"),
    *records.ARRAYS,
    *((f"{core}.numeric", "_frombuffer") for core in CORES),
    *(("pandas", name) for name in ("DataFrame", "Index", "RangeIndex")),
    ("pandas._libs.internals", "_unpickle_block"),
    ("pandas.core.frame", "DataFrame"),
    ("pandas.core.indexes.base", "Index"),
    ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.indexes.range", "RangeIndex"),
    ("pandas.core.internals.managers", "BlockManager"),
}


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

    Equal values give equal bytes on every machine, so the result has a fixed digest.

    Args:
        data: The uncompressed pickle.
    """
    columns = _columns(records.load(data, _NAMES))
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


def _columns(frame: Record) -> dict[str, np.ndarray]:
    """Return the columns of a recorded data frame in order."""
    blocks, axes = records.called("BlockManager", frame.state["_mgr"])
    names = records.array(records.called("_new_Index", axes[0])[1]["data"]).tolist()
    columns: dict[str, np.ndarray] = {}
    for block in blocks:
        values, location, _ = records.called("_unpickle_block", block)
        for index, column in zip(_places(location, len(names)), records.array(values), strict=True):
            columns[names[index]] = column
    return {name: columns[name] for name in names}


def _places(record: Record, count: int) -> Iterator[int]:
    """Return the indices of a block's columns among `count`."""
    if type(record).__name__ == "slice":
        return iter(range(count)[slice(*record.args)])
    return iter(records.array(record).tolist())


def _cell(value: object) -> str:
    """Format a value such that it can be read back exactly."""
    if isinstance(value, str):
        return value
    if type(value) not in (int, float):
        raise ValueError(f"it has a value of type {type(value).__name__}")
    return repr(value)
