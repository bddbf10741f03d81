"""What is new in the histories below some folders, for a reader that remembers where it was.

Nothing is kept between calls. The reader says how far it has read each history (`at`, in bytes) and
a digest of the bytes before that (`mark`); a history that has since been cut, as resuming does, or
replaced does not agree, and is sent again from its start.
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

_CHUNK = 1_000_000  # bytes of one history in an answer
_ANSWER = 4 * _CHUNK  # bytes of all histories in an answer
_MARKED = 4096  # bytes that a mark depends on
_LOG, _LOG_TAIL = "server.log", 16_000
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours of a terminal
_DEPTH, _RUNS = 5, 500  # how far below a folder runs are looked for, and how many are shown
_CHECKPOINT = re.compile(r"checkpoint-(\d{10})\.npz")


class Found(NamedTuple):
    """A run's folder, and what it is called: its path as the user wrote it."""

    id: str
    folder: Path


def news(roots: Sequence[Path], seen: Mapping[str, Any]) -> Json:
    """Return what has happened since a reader last asked.

    Args:
        roots: folders of runs, or folders with runs below them.
        seen: `at`, `mark` and `log` of each run that the reader knows, from an earlier answer.

    Returns:
        The `runs`, each with its `name`, the `group` of runs that differ only in the seed and the
        `title` of that, its new `lines`, where they end (`at`,
        `mark`), whether they start anew (`reset`), whether `more` is waiting, how many are
        `damaged`, for how many seconds it has been `idle`, the round of its last `checkpoint` and,
        if it has changed, the end of its server's `log`; the keys of settings that `differ`; and
        how many older runs are `hidden`.
    """
    found = find_runs(roots)
    shown = sorted(_newest(found), key=lambda run: _natural(run.id))
    headers = [_header(run.folder / FILE) for run in shown]
    runs: list[Json] = []
    room = _ANSWER
    for run in shown:
        known = seen.get(run.id)
        runs.append(_run(run, known if isinstance(known, dict) else {}, min(room, _CHUNK)))
        room -= runs[-1].pop("read")
    labels = _distinct(names.labels(headers), shown)
    titles = map(names.without_seed, labels, headers)
    for one, label, title, group in zip(runs, labels, titles, names.groups(headers), strict=True):
        one |= {"name": label, "title": title, "group": group}
    return {"runs": runs, "differ": names.differences(headers), "hidden": len(found) - len(shown)}


def find_runs(roots: Iterable[Path]) -> list[Found]:
    """Return the runs in or below some folders; links below these are not followed."""
    found: dict[Path, Found] = {}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: pass the folder of a run, or one above it.")
        for folder in _folders_of_runs(root):
            found.setdefault(folder.resolve(), Found(str(folder), folder))
    return list(found.values())


def _folders_of_runs(root: Path) -> Iterator[Path]:
    """Yield the folders with a history, in or below a folder."""
    for path, folders, files in os.walk(root):
        folder = Path(path)
        deep = len(folder.relative_to(root).parts) >= _DEPTH
        if FILE in files and not (folder / FILE).is_symlink():
            yield folder
            deep = True  # a run has no runs inside
        folders[:] = [] if deep else [name for name in folders if not name.startswith(".")]


def _newest(found: Sequence[Found]) -> Sequence[Found]:
    """Return the runs that changed last, if there are too many to show."""
    if len(found) <= _RUNS:
        return found
    return sorted(found, key=lambda run: _changed(run.folder / FILE))[-_RUNS:]


def _natural(text: str) -> list[tuple[str, int]]:
    """Return a key that sorts seed2 before seed10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d{0,9})", text)]


def _distinct(labels: Sequence[str], runs: Sequence[Found]) -> list[str]:
    """Add the folder to names that several runs have."""
    count = Counter(labels)
    return [f"{one} ({run.id})" if count[one] > 1 else one
            for one, run in zip(labels, runs, strict=True)]  # fmt: skip


def _run(run: Found, seen: Json, most: int) -> Json:
    """Return what is new in one run."""
    changed, checkpoint = _state(run.folder)
    idle = round(max(0.0, time.time() - changed), 1)
    found: Json = {"id": run.id, "idle": idle, "checkpoint": checkpoint}
    log = _tail_of_log(run.folder / _LOG)
    if log is not None and log["stamp"] != seen.get("log"):
        found["log"] = log
    return found | _new_lines(run.folder / FILE, seen, most)


def _new_lines(file: Path, seen: Json, most: int) -> Json:
    """Return the whole lines that a reader has not seen, up to a number of bytes."""
    with _opened(file) as history:
        size = 0 if history is None else os.fstat(history.fileno()).st_size
        start, before = _place(history, size, seen)
        data = b"" if history is None else history.read(max(most, 0))
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and len(data) == _CHUNK:
        whole = data  # a line that long is none of ours: it is read in pieces, all damaged
    lines = read_lines(whole, before)
    sound = [line for line in map(_sound, lines.whole) if line]
    shown = [line for line in sound if line["kind"] != "clients"]  # which the page does not show
    return {
        "at": start + len(whole),
        "mark": _mark((before + whole)[-_MARKED:]),
        "reset": start == 0 and seen.get("at") != 0,
        "lines": shown,
        "damaged": lines.damaged + len(lines.whole) - len(sound),
        "more": len(data) == most and start + len(whole) < size,
        "read": len(data),
    }


def _place(history: IO[bytes] | None, size: int, seen: Json) -> tuple[int, bytes]:
    """Go to where a reader was; return the place, and the bytes before it that its mark is of.

    That is the start if the history is no longer what the reader has seen.
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
    """Return the header of a history; empty if it cannot be read."""
    with _opened(file) as history:
        line = b"" if history is None else history.readline(_CHUNK)
    first = read_lines(line).whole if line.endswith(b"\n") else []
    header = _sound(first[0]) if first and first[0]["kind"] == "header" else {}
    return {key: value for key, value in header.items() if key != "kind"}


def _sound(line: Json) -> Json:
    """Return a line as strict JSON; empty if it is nested absurdly deep."""
    try:
        return plain(line)
    except RecursionError:
        return {}


def _state(folder: Path) -> tuple[float, int]:
    """Return when a run last wrote something, and the round of its last checkpoint, -1 if none."""
    names = [name for name in _names(folder) if name in (FILE, _LOG) or _CHECKPOINT.fullmatch(name)]
    rounds = [int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match]
    return max((_changed(folder / name) for name in names), default=0.0), max(rounds, default=-1)


def _tail_of_log(file: Path) -> Json | None:
    """Return the end of a log, and a stamp that changes with it; None if there is none."""
    with _opened(file) as log:
        if log is None:
            return None
        about = os.fstat(log.fileno())
        log.seek(max(0, about.st_size - _LOG_TAIL))
        text = _ESCAPES.sub("", log.read(_LOG_TAIL).decode(errors="replace"))
    return {"stamp": f"{about.st_size}-{about.st_mtime_ns}", "text": text}


@contextmanager
def _opened(file: Path) -> Generator[IO[bytes] | None]:
    """Open a regular file that is not a link; None if there is none, or if it cannot be read."""
    with ExitStack() as stack:
        found = None
        with suppress(OSError):
            found = stack.enter_context(open(file, "rb", opener=_open_file))
        yield found if found and stat.S_ISREG(os.fstat(found.fileno()).st_mode) else None


def _open_file(name: str, flags: int) -> int:
    """Open a file without following a link, or waiting for who writes into a pipe."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _changed(file: Path) -> float:
    """Return when a file was last written; 0 if it is gone."""
    with suppress(OSError):
        return file.stat(follow_symlinks=False).st_mtime
    return 0.0
