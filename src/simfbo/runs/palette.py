"""The colours of figures, on white and on a dark background."""

from functools import cache

COLOURS = (
    "#006d9f", "#c63538", "#08a875", "#aa7ee6", "#d67927", "#8295af",
    "#d35a97", "#9c7d53", "#638fc5", "#9e9548", "#008967", "#a34d50",
)  # fmt: skip
"""Twelve colours for lines; the first six are distinct for colour-blind readers too.

All contrast with white and with `DARK` by 3:1 or more. More than six lines need line styles or
labels as well.
"""
COLOURS_ON_DARK = (
    "#4a94c2", "#f04c49", "#58e79f", "#9171ef", "#f8a020", "#c0d4e7",
    "#c96288", "#d2aa75", "#90adef", "#cfd573", "#7cd0b2", "#c28076",
)  # fmt: skip
"""The same twelve colours on a dark background, where text in them is readable."""
WHITE, DARK = "#ffffff", "#14181e"  # the backgrounds
INK, MUTED, GRID = "#1f2328", "#59636e", "#d5dae0"  # titles and axes, other texts, grid lines
GREY = "#9aa1a9"  # reference lines
_NEUTRAL_ON_DARK = {INK: "#e6edf3", MUTED: "#a3acb6", GRID: "#363d46", WHITE: DARK}


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG's formula, from 1 to 21.

    Example:
        >>> contrast("#000000", "#ffffff")
        21.0
    """
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def readable(colour: str, background: str = WHITE, least: float = 4.5) -> str:
    """Return the nearest shade of a colour with sufficient contrast for text on a background."""
    target = (0, 0, 0) if _luminance(background) > 0.18 else (255, 255, 255)
    shades = (_mixed(colour, target, percent / 100) for percent in range(101))
    return next(shade for shade in shades if contrast(shade, background) >= least)


def on_dark(colour: str) -> str:
    """Return the replacement of a colour on a dark background."""
    return _replacements().get(colour) or readable(colour, DARK)


@cache
def _replacements() -> dict[str, str]:
    """Return the fixed replacements: of neutral tones, lines and the labels of lines."""
    lines = dict(zip(COLOURS, COLOURS_ON_DARK, strict=True))
    return _NEUTRAL_ON_DARK | {readable(light): dark for light, dark in lines.items()} | lines


def _mixed(colour: str, target: tuple[int, int, int], share: float) -> str:
    pairs = zip(_channels(colour), target, strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(colour: str) -> float:
    """Return the relative luminance of an sRGB colour."""
    shares = [value / 255 for value in _channels(colour)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
