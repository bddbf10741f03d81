"""Incremental reading of the histories below some folders, without state on the server.

The reader sends its position in each history (`at`, in bytes) and a digest of the bytes before it
(`mark`). If the digest does not match, because the history has been truncated by a resumed run or
replaced, it is read again from its start.
"""

import os
import re
import stat
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from simfbo.errors import UserError
from simfbo.runs import names
from simfbo.runs.files import Json
from simfbo.runs.history import FILE
from simfbo.runs.lines import plain, read_lines

_CHUNK = 1_000_000  # bytes of one history in a response
_RESPONSE = 4 * _CHUNK  # bytes of all histories in a response
_MARKED = 4096  # bytes in the digest of a mark
_LOG, _LOG_TAIL = "server.log", 16_000
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours of a terminal
_DEPTH, _RUNS = 5, 500  # levels of folders that are searched, runs that are shown
_CHECKPOINT = re.compile(r"checkpoint-(\d{10})\.npz")


class Found(NamedTuple):
    """A run's folder and its identifier: the path as the user wrote it."""

    id: str
    folder: Path


def news(roots: Sequence[Path], seen: Mapping[str, Any]) -> Json:
    """Return the changes since a reader's last request.

    Args:
        roots: folders of runs, or folders with runs below them.
        seen: `at`, `mark` and `log` of each run in the reader's last response.

    Returns:
        The `runs`, each with its `name`, the `group` of runs that differ only in the seed and its
        `title`, the new `lines` and the position after them (`at`, `mark`), `reset` if they start
        from the beginning, `more` if there are further lines, the number of `damaged` lines, the
        seconds since the last change (`idle`), the round of its last `checkpoint` and, if it has
        changed, the end of its server's `log`; the keys of settings that `differ`; and the number
        of older runs that are `hidden`.
    """
    all_runs = find_runs(roots)
    shown = sorted(_newest(all_runs), key=lambda run: _natural(run.id))
    headers = [_header(run.folder / FILE) for run in shown]
    runs: list[Json] = []
    remaining = _RESPONSE
    for run in shown:
        position = seen.get(run.id)
        position = position if isinstance(position, dict) else {}
        runs.append(_run(run, position, min(remaining, _CHUNK)))
        remaining -= runs[-1].pop("read")
    labels = _distinct(names.labels(headers), shown)
    titles = map(names.without_seed, labels, headers)
    for run, label, title, group in zip(runs, labels, titles, names.groups(headers), strict=True):
        run |= {"name": label, "title": title, "group": group}
    hidden = len(all_runs) - len(shown)
    return {"runs": runs, "differ": names.differences(headers), "hidden": hidden}


def find_runs(roots: Iterable[Path]) -> list[Found]:
    """Find the runs in or below some folders, without following links in them."""
    found: dict[Path, Found] = {}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: pass the folder of a run, or one above it.")
        for folder in _folders_of_runs(root):
            found.setdefault(folder.resolve(), Found(str(folder), folder))
    return list(found.values())


def _folders_of_runs(root: Path) -> Iterator[Path]:
    """Yield the folders with a history in or below a folder."""
    for path, folders, files in os.walk(root):
        folder = Path(path)
        deep = len(folder.relative_to(root).parts) >= _DEPTH
        if FILE in files and not (folder / FILE).is_symlink():
            yield folder
            deep = True  # a run does not contain runs
        folders[:] = [] if deep else [name for name in folders if not name.startswith(".")]


def _newest(found: Sequence[Found]) -> Sequence[Found]:
    """Return the most recently changed runs, as many as are shown."""
    if len(found) <= _RUNS:
        return found
    return sorted(found, key=lambda run: _changed(run.folder / FILE))[-_RUNS:]


def _natural(text: str) -> list[tuple[str, int]]:
    """Return a key for natural sorting: seed2 before seed10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d{0,9})", text)]


def _distinct(labels: Sequence[str], runs: Sequence[Found]) -> list[str]:
    """Append the folder to labels that several runs share."""
    count = Counter(labels)
    return [
        f"{label} ({run.id})" if count[label] > 1 else label
        for label, run in zip(labels, runs, strict=True)
    ]


def _run(run: Found, seen: Json, limit: int) -> Json:
    """Return the changes of a run, with at most `limit` bytes of its history."""
    changed, checkpoint = _state(run.folder)
    idle = round(max(0.0, time.time() - changed), 1)
    changes: Json = {"id": run.id, "idle": idle, "checkpoint": checkpoint}
    log = _tail_of_log(run.folder / _LOG)
    if log is not None and log["stamp"] != seen.get("log"):
        changes["log"] = log
    return changes | _new_lines(run.folder / FILE, seen, limit)


def _new_lines(file: Path, seen: Json, limit: int) -> Json:
    """Return the complete lines after a reader's position, up to `limit` bytes."""
    with _opened(file) as history:
        size = 0 if history is None else os.fstat(history.fileno()).st_size
        start, before = _seek(history, size, seen)
        data = b"" if history is None else history.read(max(limit, 0))
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and len(data) == _CHUNK:
        whole = data  # simfbo writes no line of this length: it is skipped in chunks, as damaged
    lines = read_lines(whole, before)
    valid = [line for line in map(_strict, lines.whole) if line]
    shown = [line for line in valid if line["kind"] != "clients"]  # not shown by the page
    return {
        "at": start + len(whole),
        "mark": _mark((before + whole)[-_MARKED:]),
        "reset": start == 0 and seen.get("at") != 0,
        "lines": shown,
        "damaged": lines.damaged + len(lines.whole) - len(valid),
        "more": len(data) == limit and start + len(whole) < size,
        "read": len(data),
    }


def _seek(history: IO[bytes] | None, size: int, seen: Json) -> tuple[int, bytes]:
    """Seek the reader's position, or the start if its mark does not match.

    Returns:
        The position, and the bytes before it that are part of the mark.
    """
    at = seen.get("at")
    if history is None or not isinstance(at, int) or not 0 < at <= size:
        return 0, b""
    first = max(0, at - _MARKED)
    history.seek(first)
    before = history.read(at - first)
    if _mark(before) == seen.get("mark"):
        return at, before
    history.seek(0)
    return 0, b""


def _mark(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _header(file: Path) -> Json:
    """Read the header of a history; empty if it is damaged."""
    with _opened(file) as history:
        line = b"" if history is None else history.readline(_CHUNK)
    first = read_lines(line).whole if line.endswith(b"\n") else []
    header = _strict(first[0]) if first and first[0]["kind"] == "header" else {}
    return {key: value for key, value in header.items() if key != "kind"}


def _strict(line: Json) -> Json:
    """Convert a line to strict JSON; empty if it exceeds the recursion limit."""
    try:
        return plain(line)
    except RecursionError:
        return {}


def _state(folder: Path) -> tuple[float, int]:
    """Return the time of a run's last change, and the round of its last checkpoint or -1."""
    names = [name for name in _names(folder) if name in (FILE, _LOG) or _CHECKPOINT.fullmatch(name)]
    rounds = [int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match]
    return max((_changed(folder / name) for name in names), default=0.0), max(rounds, default=-1)


def _tail_of_log(file: Path) -> Json | None:
    """Read the end of a log with a stamp of its version; None if there is no log."""
    with _opened(file) as log:
        if log is None:
            return None
        status = os.fstat(log.fileno())
        log.seek(max(0, status.st_size - _LOG_TAIL))
        text = _ESCAPES.sub("", log.read(_LOG_TAIL).decode(errors="replace"))
    return {"stamp": f"{status.st_size}-{status.st_mtime_ns}", "text": text}


@contextmanager
def _opened(file: Path) -> Generator[IO[bytes] | None]:
    """Open a regular file; None if it is missing, not readable or a symbolic link."""
    with ExitStack() as stack:
        opened = None
        with suppress(OSError):
            opened = stack.enter_context(open(file, "rb", opener=_open_file))
        yield opened if opened and stat.S_ISREG(os.fstat(opened.fileno()).st_mode) else None


def _open_file(name: str, flags: int) -> int:
    """Open a file without following links and without blocking on a pipe."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _changed(file: Path) -> float:
    """Return the modification time of a file; 0 if it does not exist."""
    with suppress(OSError):
        return file.stat(follow_symlinks=False).st_mtime
    return 0.0
