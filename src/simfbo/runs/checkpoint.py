"""Checkpoints and variables on disk: npz files that NumPy can read, without pickle.

A checkpoint is one file per step, with a manifest inside. The archive's comment is the SHA-256 of
everything before it, so that any changed bit is detected. Files are written atomically: an existing
file is complete.
"""

import hashlib
import io
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.problem import PyTree
from simfbo.core.trees import as_arrays
from simfbo.errors import ResumableError, UserError
from simfbo.runs.files import TEMPORARY, Json, write_atomic

KEPT = 2
FORMAT = 4  # the draws of the server in JAX
_DIGITS = 64  # of a SHA-256 in hexadecimal
_MANIFEST = "manifest"
_NAME = re.compile(r"checkpoint-(\d{10})\.npz")
T = TypeVar("T")


class Checkpoint(NamedTuple):
    """The content of a file: arrays by name, everything else as JSON values."""

    arrays: dict[str, np.ndarray]
    manifest: Json


class DamagedError(Exception):
    """A corrupt checkpoint; the message gives the reason."""


def save(directory: Path, step: int, tree: PyTree, manifest: Json) -> Path:
    """Write a checkpoint and remove all older ones but the last.

    Args:
        directory: an existing folder.
        step: orders the files; the newest has the largest.
        tree: the arrays.
        manifest: everything else, as JSON values.

    Returns:
        The file, already synced to disk.
    """
    file = directory / _name(step)
    try:
        write_atomic(file, encode(tree, manifest))
    except OSError as error:
        failed = (
            f"{file} could not be written ({error.strerror}), the previous checkpoint is intact: "
            "free some space, then"
        )
        raise ResumableError(failed, directory) from None
    _keep_newest(directory)
    return file


def newest(directory: Path, *reads: Callable[[Checkpoint], T]) -> T | None:
    """Apply a reader to the newest usable checkpoint; return None if there is no checkpoint.

    Args:
        directory: the folder with the checkpoints.
        reads: functions of a checkpoint. The second one is tried if the first rejects all files,
            and so on. A damaged file, or one that a function rejects with `DamagedError`, is
            skipped with a warning.
    """
    candidates, skipped = files(directory), []
    for read in reads if candidates else ():
        skipped = []
        for file in candidates:
            try:
                result = read(load(file))
            except DamagedError as error:
                skipped.append(f"{file} cannot be used ({error}); trying the previous checkpoint.")
                continue
            _warn(skipped)
            return result
    if candidates:
        _warn(skipped)
        raise UserError(
            f"No checkpoint in {directory} can be used: restore the folder from a backup, or start "
            "again in another folder."
        )
    return None


def _warn(texts: Sequence[str]) -> None:
    for text in texts:
        warnings.warn(text, stacklevel=3)


def files(directory: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    paths = [path for path in directory.glob("checkpoint-*.npz") if _NAME.fullmatch(path.name)]
    return sorted(paths, reverse=True)


def remove_after(directory: Path, step: int) -> None:
    """Remove the checkpoints of later steps."""
    for file in files(directory):
        if file.name > _name(step):
            file.unlink(missing_ok=True)


def tidy(directory: Path) -> None:
    """Remove temporary files of killed processes, and outdated checkpoints."""
    for path in directory.glob(TEMPORARY):
        path.unlink(missing_ok=True)
    _keep_newest(directory)


def _keep_newest(directory: Path) -> None:
    for old in files(directory)[KEPT:]:
        old.unlink(missing_ok=True)


def encode(tree: PyTree, manifest: Json) -> bytes:
    """Encode a checkpoint as the bytes of its file."""
    leaves = as_arrays(tree)
    arrays = {name: _with_npy_dtype(leaf) for name, leaf in leaves.items()}
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
    """Read a checkpoint and verify its digest."""
    try:
        return decode(file.read_bytes())
    except OSError as error:
        raise DamagedError(f"it cannot be read: {error.strerror}") from None


def decode(data: bytes) -> Checkpoint:
    """Decode the bytes of a file.

    Raises:
        DamagedError: the digest is wrong, or the content is not a checkpoint.
        UserError: the checkpoint has another format.
    """
    body, digest = data[:-_DIGITS], data[-_DIGITS:]
    if len(digest) < _DIGITS or digest != _digest(body):
        raise DamagedError("its digest is wrong")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        manifest = json.loads(arrays.pop(_MANIFEST).tobytes())
    except (ValueError, KeyError, zipfile.BadZipFile):
        raise DamagedError("it is intact, but not a checkpoint of simfbo") from None
    if manifest["format"] != FORMAT:
        raise UserError(
            f"The checkpoint has format {manifest['format']}, this version of simfbo reads "
            f"{FORMAT}: start the run anew in another folder."
        )
    kinds = manifest.pop("dtypes")
    return Checkpoint({n: a.view(jnp.dtype(kinds[n])) for n, a in arrays.items()}, manifest)


def restore(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
    """Arrange arrays in the structure of `like`; names, shapes and dtypes must agree."""
    templates = as_arrays(like)
    if list(templates) != list(arrays) or any(
        (a.shape, a.dtype) != (arrays[n].shape, arrays[n].dtype) for n, a in templates.items()
    ):
        raise UserError(
            "The checkpoint does not fit the state of this task and algorithm: resume with the "
            "settings that the run was started with."
        )
    leaves = [jnp.asarray(arrays[name]) for name in templates]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _name(step: int) -> str:
    return f"checkpoint-{step:010d}.npz"


def _with_npy_dtype(leaf: np.ndarray) -> np.ndarray:
    """View dtypes that the npy format lacks, such as bfloat16, as raw bytes."""
    return leaf.view(f"V{leaf.dtype.itemsize}") if leaf.dtype.kind == "V" else leaf


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def save_variables(file: Path, x: PyTree, y: PyTree) -> None:
    """Write x and y to a plain npz file, one array per leaf, named by its path."""
    buffer = io.BytesIO()
    np.savez(buffer, **as_arrays({"x": x, "y": y}))  # pyright: ignore[reportArgumentType]
    write_atomic(file, buffer.getvalue())


def load_variables(file: str | Path, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
    """Load (x, y) in the structure of the arguments.

    Args:
        file: written by `save_variables` or by `simfbo run` (`variables.npz`).
        x: an upper variable of the same structure, such as a task's `x0`.
        y: a lower variable of the same structure.

    Returns:
        The saved variables.
    """
    like = {"x": x, "y": y}
    try:
        with np.load(io.BytesIO(Path(file).read_bytes()), allow_pickle=False) as stored:
            saved = dict(stored)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} cannot be read as variables: {error}.") from None
    shapes = {name: np.shape(leaf) for name, leaf in as_arrays(like).items()}
    if shapes != {name: array.shape for name, array in saved.items()}:
        raise UserError(f"{file} holds variables of other shapes: is it from another task?")
    variables = jax.tree.unflatten(jax.tree.structure(like), [saved[name] for name in shapes])
    return variables["x"], variables["y"]
