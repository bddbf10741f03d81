"""Handwritten digits of 8 x 8 pixels: those of scikit-learn, and the full set they come from."""

import importlib.util
from collections.abc import Mapping

import numpy as np

from simfbo.datasets.formats import Arrays
from simfbo.errors import require

LICENCE = "BSD-3-Clause (as scikit-learn)"
PACKAGE = "scikit-learn (bundled)"
OPTDIGITS = "optdigits.dat"
_TOP = 16
_EVERY = 5


def available() -> bool:
    """Check whether scikit-learn is installed, without importing it."""
    return importlib.util.find_spec("sklearn") is not None


def arrays() -> Arrays:
    """Load the 1,797 digits, scaled to 0..255, as 1,437 training and 360 test images.

    Raises:
        UserError: If scikit-learn is not installed.
    """
    pixels, labels = require("sklearn.datasets", "estimators").load_digits(return_X_y=True)
    return _split(np.asarray(pixels), np.asarray(labels))


def optdigits_arrays(files: Mapping[str, bytes]) -> Arrays:
    """Return the 5,620 digits of the full set, split and scaled like `arrays`.

    Args:
        files: The original file by name: rows of 64 pixels and the class, without a header.
    """
    rows = np.array([line.split(b",") for line in files[OPTDIGITS].splitlines()], np.int32)
    return _split(rows[:, :-1], rows[:, -1])


def _split(pixels: np.ndarray, labels: np.ndarray) -> Arrays:
    """Scale digits [N, 64] from 0..16 to 0..255 and split them into training and test images."""
    images = np.rint(pixels.reshape(-1, 8, 8) * (255 / _TOP)).astype(np.uint8)
    labels = labels.astype(np.int32)
    test = _test_mask(labels)
    return Arrays(images[~test], labels[~test], images[test], labels[test])


def _test_mask(labels: np.ndarray) -> np.ndarray:
    """Return the mask of test images: every fifth of a shuffle sorted by class.

    The shuffle uses NumPy's legacy generator, whose stream is frozen, so the split is the same with
    every version of NumPy.
    """
    order = np.random.RandomState(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    mask = np.zeros(len(labels), dtype=bool)
    mask[order[::_EVERY]] = True
    return mask
