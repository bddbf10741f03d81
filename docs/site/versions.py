"""Add a version to the published site: `python docs/site/versions.py SITE NAME BUILD`.

SITE has a folder per version: `latest` for the main branch, one per tag, and `stable`, a copy of
the newest tag that is no pre-release. versions.json lists them for the switcher of the pages.
"""

import json
import re
import shutil
import sys
from pathlib import Path

_TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+)")
_BASE = "/simfbo/"  # where GitHub Pages serves the site of this repository
_START = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={name}/index.html">
<title>simfbo</title>
<a href="{name}/index.html">simfbo</a>
"""


def add(site: Path, name: str, build: Path) -> None:
    """Put a built site in its place, and update what depends on which versions there are."""
    _replace(site / name, build)
    tags = released(site)
    if tags:
        _replace(site / "stable", site / tags[0])
    (site / "versions.json").write_text(json.dumps(listed(tags), indent=1) + "\n", "utf-8")
    start = _START.format(name="stable" if tags else "latest")
    (site / "index.html").write_text(start, "utf-8")
    (site / ".nojekyll").touch()  # folders that begin with an underscore are to be served


def released(site: Path) -> list[str]:
    """Return the tags that are there, the newest first."""
    found = [match for path in site.iterdir() if (match := _TAG.fullmatch(path.name))]
    return [one.group() for one in sorted(found, key=_number, reverse=True)]


def _number(match: re.Match[str]) -> tuple[int, ...]:
    return tuple(map(int, match.groups()))


def listed(tags: list[str]) -> list[dict[str, str | bool]]:
    """Return the entries of the switcher."""
    names = {"latest": "latest (main)"} | {tag: tag for tag in tags}
    found: list[dict[str, str | bool]] = [
        {"version": tag, "name": name, "url": f"{_BASE}{tag}/"} for tag, name in names.items()
    ]
    if tags:
        found[1] |= {"name": f"{tags[0]} (stable)", "url": f"{_BASE}stable/", "preferred": True}
    return found


def _replace(target: Path, source: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


if __name__ == "__main__":
    add(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
