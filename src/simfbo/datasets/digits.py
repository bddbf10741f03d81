"""Handwritten digits of 8 x 8: scikit-learn's, which need no download, and their full set."""

import importlib.util
from collections.abc import Mapping

import numpy as np

from simfbo.datasets.formats import Arrays
from simfbo.errors import UserError

LICENCE = "BSD-3-Clause (as scikit-learn)"
PACKAGE = "scikit-learn (bundled)"
OPTDIGITS = "optdigits.dat"
_TOP = 16
_EVERY = 5


def available() -> bool:
    """Return whether scikit-learn can be imported, without importing it."""
    return importlib.util.find_spec("sklearn") is not None


def arrays() -> Arrays:
    """Return the 1,797 digits, scaled to 0..255, as 1,437 training and 360 test images.

    Raises:
        UserError: If scikit-learn is not installed.
    """
    if not available():
        raise UserError("The digits come with scikit-learn: run 'pip install scikit-learn'.")
    # Imported here because it takes longer than all the rest of this package.
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return _split(np.asarray(pixels), np.asarray(labels))


def optdigits_arrays(files: Mapping[str, bytes]) -> Arrays:
    """Return the 5,620 digits, as `arrays` does its 1,797, which are among them.

    Args:
        files: The one original file, keyed by name: rows of 64 pixels and the class, no header.
    """
    rows = np.array([line.split(b",") for line in files[OPTDIGITS].splitlines()], np.int32)
    return _split(rows[:, :-1], rows[:, -1])


def _split(pixels: np.ndarray, labels: np.ndarray) -> Arrays:
    """Return digits [N, 64] of 0..16, scaled to 0..255, as training and test images."""
    images = np.rint(pixels.reshape(-1, 8, 8) * (255 / _TOP)).astype(np.uint8)
    labels = labels.astype(np.int32)
    test = _test_mask(labels)
    return Arrays(images[~test], labels[~test], images[test], labels[test])


def _test_mask(labels: np.ndarray) -> np.ndarray:
    """Return which examples are for testing: every fifth of a shuffle sorted by class.

    The shuffle is by the legacy generator because its stream is frozen for good, so the split
    is the same under every version of NumPy.
    """
    order = np.random.RandomState(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    mask = np.zeros(len(labels), dtype=bool)
    mask[order[::_EVERY]] = True
    return mask
