"""The history on disk, and how it is written."""

import base64
import math
import os
import pickle
import re

import pandas
import pytest

from simfbo.errors import ResumableError, UserError
from simfbo.runs.history import BOOKKEEPING, FILE, History, Writer, versions

HEADER = {"algorithm": "SimFBO", "seed": 3, "config": {"a": [1]}}
RECORDS = [{"round": 0, "seconds": 0.0, "loss": 2.0}, {"round": 1, "seconds": 0.5, "loss": 1.0}]
REFUSAL = {"round": 1, "exchange": 1, "client_step": "step", "client": 4, "reason": "no-reply",
           "text": "did not reply"}  # fmt: skip
END = {"status": "finished"}


def write(directory):
    writer = Writer(directory)
    writer.write("header", HEADER)
    writer.write("record", *RECORDS)
    writer.write("refusal", REFUSAL)
    writer.write("end", END)
    writer.close()
    return directory / FILE


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "run")


def test_load_gives_back_what_was_written(file):
    for path in (file, file.parent, str(file.parent)):
        loaded = History.load(path)
        assert loaded == History(HEADER, RECORDS, END, refusals=[REFUSAL])


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_an_incomplete_last_line_is_ignored(file, cut):
    *whole, last, _, _ = file.read_text().splitlines()
    file.write_text("\n".join([*whole, last[:cut]]))
    assert History.load(file) == History(HEADER, RECORDS[:-1])


def test_a_line_cut_inside_a_letter_is_ignored(file):
    file.write_bytes(file.read_bytes() + '{"kind": "é'.encode()[:-1])
    assert History.load(file).records == RECORDS


def test_numbers_that_are_not_finite_are_null_on_disk_and_nan_in_memory(tmp_path):
    writer = Writer(tmp_path)
    writer.write("header", {"config": {"limit": math.inf}})
    writer.write("record", {"loss": math.nan}, {"loss": -math.inf})
    writer.close()
    assert re.findall("NaN|Infinity", (tmp_path / FILE).read_text()) == []
    loaded = History.load(tmp_path)
    assert loaded.header == {"config": {"limit": None}}
    assert all(math.isnan(value) for value in loaded.column("loss"))


@pytest.mark.parametrize("name", ["nothing", "", "folder"])
def test_a_path_without_a_run(tmp_path, name):
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(UserError) as caught:
        History.load(path)
    assert str(caught.value) == f"There is no run at {path}: pass the folder of a run."


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"[1, 2]\n", b'{"kind": "record"}\n', b"{}\n", b"\x93NUMPY\xff\n"]
)
def test_a_file_that_is_not_a_history(tmp_path, content):
    file = tmp_path / "other.txt"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        History.load(file)
    assert str(caught.value) == (
        f"{file} is not a history of simfbo: its first line is not a header."
    )


def test_frame(file):
    frame = History.load(file).frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["round", "seconds", "loss"]
    assert frame["loss"].tolist() == [2.0, 1.0]


def test_column_of_an_unknown_name(file):
    history = History.load(file)
    assert history.column("loss") == [2.0, 1.0]
    with pytest.raises(UserError, match=r"^The history has no 'x'; it has round, seconds, loss\.$"):
        history.column("x")
    with pytest.raises(UserError, match=r"^The history has no 'x'; it has no records yet\.$"):
        History({}).column("x")


def test_a_run_is_never_overwritten(file):
    before = file.read_bytes()
    with pytest.raises(ResumableError) as caught:
        Writer(file.parent)
    folder = file.parent
    assert str(caught.value) == (
        f"{folder} already holds a run: choose another folder, or continue the run with "
        "resume=True."
    )
    assert file.read_bytes() == before
    again = pickle.loads(pickle.dumps(caught.value))  # workers of a sweep send their errors so
    assert (str(again), again.directory) == (str(caught.value), folder)


def test_one_writer_at_a_time(file):
    writer = Writer(file.parent, resume=True)
    with pytest.raises(UserError) as caught:
        Writer(file.parent, resume=True)
    assert str(caught.value) == (
        f"The run in {file.parent} is in progress in another process: wait until it ends."
    )
    writer.close()
    Writer(file.parent, resume=True).close()


def test_lines_can_be_cut_off_and_written_again(file):
    before = file.read_bytes()
    writer = Writer(file.parent, resume=True)
    assert writer.position == len(before)
    writer.cut(before.index(b'{"kind": "end"'))
    writer.write("end", END)
    assert writer.position == len(before)
    writer.close()
    assert file.read_bytes() == before


def test_without_a_folder_nothing_is_written():
    writer = Writer(None)
    writer.write("header", HEADER)
    writer.cut(3)
    writer.sync()
    assert writer.position == 0
    writer.close()


def test_a_full_disk_is_one_sentence(tmp_path):
    writer = Writer(tmp_path)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), writer._file.fileno())
    with pytest.raises(ResumableError) as caught:
        writer.write("record", {"a": 1})
    assert str(caught.value) == (
        f"{tmp_path / FILE} could not be written (No space left on device): free some space, then "
        "continue the run with resume=True."
    )
    assert caught.value.directory == tmp_path
    writer.close()  # what is left in the buffer raises no second error


def test_versions(monkeypatch):
    packages = {"simfbo", "jax", "jaxlib", "optax", "numpy"}
    assert set(versions()) == {"python", "threads", *packages}
    assert "not installed" not in versions().values()
    monkeypatch.setenv("PJRT_NPROC", "77")
    assert versions()["threads"] == "77"


@pytest.fixture
def small_history():
    header = {**HEADER, "algorithm": "<i>mine", "rounds": 4, "config": {}}
    records = [
        {"round": t, "communication_rounds": t, "bytes_down": t, "bytes_up": t, "seconds": t / 2,
         "loss": 1 / (1 + t)}
        for t in range(5)
    ]  # fmt: skip
    return History(header, records, END)


def test_a_notebook_shows_how_a_run_ended(small_history):
    text = small_history._repr_html_()
    assert "finished after 4 of 4 iterations" in text
    assert "&lt;i&gt;" in text
    assert "<i>" not in text
    (data,) = re.findall(r'<img [^>]*src="data:image/svg\+xml;base64,([^"]+)">', text)
    assert b"&lt;i&gt;mine" in base64.b64decode(data)
    assert small_history.plot().axes[0].lines


def test_a_notebook_shows_a_run_without_metrics(small_history):
    small_history.records = [{key: one[key] for key in BOOKKEEPING if key in one}
                             for one in small_history.records]  # fmt: skip
    assert "<img" not in small_history._repr_html_()
