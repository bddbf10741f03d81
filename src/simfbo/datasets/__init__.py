"""Datasets: bundled digits, and images, tables and data frames, downloaded on demand."""

import difflib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simfbo.datasets import cache, digits
from simfbo.datasets.frames import FrameData
from simfbo.datasets.registry import FRAME_SETS, IMAGE_SETS, TABLE_SETS, Dataset
from simfbo.datasets.tables import TableData
from simfbo.errors import UserError, plain

__all__ = [
    "FRAMES",
    "NAMES",
    "TABLES",
    "FrameData",
    "ImageData",
    "Status",
    "TableData",
    "load",
    "load_frame",
    "load_table",
    "status",
]

NAMES = ("digits", *IMAGE_SETS)
"""The names of the image datasets, for `load`."""
TABLES = tuple(TABLE_SETS)
"""The names of the tables, for `load_table`."""
FRAMES = tuple(FRAME_SETS)
"""The names of the data frames, for `load_frame`: those of the tables, and others."""
_ALL = (*NAMES, *FRAMES)


class ImageData(NamedTuple):
    """The images and labels of one dataset.

    Attributes:
        train_images: Unsigned bytes [N, H, W], or [N, H, W, C] for colour.
        train_labels: Classes [N] from 0.
        test_images: As `train_images`.
        test_labels: As `train_labels`.
        name: The name passed to `load`.
        train_clients: The client that holds each training image [N], numbered from 0; None if the
            dataset has no natural clients.
        test_clients: As `train_clients`.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int32]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int32]
    name: str
    train_clients: NDArray[np.int32] | None = None
    test_clients: NDArray[np.int32] | None = None


class Status(NamedTuple):
    """The state of one dataset on this machine.

    Attributes:
        name: The name to pass to `load`, `load_table` or `load_frame`.
        ready: It can be loaded without a download; damaged files do not count.
        where: The folder that holds the files or will receive them.
        licence: The licence of the data.
        package: The packages that contain it, in the order they are tried.
    """

    name: str
    ready: bool
    where: str
    licence: str
    package: str


def load(name: str, data_dir: Path | None = None, offline: bool = False) -> ImageData:
    """Load a dataset of images; download it to the data folder if it is not there.

    Args:
        name: One of `NAMES`, in any case.
        data_dir: The data folder; by default SIMFBO_DATA_DIR or the user's cache folder.
        offline: Raise instead of downloading.

    Raises:
        UserError: If the name is unknown or the data is not available.
    """
    name = name.lower()
    if name == "digits":
        return ImageData(**digits.arrays()._asdict(), name=name)
    if name not in IMAGE_SETS:
        kind = "dataset of images" if name in FRAMES else "dataset"
        raise UserError(_unknown(name, kind, NAMES))
    dataset = IMAGE_SETS[name]
    files = cache.obtain(dataset, cache.root(data_dir), offline)
    return ImageData(**dataset.arrays(files)._asdict(), name=name)


def load_table(name: str, data_dir: Path | None = None, offline: bool = False) -> TableData:
    """Load a table; download it to the data folder if it is not there.

    Args:
        name: One of `TABLES`, in any case.
        data_dir: The data folder, as for `load`.
        offline: Raise instead of downloading.

    Raises:
        UserError: If the name is unknown or the data is not available.
    """
    name = name.lower()
    if name not in TABLE_SETS:
        raise UserError(_unknown(name, "table", TABLES))
    table = TABLE_SETS[name]
    return table.arrays(cache.obtain(table, cache.root(data_dir), offline))


def load_frame(name: str, data_dir: Path | None = None, offline: bool = False) -> FrameData:
    """Load a data frame with its text and gaps; download it to the data folder if needed.

    Args:
        name: One of `FRAMES`.
        data_dir: The data folder, as for `load`.
        offline: Raise instead of downloading.

    Raises:
        UserError: If the name is unknown or the data is not available.
    """
    if name not in FRAME_SETS:
        raise UserError(_unknown(name, "data frame", FRAMES))
    frame = FRAME_SETS[name]
    return frame.arrays(cache.obtain(frame, cache.root(data_dir), offline))


def status(data_dir: Path | None = None) -> tuple[Status, ...]:
    """Return the status of every dataset, in the order of `NAMES` and `FRAMES`.

    Args:
        data_dir: The data folder, as for `load`.
    """
    folder = cache.root(data_dir)
    bundled = Status("digits", digits.available(), "scikit-learn", digits.LICENCE, digits.PACKAGE)
    others = (*IMAGE_SETS.values(), *(FRAME_SETS | TABLE_SETS).values())
    return bundled, *(_status(dataset, folder) for dataset in others)


def _status(dataset: Dataset[Any], folder: Path) -> Status:
    """Return the status of one downloadable dataset."""
    cached = cache.find(dataset, folder)
    ready = len(cached.files) == len(dataset.files)
    packages = ", ".join(f"{source.package} ({source.client})" for source in dataset.sources)
    return Status(dataset.name, ready, str(cached.folder), dataset.licence, packages)


def _unknown(name: str, kind: str, names: tuple[str, ...]) -> str:
    """Return the message for an unknown name, with the closest known one."""
    # The name of a dataset of the other kind is not a misspelling.
    misspelt = name not in _ALL
    close = difflib.get_close_matches(name.lower(), names, n=1) if misspelt else []
    hint = f". Did you mean '{close[0]}'?" if close else f": use one of {', '.join(names)}."
    return f"Unknown {kind} '{plain(name)}'{hint}"
