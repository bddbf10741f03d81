"""Files on disk: the one atomic write, folders that can be written to, and locks."""

import contextlib
import os
from pathlib import Path
from typing import IO, Any

from simfbo.errors import UserError

TEMPORARY = ".*.tmp"  # what a killed writer can leave behind


Json = dict[str, Any]  # an object of a JSON or TOML file


def write_atomic(file: Path, data: bytes | str) -> None:
    """Replace a file in one step: whatever happens, the old content or the new one is there.

    The data is on the disk when this returns. Text is written as UTF-8.

    Args:
        file: in an existing folder.
        data: the new content.

    Raises:
        OSError: it could not be written; the old file is unchanged.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(data.encode() if isinstance(data, str) else data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, so that a rename survives a power cut."""
    with contextlib.suppress(OSError):  # some systems cannot sync folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder, with its parents, that can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"Cannot write to the folder {path}: choose another one.")


def lock(file: IO[bytes]) -> bool:
    """Lock an open file for this process; the system releases it when the file is closed.

    Returns:
        False if another process holds the lock. True where there are no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
