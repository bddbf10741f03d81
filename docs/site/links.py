"""Where a file of the repository is on the site, and links rewritten to lead there.

The documents are written for GitHub: links are relative and name files of the repository. What is
no page of the site is linked on GitHub.
"""

import posixpath
import re
from pathlib import Path, PurePosixPath

from api_pages import NAMESPACES

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/simfbo/simfbo"
_FENCED = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))|(^\[[^]]+\]: )(\S+)($)", re.MULTILINE)
_PICTURES = (".png", ".svg")
_RULES: tuple[tuple[str, str], ...] = (
    (r"README\.md|docs/site/index\.md", "index.md"),
    (r"CHANGELOG\.md", "changelog.md"),
    (r"docs/(tutorial-[\w-]+)\.md", r"\1.ipynb"),
    (r"docs/([\w-]+\.md)", r"\1"),
    (r"docs/([\w.-]+\.(?:png|svg))", r"\1"),
    (r"benchmarks/summary\.md", "benchmarks/summary.md"),
    (r"benchmarks/([\w-]+)/README\.md", r"benchmarks/\1.md"),
    (r"benchmarks/([\w-]+)/(?!table\b)([\w-]+\.md)", r"benchmarks/\1-\2"),
    (r"(benchmarks/[\w-]+/[\w.-]+\.(?:png|svg))", r"\1"),
    (r"examples/README\.md", "gallery/index.rst"),
    (r"examples/(\w+)\.py", r"gallery/\1.rst"),
)
_SOURCES = {
    f"src/{module.replace('.', '/')}{ending}": f"api/{title}.rst"
    for title, module in NAMESPACES.items()
    for ending in (".py", "/__init__.py", "/__init__.pyi")
}


def place(file: str) -> str | None:
    """Return where the site has a file of the repository; None if it has it not."""
    if file in _SOURCES:
        return _SOURCES[file]
    for pattern, replacement in _RULES:
        if match := re.fullmatch(pattern, file):
            return match.expand(replacement)
    return None


def rewritten(text: str, file: str) -> str:
    """Return the Markdown of a file of the repository with its links leading to the site."""
    page = place(file) or file

    def target(match: re.Match[str]) -> str:
        before, link, after = (part for part in match.groups() if part is not None)
        return f"{before}{_target(link, file, page)}{after}"

    parts = _FENCED.split(text)
    parts[::2] = [_LINK.sub(target, part) for part in parts[::2]]
    return "".join(parts)


def _target(link: str, file: str, page: str) -> str:
    """Return a link as the page has to write it."""
    path, hash_, anchor = link.partition("#")
    if "://" in link or not path:
        return link
    found = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
    there = place(found)
    if there is None or (anchor and found == "README.md"):  # the start page has other headings
        kind = "tree" if (ROOT / found).is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{found}{hash_}{anchor}"
    return posixpath.relpath(there, posixpath.dirname(page) or ".") + hash_ + anchor


def pictures(pages: list[str]) -> list[str]:
    """Return the pictures that lie beside documents and are part of the site."""
    folders = {str(PurePosixPath(page).parent) for page in pages}
    found = [path for folder in folders for path in (ROOT / folder).iterdir()]
    names = [path.relative_to(ROOT).as_posix() for path in found if path.suffix in _PICTURES]
    return sorted(name for name in names if place(name))
