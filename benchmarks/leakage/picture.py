"""The figure: a client a column, the truth and what was read from messages in rows."""

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure


def draw(truth: list[np.ndarray], rows: dict[str, tuple[list[np.ndarray], float]]) -> Figure:
    """Return the figure: a client a column, the truth and every situation a row."""
    figure = Figure(figsize=(8.9, 0.72 * len(rows) + 1.1), facecolor="white")
    heights = [1, 0.28, *[1] * len(rows)]
    axes = figure.subplots(len(heights), len(truth), height_ratios=heights)
    figure.subplots_adjust(0.135, 0.005, 0.945, 0.995, wspace=0.05, hspace=0.05)
    for ax in axes.flat:
        ax.set_axis_off()
    axes[1, 0].text(0, 0.5, "read from a message", va="center", color="#d1495b", fontsize=9)
    axes[1, -1].text(1.06, 0.5, "corr.", va="center", color="#777777", fontsize=8)
    shown = [("true image", truth, ""), *((name, *row) for name, row in rows.items())]
    for line, (name, images, fit) in zip(np.delete(axes, 1, 0), shown, strict=True):
        for ax, image in zip(line, images, strict=True):
            _show(ax, image)
        side = {"va": "center", "transform": line[0].transAxes}
        line[0].text(-0.12, 0.5, name, ha="right", fontsize=9.5, **side)
        if fit:
            side["transform"] = line[-1].transAxes
            line[-1].text(1.06, 0.5, f"{fit:.2f}", color="#777777", fontsize=9, **side)
    return figure


def _show(ax: Any, image: np.ndarray) -> None:
    """Draw one image, its greys stretched; few of them keep the file small."""
    pixels = image.reshape(int(np.sqrt(image.size)), -1)
    low, high = np.quantile(image, [0.02, 0.995])
    ax.imshow(pixels, colormaps["gray"].resampled(12), vmin=low, vmax=high, interpolation="nearest")
