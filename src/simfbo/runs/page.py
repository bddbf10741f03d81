"""The page that shows runs, in one file: live, asking a server for lines, or frozen with its data.

Its parts are in the folder `view`. Everything is inlined, and a content security policy allows
nothing else: scripts and styles by their digests, requests to the page's own server when live.
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
# The order matters: each uses what is defined before it.
_STYLES = ("uplot/uPlot.min.css", "page.css", "parts.css", "narrow.css")
_SCRIPTS = ("format.js", "colours.js", "store.js", "lines.js", "marks.js", "chart.js", "table.js",
            "details.js", "main.js")  # fmt: skip


def live() -> str:
    """Return the page that asks the server it came from for the lines of runs."""
    return _page({"live": True}, "", "connect-src 'self'")


def frozen(runs: Sequence[Json], differ: Sequence[str], summaries: Sequence[str],
           table: Sequence[Json]) -> str:  # fmt: skip
    """Return the page with all of its data inside.

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
    """Put the parts of the page together."""
    style, library, script = _parts()
    hashes = [f"'sha256-{_digest(part)}'" for part in (library, script)]
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes)}; "
        f"style-src 'sha256-{_digest(style)}'; {connect}; base-uri 'none'; form-action 'none'"
    )
    data = {**data, "palette": COLOURS, "bookkeeping": BOOKKEEPING,
            "channels": CHANNEL_BYTES}  # fmt: skip
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return Template(_read("page.html")).substitute(
        policy=policy, style=style, library=library, script=script, data=text, noscript=noscript
    )


@lru_cache
def _parts() -> tuple[str, str, str]:
    """Return the styles, the plotting library with its licence, and our own scripts."""
    library = f"/*!\n{_read('uplot/LICENSE')}\n*/\n{_read('uplot/uPlot.iife.min.js')}"
    own = "\n".join(map(_read, _SCRIPTS))
    script = f'(function () {{\n"use strict";\n{own}}})();'
    return "\n".join(map(_read, _STYLES)), library, script


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(part: str) -> str:
    """Return the digest by which a content security policy allows an inlined part."""
    return base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()


def _section(name: str, summary: str) -> str:
    """Return the summary of a run, escaped."""
    lines = "<br>".join(map(escape, summary.splitlines()))
    return f"<section><h2>{escape(name)}</h2><p>{lines}</p></section>"
