"""Check the built site: `python docs/site/check_html.py FOLDER`.

Links lead to files and anchors that exist, nothing is loaded from elsewhere, no page names the
machine it was built on, and every public name has its page. Links to other sites are not followed.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import api_pages

# What a browser fetches on its own, by tag; other links are followed by readers only.
_LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "embed": "src"}
_FETCHED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "search"}
_CSS_URL = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
# Addresses of objects and folders of a machine, as outputs of code can hold them.
_MACHINE = re.compile(r"\b0x[0-9a-f]{8,}\b|(?<![\w./-])/(?:home|root|tmp|work|Users)/\S*")
# Written by scripts of the theme, which makes their targets as the page loads.
_MADE_BY_SCRIPTS = {"#", "#pst-secondary-sidebar"}


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        """Read a page.

        Args:
            text: its HTML.
        """
        super().__init__()
        self.links: list[str] = []
        self.machine: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, loads, or is called."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and _FETCHED_LINKS & set(found.get("rel", "").split()):
            self.loads.append(found["href"])
        if (source := _LOADED.get(tag)) and found.get(source):
            self.loads.append(found[source])

    def handle_data(self, data: str) -> None:
        """Note what text says about the machine."""
        self.machine += _MACHINE.findall(data)


class Fault(NamedTuple):
    """A link or file that is wrong, and where."""

    page: str
    target: str
    why: str


def faults(folder: Path) -> list[Fault]:
    """Return what is wrong with a site."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in _pages(folder)}
    found = [fault for path, page in pages.items() for fault in _page_faults(path, page, pages)]
    found += [fault for path in sorted(folder.rglob("*.css")) for fault in _style_faults(path)]
    return [one._replace(page=str(Path(one.page).relative_to(folder.resolve()))) for one in found]


def _pages(folder: Path) -> list[Path]:
    """Return the pages of a site, without the templates that the theme keeps among its files."""
    return [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]


def _page_faults(path: Path, page: Page, pages: dict[Path, Page]) -> list[Fault]:
    """Return what is wrong with a page."""
    remote = [one for one in page.loads if _is_remote(one)]
    found = [Fault(str(path), one, "is loaded from elsewhere") for one in remote]
    found += [Fault(str(path), one, "is of this machine") for one in page.machine]
    for link in {*page.links, *page.loads}:
        if urlsplit(link).scheme or _is_remote(link) or link in _MADE_BY_SCRIPTS:
            continue
        file, anchor = _resolved(path, link)
        if not file.is_file():
            found.append(Fault(str(path), link, "does not exist"))
        elif file in pages and anchor not in pages[file].anchors:
            found.append(Fault(str(path), link, "has no such anchor"))
    return found


def _resolved(path: Path, link: str) -> tuple[Path, str]:
    """Return the file a link leads to, and the anchor in it."""
    parts = urlsplit(link)
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    return file / "index.html" if file.is_dir() else file, unquote(parts.fragment)


def _style_faults(path: Path) -> list[Fault]:
    """Return what a style sheet loads from elsewhere."""
    urls = [a or b for a, b in _CSS_URL.findall(path.read_text(encoding="utf-8"))]
    where = str(path.resolve())
    return [Fault(where, url, "is loaded from elsewhere") for url in urls if _is_remote(url)]


def _is_remote(link: str) -> bool:
    return link.startswith(("http:", "https:", "//"))


def without_page(folder: Path) -> list[str]:
    """Return the public names that have no page."""
    have = {path.stem for path in (folder / "api").glob("*.html")}
    names = [one.full for one in api_pages.public_names()]
    return [
        name
        for name in [*api_pages.NAMESPACES, *names]
        if api_pages.FILES.get(name, name) not in have
    ]


def main(folder: Path) -> int:
    """Print what is wrong; return 1 if anything is."""
    found = [f"{one.page}: {one.target} {one.why}" for one in faults(folder)]
    found += [f"{name} has no page" for name in without_page(folder)]
    print("\n".join(found) or f"{len(_pages(folder))} pages, all links lead somewhere")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
