"""A damaged history: the run goes on from its checkpoint, with the lines that are whole."""

import json
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from functional import Functional

from simfbo.core.exchange import Reason, Refusal
from simfbo.core.ledger import Ledger
from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.runs import checkpoint
from simfbo.runs.history import FILE, History
from simfbo.runs.lines import as_line, read_lines
from simfbo.runs.repair import _in_words
from simfbo.runs.runner import run

CLOCKS = ("seconds", "cpu_seconds", "crc32")
ROUNDS, KILLED = 12, 9


class Stop(BaseException):
    """What a kill looks like from within."""


class Nobody:
    """A federation that is asked nothing, and refuses somebody every third round."""

    def __init__(self):
        self.ledger, self.refusals, self.asked = Ledger(), [], 0


def step(state, federation, key):
    noise = np.asarray(state.x).sum() + state.y
    if int(state.y) % 3 == 2:
        one = Refusal(1, "step", 4, Reason.NO_REPLY, "did not reply")
        federation.refusals += [one, one]
    return Point(jnp.sin(state.x * 3 + noise), state.y + 1, state.v)


WALK = Functional(
    "walk", lambda x, y: Point(jnp.asarray(x), jnp.asarray(y), jnp.zeros(2)), step, ()
)


def go(directory, kill=None, **options):
    def on_round(t, record):
        if t == kill:
            raise Stop

    return run(
        WALK, Nobody(), np.arange(3.0), np.zeros(()), rounds=ROUNDS, every=2, on_round=on_round,
        evaluate=lambda state: {"sum": float(state.x.sum())}, directory=directory,
        checkpoint_seconds=0.0, **options,
    )  # fmt: skip


def lines(directory, *kinds):
    found = [json.loads(line) for line in (directory / FILE).read_bytes().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in CLOCKS}
        for line in found
        if line["kind"] in kinds
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return go(directory), directory


@pytest.fixture
def killed(tmp_path):
    """Return the folder of a run that was killed, and its history."""
    with pytest.raises(Stop):
        go(tmp_path, kill=KILLED)
    return tmp_path, tmp_path / FILE


def place_of(data, text):
    """Return a place within the line that holds a text."""
    return data.index(text) + len(text) // 2


def flipped(data, text):
    place = place_of(data, text)
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def shortened(data, text):
    place = place_of(data, text)
    return data[:place] + data[place + 1 :]


SECOND = b'"record", "round": 2'  # both checkpoints' histories hold it
DAMAGES = {
    "a flipped byte": (lambda data: flipped(data, SECOND), [2]),
    "a digit": (lambda data: data.replace(b'"round": 2, "comm', b'"round": 0, "comm'), [2]),
    "a lost byte": (lambda data: shortened(data, SECOND), [2]),
    "a lost line break": (
        lambda data: data.replace(b"\n", b"", 2).replace(b"}{", b"}\n{", 1),
        [0, 2],
    ),
    "a flipped checksum": (lambda data: flipped(data, b"crc32"), []),
    "the header": (lambda data: b"?" + data[1:], []),
    "truncation": (lambda data: data[: data.index(SECOND)], [2, 4, 6, 8]),
    "an empty file": (lambda data: b"", [0, 2, 4, 6, 8]),
    "zeros": (lambda data: b"\0" * len(data), [0, 2, 4, 6, 8]),
    "text": (lambda data: b"Dear reader,\n" * 99, [0, 2, 4, 6, 8]),
    "a line break": (lambda data: data.replace(SECOND, SECOND + b"\r"), [2]),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_run_goes_on_with_the_whole_lines(whole, killed, kind):
    history, directory = whole
    folder, book = killed
    harm, missing = DAMAGES[kind]
    damaged = harm(book.read_bytes())
    assert damaged != book.read_bytes()
    book.write_bytes(damaged)
    with pytest.warns(
        UserWarning, match=r"history\.jsonl was damaged: .* from iteration 8"
    ) as caught:
        again = go(folder, resume=True)
    assert len(caught) == 1
    np.testing.assert_array_equal(again.state.x, history.state.x)
    rest = [r for r in lines(directory, "record", "end") if r.get("round") not in missing]
    assert lines(folder, "record", "end") == rest
    (header,) = lines(folder, "header")
    assert header.pop("repaired")["lost"]["records"] == missing
    assert [header] == lines(directory, "header")
    assert again.records == History.load(folder).records
    kept = folder / f"{FILE}.damaged"
    assert kept.read_bytes() == damaged if damaged else not kept.exists()


def test_a_missing_history(whole, killed):
    history, _ = whole
    folder, book = killed
    book.unlink()
    with pytest.warns(UserWarning, match="the records of iterations 0, 2, 4, 6, 8 and 4 excluded"):
        again = go(folder, resume=True)
    np.testing.assert_array_equal(again.state.x, history.state.x)
    assert [r["round"] for r in again.records] == [10, 12]


def test_what_is_appended_does_not_matter(whole, killed):
    history, directory = whole
    folder, book = killed
    book.write_bytes(book.read_bytes() + b"\xff garbage \n" * 3)
    again = go(folder, resume=True)  # without a warning
    np.testing.assert_array_equal(again.state.x, history.state.x)
    kinds = "header", "record", "refusal", "end"
    assert lines(folder, *kinds) == lines(directory, *kinds)


@pytest.mark.parametrize("again", ["killed at once", "killed later", "damaged again"])
def test_a_repaired_run_can_be_killed_again(whole, killed, again):
    """Its checkpoint knows the repaired history, so that it resumes without a word."""
    history, directory = whole
    folder, book = killed
    book.write_bytes(flipped(book.read_bytes(), SECOND))
    with pytest.warns(UserWarning, match="the record of iteration 2 is lost"), pytest.raises(Stop):
        go(folder, resume=True, kill=KILLED if again == "killed at once" else KILLED + 2)
    if again == "damaged again":
        book.write_bytes(flipped(book.read_bytes(), b'"record", "round": 4'))
        with pytest.warns(UserWarning, match="the records of iterations 2, 4 are lost"):
            done = go(folder, resume=True)
    else:
        done = go(folder, resume=True)
    np.testing.assert_array_equal(done.state.x, history.state.x)
    missing = (2, 4) if again == "damaged again" else (2,)
    assert [r["round"] for r in done.records] == [t for t in range(0, 13, 2) if t not in missing]
    assert [r["round"] for r in done.refusals] == [r["round"] for r in history.refusals]
    assert lines(folder, "end") == lines(directory, "end")


def test_the_last_record_of_an_interrupted_run_is_not_kept(whole, tmp_path):
    def stop(t, record):
        if t == 7:
            raise KeyboardInterrupt

    run(WALK, Nobody(), np.arange(3.0), np.zeros(()), rounds=ROUNDS, every=2, on_round=stop,
        evaluate=lambda state: {"sum": float(state.x.sum())}, directory=tmp_path)  # fmt: skip
    book = tmp_path / FILE
    assert [line["round"] for line in lines(tmp_path, "record")] == [0, 2, 4, 6, 7]
    book.write_bytes(flipped(book.read_bytes(), SECOND))
    with pytest.warns(UserWarning, match="was damaged"):
        again = go(tmp_path, resume=True)
    assert [r["round"] for r in again.records] == [0, 4, 6, 8, 10, 12]


def test_without_a_checkpoint_a_damaged_history_is_left_alone(tmp_path):
    go(tmp_path)
    for file in checkpoint.files(tmp_path):
        file.unlink()
    book = tmp_path / FILE
    book.write_bytes(b"?" + book.read_bytes()[1:])
    before = book.read_bytes()
    with pytest.raises(UserError, match="is damaged and there is no checkpoint"):
        go(tmp_path, resume=True)
    assert book.read_bytes() == before


def test_checkpoints_without_a_history_are_a_run(tmp_path):
    go(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(UserError, match="already holds a run"):
        go(tmp_path)


def test_a_link_for_a_history_is_refused(tmp_path):
    target = tmp_path / "mine"
    target.write_text("keep")
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / FILE).symlink_to(target)
    for resume in (True, False):
        with pytest.raises(UserError, match=r"leads out of|already holds a run"):
            go(folder, resume=resume)
    assert target.read_text() == "keep"


def test_load_leaves_damaged_lines_out(whole, tmp_path):
    _, directory = whole
    data = (directory / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(flipped(data, SECOND))
    with pytest.warns(UserWarning, match="is damaged: what cannot be read is left out"):
        found = History.load(tmp_path)
    assert found.column("round") == [0, 4, 6, 8, 10, 12]
    (tmp_path / FILE).write_bytes(b"?" + data[1:])
    with pytest.raises(UserError, match="its first line is not a header"):
        History.load(tmp_path)
    newest = checkpoint.files(directory)[0]
    (tmp_path / newest.name).write_bytes(newest.read_bytes())
    with pytest.warns(UserWarning, match="is damaged"):
        found = History.load(tmp_path)
    assert found.column("round") == list(range(0, 13, 2))
    assert found.header["rounds"] == ROUNDS


def test_every_flipped_bit_of_a_line_is_noticed():
    line = as_line("record", {"round": 3, "loss": 0.25, "at": None})
    assert read_lines(line).whole == [{"kind": "record", "round": 3, "loss": 0.25, "at": None}]
    first = as_line("header", {})
    for bit in range(8 * (len(line) - 1)):  # all but its end
        harmed = bytearray(line)
        harmed[bit // 8] ^= 1 << bit % 8
        assert read_lines(first + bytes(harmed)).whole == [{"kind": "header"}], bytes(harmed)


def test_lines_of_older_versions_have_no_checksum():
    old = b'{"kind": "header", "rounds": 3}\n{"kind": "record", "round": 0}\n'
    new = as_line("record", {"round": 1})
    assert len(read_lines(old + new).whole) == 3
    later = read_lines(old + new + b'{"kind": "record", "round": 2}\n')
    assert (len(later.whole), later.damaged) == (3, 1)
    assert read_lines(old + b'{"kind": "rec').damaged == 0  # being written
    text = b'{"kind": "end"}'
    assert as_line("end", {}) == text[:-1] + b', "crc32": "%08x"}\n' % zlib.crc32(text)


def test_in_words():
    assert _in_words(list(range(9)), 0) == "the records of iterations 0, 1, 2, 3, 4, ... are lost"
    assert _in_words([], 1) == "1 excluded reply is lost"
