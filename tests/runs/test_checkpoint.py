"""Checkpoints: every flipped bit and every cut is noticed, and a file is whole or not there."""

import hashlib
import io
import os
import re
import stat
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from simfbo.core.problem import Point
from simfbo.errors import UserError
from simfbo.runs import checkpoint
from simfbo.runs.checkpoint import DamagedError, decode, encode, files, load, newest, restore, save

STATE = Point(
    x={"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.array([1, 2], jnp.int32)},
    y=jnp.array(2.5, jnp.float32),
    v=(jnp.array([True, False]), jnp.array([0.5, -3.0], jnp.bfloat16)),
)
MANIFEST = {"round": 7, "ledger": {"total": [1, 2]}, "text": "ä"}


def test_what_goes_in_comes_out():
    found = decode(encode(STATE, MANIFEST))
    assert found.manifest == {**MANIFEST, "format": 1}
    state = restore(found.arrays, STATE)
    for a, b in zip(jnp.ravel(state.x["w"]), jnp.ravel(STATE.x["w"])):
        assert a == b
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


def test_what_is_whole_but_not_ours_is_refused():
    pickled = io.BytesIO()
    np.savez(pickled, manifest=np.array([{"format": 1}], object))
    other = io.BytesIO()
    np.savez(other, a=np.ones(2))
    for body in (b"", b"text", pickled.getvalue(), other.getvalue()):
        with pytest.raises(DamagedError, match="no checkpoint of simfbo"):
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
def test_every_cut_is_noticed(size):
    with pytest.raises(DamagedError, match="its digest is wrong"):
        decode(encode(STATE, MANIFEST)[:size])


def test_more_bytes_are_noticed():
    with pytest.raises(DamagedError):
        decode(encode(STATE, MANIFEST) + b"\0")


def test_another_format_is_not_guessed_at(monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    data = encode(STATE, MANIFEST)
    monkeypatch.undo()
    with pytest.raises(DamagedError, match="its format is 2, this version reads 1"):
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
    with pytest.raises(UserError, match="holds another state"):
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


def test_later_ones_are_forgotten(tmp_path):
    kept = [save(tmp_path, step, STATE, {}) for step in (1, 2)]
    checkpoint.forget_after(tmp_path, 2)
    assert files(tmp_path) == kept[::-1]
    checkpoint.forget_after(tmp_path, 1)
    assert files(tmp_path) == kept[:1]
    checkpoint.forget_after(tmp_path, 0)
    assert files(tmp_path) == []


def damage(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_a_damaged_one_falls_back_with_a_warning(tmp_path):
    save(tmp_path, 1, STATE, {"round": 1})
    last = save(tmp_path, 2, STATE, {"round": 2})
    damage(last)
    sentence = f"{last} cannot be used (its digest is wrong); the one before it is tried."
    with pytest.warns(UserWarning, match=re.escape(sentence)):
        assert newest(tmp_path, lambda found: found.manifest["round"]) == 1


@pytest.mark.filterwarnings("ignore:.*cannot be used")
def test_both_damaged_is_one_sentence(tmp_path):
    for step in (1, 2):
        damage(save(tmp_path, step, STATE, {}))
    with pytest.raises(UserError) as caught:
        newest(tmp_path, lambda found: found)
    assert str(caught.value) == (
        f"No checkpoint in {tmp_path} can be used: restore the folder from a backup, or run anew "
        "into another one."
    )


def test_none_is_none(tmp_path):
    (tmp_path / "checkpoint-1.npz").write_bytes(b"not ours by its name")
    assert newest(tmp_path, lambda found: found) is None


def test_what_cannot_be_read_is_damaged(tmp_path):
    (tmp_path / "checkpoint-0000000001.npz").mkdir()
    with pytest.raises(DamagedError, match="it cannot be read: Is a directory"):
        load(tmp_path / "checkpoint-0000000001.npz")


def test_temporary_files_go(tmp_path):
    (tmp_path / ".checkpoint-0000000009.npz.tmp").write_bytes(b"half")
    kept = [save(tmp_path, step, STATE, {}).name for step in (3, 4)]
    (tmp_path / "checkpoint-0000000001.npz").write_bytes(b"killed before this was removed")
    checkpoint.tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == kept


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_one(tmp_path, monkeypatch, call):
    old = save(tmp_path, 1, STATE, {"round": 1})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(UserError) as caught:
        save(tmp_path, 2, STATE, {"round": 2})
    assert str(caught.value) == (
        f"{tmp_path / 'checkpoint-0000000002.npz'} could not be written (No space left on device): "
        "make room; the checkpoint before it is intact, and --resume goes on from there."
    )
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [old.name]
    assert load(old).manifest["round"] == 1


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The order that makes it safe: write, sync the file, rename, sync the folder."""
    calls = []
    sync, move = os.fsync, os.replace

    def fsync(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        calls.append(("sync", kind, sorted(os.listdir(tmp_path))))
        sync(handle)

    def replace(a, b):
        calls.append(("rename", os.path.basename(a), os.path.basename(b)))
        move(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, 1, STATE, {})
    name, temporary = "checkpoint-0000000001.npz", ".checkpoint-0000000001.npz.tmp"
    assert calls == [
        ("sync", "file", [temporary]),
        ("rename", temporary, name),
        ("sync", "folder", [name]),
    ]
