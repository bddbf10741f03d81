"""Scikit-learn's bundled handwritten digits, which need no download."""

import importlib.util

import numpy as np

from simfbo.datasets.formats import Arrays
from simfbo.errors import UserError

LICENCE = "BSD-3-Clause (as scikit-learn)"
PACKAGE = "scikit-learn (bundled)"
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
    images = np.rint(pixels.reshape(-1, 8, 8) * (255 / _TOP)).astype(np.uint8)
    labels = np.asarray(labels, np.int32)
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
