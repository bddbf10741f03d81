"""Figures as SVG: text stays text, and one file serves light and dark pages."""

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
    """Return a figure as SVG with a transparent background; equal figures give equal text.

    Colours are those of the figure, with a style sheet that replaces them where the page is dark.
    The figure's label is what screen readers say.
    """
    matplotlib, buffer = require("matplotlib", "plots"), io.BytesIO()
    lines: Any = figure.findobj(require("matplotlib.lines", "plots").Line2D)
    for line in lines:
        line.get_path().simplify_threshold = 0.4  # points; a screen shows no less
    with matplotlib.rc_context(_PLAIN):
        figure.savefig(buffer, format="svg", transparent=True, metadata=_SILENT)
    text = buffer.getvalue().decode()
    head, _, body = text[text.index("<svg") + 4 :].partition(">")
    body = re.sub(r" font-family: [^;\"]*;?", "", body)
    body = _SHAPE.sub(lambda found: _LONG_NUMBER.sub(_shorter, found[0]), body)
    body = _STYLE.sub(lambda _: f"<style>\n{_rules(text)}</style>", body, count=1)
    title = f"\n <title>{escape(str(figure.get_label()))}</title>"
    return f'<svg role="img"{head}>{title}{body}'


def only_light(svg: str) -> str:
    """Return an SVG without its dark colours, for a page that has none either."""
    return _DARK.sub("", svg, count=1)


def _shorter(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _rules(svg: str) -> str:
    """Return the style sheet: the fonts, and for every colour the one on dark pages.

    It selects by the colours themselves: where style sheets are ignored, the light ones are shown.
    What `use` repeats has no ancestors here, so selectors name none.
    """
    pairs = sorted(set(_COLOUR.findall(svg)))
    dark = "\n".join(
        f'[style*="{what}: {colour}"] {{ {what}: {on_dark(colour)} !important }}'
        for what, colour in pairs
    )
    return (
        "path { stroke-linejoin: round; stroke-linecap: butt }\n"
        f"text {{ font-family: {_FONTS} }}\n"
        f"@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
    )
