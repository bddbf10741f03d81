"""Tests of optdigits: a small synthetic file, and the real one if it has been downloaded."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from simfbo import datasets
from simfbo.datasets import package_clients as clients
from simfbo.datasets.registry import IMAGE_SETS
from simfbo.errors import UserError


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> np.ndarray:
    """Return 25 digits, pinned as optdigits and put into a data folder; no client can start."""
    rng = np.random.default_rng(3)
    made = np.column_stack([rng.integers(0, 17, (25, 64)), np.arange(25) % 5])
    data = "".join(",".join(map(str, row)) + "\n" for row in made).encode()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    small = IMAGE_SETS["optdigits"]._replace(files={"optdigits.dat": digest})
    monkeypatch.setitem(IMAGE_SETS, "optdigits", small)
    monkeypatch.delattr(clients, "run_client")
    (tmp_path / "optdigits.dat").write_bytes(data)
    return made


def test_rows_become_images_split_evenly_over_classes(rows: np.ndarray, tmp_path: Path) -> None:
    data = datasets.load("optdigits", tmp_path)
    assert (data.train_images.shape, data.test_images.shape) == ((20, 8, 8), (5, 8, 8))
    assert (data.train_images.dtype, data.train_labels.dtype) == (np.uint8, np.int32)
    assert sorted(data.test_labels.tolist()) == [0, 1, 2, 3, 4]
    images = np.concatenate([data.train_images, data.test_images]).reshape(25, 64)
    labels = np.concatenate([data.train_labels, data.test_labels])
    found = {(*image, label) for image, label in zip(images.tolist(), labels.tolist())}
    assert found == {(*(round(p * 255 / 16) for p in row[:-1]), row[-1]) for row in rows.tolist()}


def test_offline_sentence_names_the_one_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"or put optdigits\.dat into a folder and set"):
        datasets.load("optdigits", tmp_path, offline=True)


def test_real_digits_hold_all_of_scikit_learns() -> None:
    try:
        data = datasets.load("optdigits", offline=True)
    except UserError:
        pytest.skip("optdigits has not been downloaded")
    assert (data.train_images.shape, data.test_images.shape) == ((4496, 8, 8), (1124, 8, 8))
    counts = np.bincount(data.train_labels), np.bincount(data.test_labels)
    assert (counts[0] + counts[1]).tolist() == [554, 571, 557, 572, 568, 558, 558, 566, 554, 562]
    assert np.abs(counts[1] - (counts[0] + counts[1]) / 5).max() < 1
    assert digests(datasets.load("digits")) < digests(data)
    assert len(digests(data)) == 5620


def digests(data: datasets.ImageData) -> set[bytes]:
    """Return every image with its label as bytes."""
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels])
    return {image.tobytes() + bytes([label]) for image, label in zip(images, labels)}
