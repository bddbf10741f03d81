"""The palette: colours are told apart by the colour-blind, and can be read on either background."""

import itertools

import numpy as np
import pytest

from simfbo.runs import palette
from simfbo.runs.palette import COLOURS, COLOURS_ON_DARK, DARK, WHITE, contrast, on_dark, readable

# Machado, Oliveira, Fernandes (2009), severity 1, for linear RGB.
SEEN_BY = {
    "everybody": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868],
                   [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968],
                     [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779],
                   [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375],
                   [0.2126729, 0.7151522, 0.0721750],
                   [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip


def linear(colour):
    shares = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """Return CIELAB of linear RGB, for the white of sRGB."""
    t = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(colours, eyes):
    seen = [lab(SEEN_BY[eyes] @ linear(colour)) for colour in colours]
    return min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))


def test_lab_of_known_colours():
    np.testing.assert_allclose(lab(linear("#ffffff")), [100, 0, 0], atol=1e-6)
    np.testing.assert_allclose(lab(linear("#ff0000")), [53.24, 80.09, 67.20], atol=0.02)


@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize(("colours", "six", "twelve"),
                         [(COLOURS, 21, 11), (COLOURS_ON_DARK, 26, 13)])  # fmt: skip
def test_colours_are_far_apart(colours, six, twelve, eyes):
    assert nearest(colours[:6], eyes) > six
    assert nearest(colours, eyes) > twelve


@pytest.mark.parametrize("colour", COLOURS)
def test_lines_stand_out_on_both_backgrounds(colour):
    assert contrast(colour, WHITE) >= 3
    assert contrast(colour, DARK) >= 3
    assert contrast(on_dark(colour), DARK) >= 4.5


@pytest.mark.parametrize("colour", [*COLOURS, palette.GREY, palette.INK, palette.MUTED, "#ffff00"])
def test_labels_can_be_read(colour):
    assert contrast(readable(colour), WHITE) >= 4.5
    assert contrast(on_dark(readable(colour)), DARK) >= 4.5


def test_a_label_has_its_lines_colour_on_dark_pages_too():
    assert [on_dark(readable(colour)) for colour in COLOURS] == list(COLOURS_ON_DARK)
    assert on_dark(WHITE) == DARK
