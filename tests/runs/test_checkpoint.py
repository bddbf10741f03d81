"""Checkpoints and variables on disk: every flipped bit and every cut is detected."""

import hashlib
import io
import os
import re
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core.problem import Point
from simfbo.errors import ResumableError, UserError
from simfbo.runs import checkpoint
from simfbo.runs.checkpoint import (
    DamagedError,
    decode,
    encode,
    files,
    load,
    load_variables,
    newest,
    restore,
    save,
    save_variables,
)
from simfbo.tasks.models import Linear

STATE = Point(
    x={"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.array([1, 2], jnp.int32)},
    y=jnp.array(2.5, jnp.float32),
    v=(jnp.array([True, False]), jnp.array([0.5, -3.0], jnp.bfloat16)),
)
MANIFEST = {"round": 7, "ledger": {"total": [1, 2]}, "text": "ä"}


def test_what_goes_in_comes_out():
    found = decode(encode(STATE, MANIFEST))
    assert found.manifest == {**MANIFEST, "format": 4}
    state = restore(found.arrays, STATE)
    np.testing.assert_array_equal(state.x["w"], STATE.x["w"])
    assert state.v[1].dtype == jnp.bfloat16
    assert state.v[1].tolist() == [0.5, -3.0]
    assert state.x["b"].dtype == jnp.int32
    assert state.y.shape == ()


def test_numpy_reads_it_without_us():
    with np.load(io.BytesIO(encode(STATE, MANIFEST)), allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored[".x['w']"], STATE.x["w"])
        assert b'"round": 7' in stored["manifest"].tobytes()


def test_the_archives_comment_is_the_digest_of_all_before_it():
    data = encode(STATE, MANIFEST)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.comment == hashlib.sha256(data[:-64]).hexdigest().encode() == data[-64:]
        assert archive.testzip() is None


def sealed(body):
    """Return bytes whose digest is right, whatever they are."""
    return body + hashlib.sha256(body).hexdigest().encode()


def test_an_intact_file_that_is_not_a_checkpoint_is_refused():
    pickled = io.BytesIO()
    np.savez(pickled, manifest=np.array([{"format": 4}], object))
    other = io.BytesIO()
    np.savez(other, a=np.ones(2))
    for body in (b"", b"text", pickled.getvalue(), other.getvalue()):
        with pytest.raises(DamagedError, match="it is intact, but not a checkpoint of simfbo"):
            decode(sealed(body))


def test_a_manifest_is_strict_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(STATE, {"seconds": float("nan")})


def test_every_bit_counts():
    """All single bit flips of a small file, one by one."""
    data = encode({"a": jnp.arange(2.0)}, {})
    for place in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[place] ^= 1 << bit
            with pytest.raises(DamagedError):
                decode(bytes(broken))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200, -1, -64])
def test_every_cut_is_detected(size):
    with pytest.raises(DamagedError, match="its digest is wrong"):
        decode(encode(STATE, MANIFEST)[:size])


def test_appended_bytes_are_detected():
    with pytest.raises(DamagedError):
        decode(encode(STATE, MANIFEST) + b"\0")


@pytest.mark.parametrize("other", [3, 5])
def test_another_format_is_refused(monkeypatch, other):
    monkeypatch.setattr(checkpoint, "FORMAT", other)
    data = encode(STATE, MANIFEST)
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"has format {other}, .* reads 4: start the run anew"):
        decode(data)


def test_objects_are_never_pickled():
    with pytest.raises(ValueError, match="Object arrays"):
        encode({"a": np.array([{}])}, {})


@pytest.mark.parametrize(
    "other",
    [
        STATE._replace(y=jnp.zeros(2, jnp.float32)),
        STATE._replace(y=jnp.zeros((), jnp.float16)),
        STATE._replace(y={"z": STATE.y}),
        STATE._replace(v=STATE.v[:1]),
    ],
)
def test_another_state_is_refused(other):
    with pytest.raises(UserError, match="does not fit the state of this task and algorithm"):
        restore(decode(encode(STATE, MANIFEST)).arrays, other)


def test_the_newest_two_are_kept(tmp_path):
    for step in (1, 2, 10):
        assert save(tmp_path, step, STATE, {"round": step}) == files(tmp_path)[0]
    assert [file.name for file in files(tmp_path)] == [
        "checkpoint-0000000010.npz",
        "checkpoint-0000000002.npz",
    ]
    assert sorted(os.listdir(tmp_path)) == sorted(file.name for file in files(tmp_path))
    assert newest(tmp_path, lambda found: found.manifest["round"]) == 10


def test_later_ones_are_removed(tmp_path):
    kept = [save(tmp_path, step, STATE, {}) for step in (1, 2)]
    checkpoint.remove_after(tmp_path, 2)
    assert files(tmp_path) == kept[::-1]
    checkpoint.remove_after(tmp_path, 1)
    assert files(tmp_path) == kept[:1]
    checkpoint.remove_after(tmp_path, 0)
    assert files(tmp_path) == []


def damage(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_a_damaged_one_falls_back_with_a_warning(tmp_path):
    save(tmp_path, 1, STATE, {"round": 1})
    last = save(tmp_path, 2, STATE, {"round": 2})
    damage(last)
    sentence = f"{last} cannot be used (its digest is wrong); trying the previous checkpoint."
    with pytest.warns(UserWarning, match=re.escape(sentence)) as warned:
        assert newest(tmp_path, lambda found: found.manifest["round"]) == 1
    assert warned[0].filename == __file__


@pytest.mark.filterwarnings("ignore:.*cannot be used")
def test_both_damaged_is_one_sentence(tmp_path):
    for step in (1, 2):
        damage(save(tmp_path, step, STATE, {}))
    with pytest.raises(UserError) as caught:
        newest(tmp_path, lambda found: found)
    assert str(caught.value) == (
        f"No checkpoint in {tmp_path} can be used: restore the folder from a backup, or start "
        "again in another folder."
    )


def test_without_checkpoints_there_is_none(tmp_path):
    (tmp_path / "checkpoint-1.npz").write_bytes(b"not ours by its name")
    assert newest(tmp_path, lambda found: found) is None


def test_an_unreadable_file_is_damaged(tmp_path):
    (tmp_path / "checkpoint-0000000001.npz").mkdir()
    with pytest.raises(DamagedError, match="it cannot be read: Is a directory"):
        load(tmp_path / "checkpoint-0000000001.npz")


def test_tidy_removes_what_a_killed_writer_left(tmp_path):
    (tmp_path / ".checkpoint-0000000009.npz.tmp").write_bytes(b"half")
    kept = [save(tmp_path, step, STATE, {}).name for step in (3, 4)]
    (tmp_path / "checkpoint-0000000001.npz").write_bytes(b"killed before this was removed")
    checkpoint.tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == kept


def test_a_full_disk_leaves_the_old_one(tmp_path, monkeypatch):
    old = save(tmp_path, 1, STATE, {"round": 1})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResumableError) as caught:
        save(tmp_path, 2, STATE, {"round": 2})
    assert str(caught.value) == (
        f"{tmp_path / 'checkpoint-0000000002.npz'} could not be written (No space left on device), "
        "the previous checkpoint is intact: free some space, then continue the run with "
        "resume=True."
    )
    assert caught.value.directory == tmp_path
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [old.name]
    assert load(old).manifest["round"] == 1


# Variables

NESTED = (
    {"deep": [Linear(np.arange(6.0).reshape(2, 3), np.ones(3, np.float32)), np.int32(4)]},
    (np.array([1, 2], np.int8), {"a": np.array(2.5), "b.c": np.zeros((0, 2))}),
)


def test_variables_come_back_as_they_were(tmp_path):
    file = tmp_path / "variables.npz"
    save_variables(file, *NESTED)
    like = jax.tree.map(np.zeros_like, NESTED)
    found = load_variables(str(file), *like)
    assert jax.tree.structure(found) == jax.tree.structure(NESTED)
    for saved, loaded in zip(*map(jax.tree.leaves, (NESTED, found)), strict=True):
        np.testing.assert_array_equal(saved, loaded)
        assert saved.dtype == loaded.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["variables.npz"]


@pytest.mark.parametrize("other", [(np.zeros(1), np.zeros(1)), (NESTED[1], NESTED[0])])
def test_variables_of_another_task(tmp_path, other):
    file = tmp_path / "variables.npz"
    save_variables(file, *NESTED)
    with pytest.raises(UserError) as caught:
        load_variables(file, *other)
    assert str(caught.value) == (
        f"{file} holds variables of other shapes: is it from another task?"
    )


def test_saving_variables_replaces_the_file(tmp_path):
    file = tmp_path / "variables.npz"
    save_variables(file, np.zeros(1), np.zeros(1))
    save_variables(file, np.ones(1), np.ones(1))
    assert load_variables(file, np.zeros(1), np.zeros(1)) == (1.0, 1.0)


def _npy():
    buffer = io.BytesIO()
    np.save(buffer, np.ones(2))
    return buffer.getvalue()


@pytest.mark.parametrize("content", [None, b"", b"text", b"PK\x03\x04", _npy()])
def test_a_file_without_variables_is_one_sentence(tmp_path, content):
    file = tmp_path / "variables.npz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{file} cannot be read as variables: ")):
        load_variables(file, np.zeros(1), np.zeros(1))
