"""Figures as SVG, with text as text, and with one file for light and dark pages."""

import io
import re
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from simfbo.errors import require
from simfbo.runs.palette import on_dark

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_PLAIN = {"svg.fonttype": "none", "svg.hashsalt": "simfbo"}
_SILENT = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_SHAPE = re.compile(r'\b(?:d|x|y|width|height|transform)="[^"]*"')
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_COLOUR = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")
_STYLE = re.compile(r"<style .*?</style>", re.DOTALL)
_DARK = re.compile(r"@media .*?\n}\n", re.DOTALL)


def as_svg(figure: "Figure") -> str:
    """Convert a figure to reproducible SVG with a transparent background.

    A style sheet replaces the colours of the figure on dark pages. The figure's label becomes the
    title for screen readers.
    """
    matplotlib, buffer = require("matplotlib", "plots"), io.BytesIO()
    lines: Any = figure.findobj(require("matplotlib.lines", "plots").Line2D)
    for line in lines:
        line.get_path().simplify_threshold = 0.4  # points, below the resolution of screens
    with matplotlib.rc_context(_PLAIN):
        figure.savefig(buffer, format="svg", transparent=True, metadata=_SILENT)
    text = buffer.getvalue().decode()
    head, _, body = text[text.index("<svg") + 4 :].partition(">")
    body = re.sub(r" font-family: [^;\"]*;?", "", body)
    body = _SHAPE.sub(lambda shape: _LONG_NUMBER.sub(_rounded, shape[0]), body)
    body = _STYLE.sub(lambda _: f"<style>\n{_rules(text)}</style>", body, count=1)
    title = f"\n <title>{escape(str(figure.get_label()))}</title>"
    return f'<svg role="img"{head}>{title}{body}'


def only_light(svg: str) -> str:
    """Remove the colours for dark pages, for a page without a dark theme."""
    return _DARK.sub("", svg, count=1)


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _rules(svg: str) -> str:
    """Return the style sheet: the fonts, and the replacement of every colour on dark pages.

    Selectors match the colours themselves: without style sheets the light ones are shown. They name
    no ancestors, since elements repeated by `use` have none.
    """
    pairs = sorted(set(_COLOUR.findall(svg)))
    dark = "\n".join(
        f'[style*="{attribute}: {colour}"] {{ {attribute}: {on_dark(colour)} !important }}'
        for attribute, colour in pairs
    )
    return (
        "path { stroke-linejoin: round; stroke-linecap: butt }\n"
        f"text {{ font-family: {_FONTS} }}\n"
        f"@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
    )
