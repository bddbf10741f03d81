"""Tests of the reader of pickled data frames: what it reads and what it refuses."""

import lzma
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simfbo.datasets import pickled_frames as frames
from simfbo.datasets import records
from simfbo.errors import UserError

EXPECTED = b"""\
rownames,SES,Sex,MathAch,note
1,0.1,Female,1e+300,plain
2,0.3333333333333333,Male,5e-324,"with, comma"
3,-2.0,Female,0.0,"with ""quotes"" too"
"""
# The names under which pandas 2 and NumPy 1 wrote the same pickle, as text in protocol 3.
OLDER = {
    b"cpandas\nDataFrame\n": b"cpandas.core.frame\nDataFrame\n",
    b"cpandas\nIndex\n": b"cpandas.core.indexes.base\nIndex\n",
    b"cpandas\nRangeIndex\n": b"cpandas.core.indexes.range\nRangeIndex\n",
    b"cnumpy._core.": b"cnumpy.core.",
}


class Call:
    """Pickled as a call of a function, which an ordinary unpickler would execute."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


def frame() -> Any:
    """Return a data frame whose columns lie in blocks of three kinds."""
    pandas = pytest.importorskip("pandas")
    columns = {
        "rownames": [1, 2, 3],
        "SES": [0.1, 1 / 3, -2.0],
        "Sex": pandas.Series(["Female", "Male", "Female"], dtype=object),
        "MathAch": [1e300, 5e-324, 0.0],
        "note": pandas.Series(["plain", "with, comma", 'with "quotes" too'], dtype=object),
    }
    made = pandas.DataFrame(columns)
    made.columns = made.columns.astype(object)
    return made


def refusal(data: bytes) -> str:
    """Return the error message for a compressed pickle."""
    with pytest.raises(UserError) as error:
        frames.csv_originals({"Exam.pkl.compress": data})
    text = str(error.value)
    assert text.startswith("Exam.pkl.compress is not a readable data frame (")
    assert "): download its package again" in text
    assert "\n" not in text
    assert not re.search(r"[.?!] [A-Z]", text)
    return text


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_frame_becomes_the_text_that_pandas_writes(protocol: int) -> None:
    data = pickle.dumps(frame(), protocol=protocol)
    assert frames.frame_csv(data) == EXPECTED
    assert pickle.loads(data).to_csv(index=False, lineterminator="\n").encode() == EXPECTED


def test_frame_of_older_versions_is_read_without_a_warning() -> None:
    data = pickle.dumps(frame(), protocol=3)
    for new, old in OLDER.items():
        assert new in data
        data = data.replace(new, old)
    assert frames.frame_csv(data) == EXPECTED


@pytest.mark.parametrize("order", ["C", "F"])
def test_both_layouts_of_a_block_are_read(order: str) -> None:
    pandas = pytest.importorskip("pandas")
    numbers = np.array([[1, 2, 3], [4, 5, 6]], order=order)
    names = pandas.Index(["a", "b", "c"], dtype=object)
    for kind in (np.int64, object):
        values = numbers.astype(kind, order=order)
        for protocol in (3, 5):
            data = pickle.dumps(pandas.DataFrame(values, columns=names), protocol=protocol)
            assert frames.frame_csv(data) == b"a,b,c\n1,2,3\n4,5,6\n"


def test_members_become_files_named_as_the_frame() -> None:
    member = lzma.compress(pickle.dumps(frame(), protocol=5))
    assert frames.csv_originals({"Exam.pkl.compress": member}) == {"Exam.csv": EXPECTED}


def test_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps(Call(os.system, f"touch {mark}"))
    text = refusal(lzma.compress(data))
    assert f"it asks for '{os.system.__module__}.system', which was not run" in text
    assert not mark.exists()
    assert pickle.loads(data) == 0
    assert mark.exists()


@pytest.mark.parametrize("function", [eval, getattr, __import__, np.load, np.zeros, bytearray])
def test_any_other_name_is_refused(function: Any) -> None:
    text = refusal(lzma.compress(pickle.dumps(Call(function, "1"))))
    assert f".{function.__name__}', which was not run" in text


@pytest.mark.parametrize("name", ["DataFrame.to_csv", "DataFrame.__init__", "dataframe"])
def test_nothing_is_reached_through_a_permitted_name(name: str) -> None:
    data = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(text)]) + text.encode() for text in ("pandas.core.frame", name)
    )
    text = refusal(lzma.compress(data + b"\x93."))
    assert f"it asks for 'pandas.core.frame.{name}'" in text


def test_hostile_part_of_a_frame_is_refused(tmp_path: Path) -> None:
    hostile = frame()
    hostile.attrs["note"] = Call(os.mkdir, str(tmp_path / "made"))
    assert "mkdir', which was not run" in refusal(lzma.compress(pickle.dumps(hostile)))
    assert not (tmp_path / "made").exists()


def test_bytes_never_become_objects() -> None:
    rebuild = np.zeros(1).__reduce_ex__(5)[0]
    data = pickle.dumps(Call(rebuild, bytearray(8), np.dtype(object), (1,), "C"), protocol=5)
    record = records.load(data, frames._NAMES)
    with pytest.raises(ValueError, match=r"numbers of the kind \|O8"):
        records.array(record)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.array([1, 2], np.float32), "numbers of the kind <f4"),
        (np.array([1, 2], ">f8"), "numbers of the kind >f8"),
        (np.array([1j, 2j]), "numbers of the kind <c16"),
        (np.array(["a", None], object), "a value of type NoneType"),
        (np.array(["a", True], object), "a value of type bool"),
    ],
)
def test_other_kinds_of_values_are_refused(values: np.ndarray, reason: str) -> None:
    pandas = pytest.importorskip("pandas")
    odd = pandas.DataFrame({"x": pandas.Series(values, dtype=values.dtype)})
    odd.columns = odd.columns.astype(object)
    assert reason in refusal(lzma.compress(pickle.dumps(odd)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no compression",
        lzma.compress(b""),
        lzma.compress(pickle.dumps({"a": 1})),
        lzma.compress(pickle.dumps(np.zeros(3))),
        lzma.compress(pickle.dumps([1, 2, 3]))[:-5],
        lzma.compress(pickle.dumps([1, 2, 3])[:-3]),
    ],
)
def test_anything_but_a_frame_is_refused(data: bytes) -> None:
    refusal(data)
