"""Checkpoints: one npz file per step, with a manifest inside and a digest of the whole.

A file appears under its name only when it is complete and on the disk: it is written to a temporary
name, synced, renamed, and the directory synced. The archive's comment is the SHA-256 of everything
before it, so any changed bit is noticed, and `numpy.load` still opens the file. Nothing is pickled.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.gate import as_arrays
from simfbo.core.problem import PyTree
from simfbo.errors import UserError

KEPT = 2
FORMAT = 1
_DIGITS = 64  # of a SHA-256 in hexadecimal
_MANIFEST = "manifest"
_NAME = re.compile(r"checkpoint-(\d{10})\.npz")
T = TypeVar("T")


class Checkpoint(NamedTuple):
    """What a file holds: the arrays by name, and everything else as JSON values."""

    arrays: dict[str, np.ndarray]
    manifest: dict[str, Any]


class DamagedError(Exception):
    """A checkpoint that cannot be trusted; the message says what is wrong with it."""


def save(directory: Path, step: int, tree: PyTree, manifest: Mapping[str, Any]) -> Path:
    """Return the file that now holds a state; of older ones in the folder, one is kept.

    Args:
        directory: an existing folder.
        step: orders the files; the newest has the largest.
        tree: the arrays.
        manifest: everything else, as JSON values.

    Returns:
        The file, on the disk when this returns.
    """
    file = directory / _name(step)
    try:
        put(file, encode(tree, manifest))
    except OSError as error:
        raise UserError(
            f"{file} could not be written ({error.strerror}): make room; the checkpoint before "
            "it is intact, and --resume goes on from there."
        ) from None
    _keep_newest(directory)
    return file


def newest(directory: Path, read: Callable[[Checkpoint], T]) -> T | None:
    """Return what `read` makes of the newest sound checkpoint; None where there is none at all.

    A damaged file, or one that `read` refuses with `DamagedError`, is passed over with a warning.
    """
    found = files(directory)
    for file in found:
        try:
            return read(load(file))
        except DamagedError as error:
            warnings.warn(
                f"{file} cannot be used ({error}); the one before it is tried.", stacklevel=2
            )
    if found:
        raise UserError(
            f"No checkpoint in {directory} can be used: restore the folder from a backup, or run "
            "anew into another one."
        )
    return None


def files(directory: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first."""
    found = [path for path in directory.glob("checkpoint-*.npz") if _NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def forget_after(directory: Path, step: int) -> None:
    """Remove the checkpoints of later steps, which were passed over."""
    for file in files(directory):
        if file.name > _name(step):
            file.unlink(missing_ok=True)


def tidy(directory: Path) -> None:
    """Remove what a writer that was killed has left."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    _keep_newest(directory)


def _keep_newest(directory: Path) -> None:
    for old in files(directory)[KEPT:]:
        old.unlink(missing_ok=True)


def put(file: Path, data: bytes) -> None:
    """Put a file in its place in one step, and on the disk: there is the old one or the new."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # a system that cannot sync folders
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def encode(tree: PyTree, manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a checkpoint file."""
    leaves = as_arrays(tree)
    arrays = {name: _storable(leaf) for name, leaf in leaves.items()}
    kinds = {name: str(leaf.dtype) for name, leaf in leaves.items()}
    text = json.dumps({**manifest, "format": FORMAT, "dtypes": kinds}, allow_nan=False)
    members = {_MANIFEST: np.frombuffer(text.encode(), np.uint8), **arrays}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                np.lib.format.write_array(out, array, allow_pickle=False)
        archive.comment = b"0" * _DIGITS
    body = buffer.getvalue()[:-_DIGITS]
    return body + _digest(body)


def load(file: Path) -> Checkpoint:
    """Return the checkpoint in a file, after a check of its digest."""
    try:
        return decode(file.read_bytes())
    except OSError as error:
        raise DamagedError(f"it cannot be read: {error.strerror}") from None


def decode(data: bytes) -> Checkpoint:
    """Return the checkpoint in a file's bytes; raise `DamagedError` where a bit is wrong."""
    body, found = data[:-_DIGITS], data[-_DIGITS:]
    if len(found) < _DIGITS or found != _digest(body):
        raise DamagedError("its digest is wrong")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        manifest = json.loads(arrays.pop(_MANIFEST).tobytes())
    except (ValueError, KeyError, zipfile.BadZipFile):
        raise DamagedError("it is whole, but no checkpoint of simfbo") from None
    if manifest["format"] != FORMAT:
        raise DamagedError(f"its format is {manifest['format']}, this version reads {FORMAT}")
    kinds = manifest.pop("dtypes")
    return Checkpoint({n: a.view(jnp.dtype(kinds[n])) for n, a in arrays.items()}, manifest)


def restore(arrays: Mapping[str, np.ndarray], like: PyTree) -> Any:
    """Return the arrays in the structure of `like`; names, shapes and dtypes must agree."""
    wanted = as_arrays(like)
    if list(wanted) != list(arrays) or any(
        (a.shape, a.dtype) != (arrays[n].shape, arrays[n].dtype) for n, a in wanted.items()
    ):
        raise UserError(
            "The checkpoint holds another state than this task and algorithm have: resume with the "
            "settings that the run was begun with."
        )
    leaves = [jnp.asarray(arrays[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _name(step: int) -> str:
    return f"checkpoint-{step:010d}.npz"


def _storable(leaf: np.ndarray) -> np.ndarray:
    """Return an array whose dtype the npy format knows; bfloat16 and its like go as bytes."""
    return leaf.view(f"V{leaf.dtype.itemsize}") if leaf.dtype.kind == "V" else leaf


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
