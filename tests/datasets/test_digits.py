"""Tests of scikit-learn's digits: shapes, class counts and a split that never changes."""

import hashlib

import numpy as np

from simfbo import datasets

DIGITS_TEST_MD5 = "b52108d28a311fb08590b2ac71d4d8eb"


def test_digits_have_the_known_shapes_and_class_counts() -> None:
    data = datasets.load("digits", offline=True)
    assert data.train_images.shape == (1437, 8, 8)
    assert data.test_images.shape == (360, 8, 8)
    assert (data.train_images.dtype, data.train_labels.dtype) == (np.uint8, np.int32)
    counts = np.bincount(data.train_labels), np.bincount(data.test_labels)
    assert (counts[0] + counts[1]).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.abs(counts[1] - (counts[0] + counts[1]) / 5).max() < 1
    assert set(np.unique(data.train_images)) == {round(k * 255 / 16) for k in range(17)}


def test_digits_split_is_fixed_and_loses_no_image() -> None:
    from sklearn.datasets import load_digits

    pixels = np.asarray(load_digits(return_X_y=True)[0])
    first, second = datasets.load("digits"), datasets.load("digits")
    assert np.array_equal(first.test_images, second.test_images)
    assert hashlib.md5(first.test_labels.astype("<i4").tobytes()).hexdigest() == DIGITS_TEST_MD5
    total = int(first.train_images.sum(dtype=np.int64) + first.test_images.sum(dtype=np.int64))
    assert total == int(np.rint(pixels * 255 / 16).sum())
