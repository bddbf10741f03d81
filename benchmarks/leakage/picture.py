"""The figure: a client a column, the truth and what was read from messages in rows."""

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from simfbo.runs import style
from simfbo.runs.palette import INK, MUTED

GAP = 2  # pixels between images


def draw(truth: list[np.ndarray], rows: dict[str, tuple[list[np.ndarray], float]]) -> Figure:
    """Return the figure: a client a column, the truth and every situation a row."""
    figure, axes = style.new(
        finding(rows),
        "First row: an image of each of ten clients. Below: what can be read from the message that"
        " the client sent, and its mean correlation with the truth.",
        size=(8.9, 0.72 * (len(rows) + 1)), rows=len(rows) + 1,
    )  # fmt: skip
    shown = {"true image": (truth, None), **rows}
    for ax, (name, (images, fit)) in zip(axes[:, 0], shown.items(), strict=True):
        _show(ax, images)
        beside = {"va": "center", "size": style.TEXT, "transform": ax.transAxes}
        ax.text(-0.015, 0.5, name, ha="right", color=INK, **beside)
        ax.text(1.015, 0.5, "" if fit is None else f"{fit:.2f}", color=MUTED, **beside)
    return figure


def finding(rows: dict[str, tuple[list[np.ndarray], float]]) -> str:
    """Return how much of the images the most and the least talkative messages show."""
    fits = {name: fit for name, (_, fit) in rows.items()}
    most, least = max(fits, key=fits.__getitem__), min(fits, key=fits.__getitem__)
    return (
        f"One message shows a client's image with a correlation of {fits[most]:.2f} ({most});"
        f" {least.rpartition(', ')[2]} leaves {fits[least]:.2f}"
    )


def _show(ax: Any, images: list[np.ndarray]) -> None:
    """Draw images side by side, their greys stretched; few of them keep the file small."""
    side = int(np.sqrt(images[0].size))
    strip = np.full((side, len(images) * (side + GAP) - GAP), np.nan)
    for i, image in enumerate(images):
        low, high = np.quantile(image, [0.02, 0.995])
        scaled = (image.reshape(side, side) - low) / (high - low)
        strip[:, i * (side + GAP) : i * (side + GAP) + side] = scaled.clip(0, 1)
    ax.imshow(strip, colormaps["gray"].resampled(12), vmin=0, vmax=1, interpolation="none")
    ax.set_axis_off()
