"""The atomic write, folders and locks."""

import os
import stat
import subprocess
import sys

import pytest

from simfbo.errors import UserError
from simfbo.runs.files import lock, make_folder, write_atomic


def test_bytes_and_text_replace_what_was_there(tmp_path):
    file = tmp_path / "a.txt"
    write_atomic(file, b"\x00\xff")
    assert file.read_bytes() == b"\x00\xff"
    write_atomic(file, "ä\n")
    assert file.read_bytes() == b"\xc3\xa4\n"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_leftover_of_a_killed_writer_does_not_matter(tmp_path):
    (tmp_path / ".a.txt.tmp").write_bytes(b"half, and longer than the new content")
    write_atomic(tmp_path / "a.txt", b"new")
    assert (tmp_path / "a.txt").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The order that makes it safe: write, sync the file, rename, sync the folder."""
    calls = []
    sync, move = os.fsync, os.replace

    def fsync(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        calls.append(("sync", kind, {p.name: p.read_bytes() for p in tmp_path.iterdir()}))
        sync(handle)

    def replace(a, b):
        calls.append(("rename", os.path.basename(a), os.path.basename(b)))
        move(a, b)

    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_atomic(tmp_path / "a", b"new")
    assert calls == [
        ("sync", "file", {"a": b"old", ".a.tmp": b"new"}),
        ("rename", ".a.tmp", "a"),
        ("sync", "folder", {"a": b"new"}),
    ]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "a", b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old"}


def test_a_system_that_cannot_sync_folders_writes_all_the_same(tmp_path, monkeypatch):
    plain = os.open

    def refuse(path, *arguments):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied")
        return plain(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_make_folder(tmp_path):
    for _ in range(2):
        make_folder(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError) as caught:
            make_folder(path)
        assert str(caught.value) == f"Cannot write to the folder {path}: choose another one."


def test_a_folder_without_write_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(UserError, match="Cannot write to the folder"):
        make_folder(tmp_path)


def test_a_lock_lasts_until_its_file_is_closed(tmp_path):
    with open(tmp_path / "a", "ab") as second:
        with open(tmp_path / "a", "ab") as first:
            assert lock(first)
            assert not lock(second)
        assert lock(second)


def test_importing_it_does_not_import_jax():
    """Studies write files in a parent process that leaves JAX to its workers."""
    script = "import sys, simfbo.runs.files, simfbo.runs.history; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_without_locks_a_file_counts_as_locked(tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError("no locks here")

    with open(tmp_path / "a", "ab") as file:
        with monkeypatch.context() as patch:
            patch.setattr("fcntl.flock", refuse)  # a file system without locks
            assert lock(file) is True
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "fcntl", None)  # a system without them
            assert lock(file) is True
