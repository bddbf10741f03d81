"""Files on disk: atomic writes, folders and their names, locks."""

import contextlib
import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from simfbo.errors import UserError, plain
from simfbo.runs.interrupts import held_back

TEMPORARY = ".*.tmp"  # remains of a killed process


Json = dict[str, Any]  # an object of a JSON or TOML file


def write_atomic(file: Path, data: bytes | str) -> None:
    """Replace a file atomically: after a crash it has the old content or the new one.

    The data is synced to disk. Text is written as UTF-8. Ctrl-C is delayed until the write is done.

    Args:
        file: in an existing folder.
        data: the new content.

    Raises:
        OSError: the file, named in the error, could not be written; its old content is unchanged.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    with held_back():
        try:
            with open(temporary, "wb", opener=_no_link) as out:
                out.write(data.encode(errors="replace") if isinstance(data, str) else data)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, file)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(file)) from None
        _sync_folder(file.parent)


def _no_link(file: str, flags: int) -> int:
    """Open a file without following a symbolic link."""
    return os.open(file, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a rename survives a power failure."""
    with contextlib.suppress(OSError):  # some systems cannot sync folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder and its parents; raise unless it is writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"Cannot write to the folder {path}: choose another one.")


def folder_names(names: Iterable[str]) -> list[str]:
    """Validate that names are distinct, valid folder names on all systems; return them.

    Every name that becomes part of a path passes through here or through `as_folder_name`.

    Example:
        >>> folder_names(["fednest", "my.methods-mine"])
        ['fednest', 'my.methods-mine']
    """
    unique: dict[str, str] = {}
    for name in names:
        if not re.fullmatch(r"\w[\w .-]{0,59}(?<![ .])", name) or len(name.encode()) > 200:
            raise UserError(
                f"'{plain(name)}' names a folder: use at most 60 letters, digits, '.', '-' and "
                "'_', with a letter or digit first and last."
            )
        earlier = unique.setdefault(unicodedata.normalize("NFKC", name).casefold(), name)
        if earlier != name:
            raise UserError(
                f"'{earlier}' and '{name}' name the same folder on some systems: rename one of "
                "them."
            )
    return list(unique.values())


def as_folder_name(*parts: str) -> str:
    """Convert arbitrary texts to a valid folder name.

    Example:
        >>> as_folder_name("my.methods:mine", "../digits")
        'my.methods-mine-digits'
    """
    name = re.sub(r"(?:[^\w.]|\.\.+)+", "-", "-".join(parts)).encode()[:200].decode(errors="ignore")
    return name.strip("-.") or "run"


def require_no_way_out(folder: Path) -> None:
    """Raise if a symbolic link in a folder leads out of it, where writes would end up."""
    root = folder.resolve()
    for path, folders, files in os.walk(folder):
        for link in (Path(path, name) for name in (*folders, *files)):
            if link.is_symlink() and not link.resolve().is_relative_to(root):
                raise UserError(f"{link} is a link that leads out of {folder}: remove it.")


def lock(file: IO[bytes]) -> bool:
    """Lock an open file for this process until it is closed.

    Returns:
        False if another process holds the lock. True on systems without locks.
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


def keep_compilations() -> None:
    """Keep compiled programs on disk, so that the next process starts at once."""
    import jax  # most of what reads files does without

    if folder := compilation_folder():
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def compilation_folder() -> Path | None:
    """Return this user's folder of compiled programs; None if there is none to write to.

    Then nothing is kept: programs in a folder that others can write to must not be run.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = root / "simfbo" / "jax"
    try:
        if root.is_absolute():  # it is not where there is no home folder
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if root.is_absolute() and os.access(folder, os.W_OK) else None
