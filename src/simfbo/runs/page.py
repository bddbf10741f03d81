"""The page that shows runs, in one file: live with a server, or frozen with its data.

Its parts are in the folder `view`. All of them are inlined, and a content security policy allows
only these, by their digests, and, on a live page, requests to its server.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from string import Template

from simfbo.runs.files import Json
from simfbo.runs.history import BOOKKEEPING, CHANNEL_BYTES
from simfbo.runs.palette import COLOURS

_FOLDER = Path(__file__).parent / "view"
# In this order, since later files use definitions of earlier ones.
_STYLES = ("uplot/uPlot.min.css", "page.css", "parts.css", "narrow.css")
_SCRIPTS = [
    "format.js",
    "colours.js",
    "store.js",
    "lines.js",
    "marks.js",
    "chart.js",
    "table.js",
    "details.js",
    "main.js",
]


def live() -> str:
    """Return the page that requests the lines of runs from its server."""
    return _page({"live": True}, "", "connect-src 'self'")


def frozen(
    runs: Sequence[Json], differ: Sequence[str], summaries: Sequence[str], table: Sequence[Json]
) -> str:
    """Return the page with its data embedded.

    Args:
        runs: the `name`, the `group` and the `lines` of each run.
        differ: the keys of the settings that differ between them.
        summaries: of the runs, for readers without JavaScript.
        table: rows to show, all with the same keys.
    """
    data = {"live": False, "runs": runs, "differ": list(differ), "table": list(table)}
    names = [run["name"] for run in runs]
    return _page(data, "\n".join(map(_section, names, summaries)), "connect-src 'none'")


def _page(data: Json, noscript: str, connect: str) -> str:
    style, library, script = _parts()
    hashes = [f"'sha256-{_digest(source)}'" for source in (library, script)]
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes)}; "
        f"style-src 'sha256-{_digest(style)}'; {connect}; base-uri 'none'; form-action 'none'"
    )
    constants = {"palette": COLOURS, "bookkeeping": BOOKKEEPING, "channels": CHANNEL_BYTES}
    text = json.dumps({**data, **constants}, allow_nan=False).replace("<", "\\u003c")
    return Template(_read("page.html")).substitute(
        policy=policy, style=style, library=library, script=script, data=text, noscript=noscript
    )


@lru_cache
def _parts() -> tuple[str, str, str]:
    """Return the styles, the plotting library with its licence, and the scripts of the page."""
    library = f"/*!\n{_read('uplot/LICENSE')}\n*/\n{_read('uplot/uPlot.iife.min.js')}"
    scripts = "\n".join(map(_read, _SCRIPTS))
    script = f'(function () {{\n"use strict";\n{scripts}}})();'
    return "\n".join(map(_read, _STYLES)), library, script


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(source: str) -> str:
    """Return the digest of an inlined source in the form of a content security policy."""
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _section(name: str, summary: str) -> str:
    lines = "<br>".join(map(escape, summary.splitlines()))
    return f"<section><h2>{escape(name)}</h2><p>{lines}</p></section>"
