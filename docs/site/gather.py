"""Gather the sources of the site: `python docs/site/gather.py FOLDER`.

Pages are the documents of the repository, with links that lead to the site, and a few that are
written here: the start page, a page per section, and the API reference.
"""

import fnmatch
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import api_pages
import links
import notebooks
from links import ROOT

from simfbo.config.catalogue import METHODS

HERE = Path(__file__).parent
_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")
_ASIDE = re.compile(r" \(\[[^]]+\]\([^)]*\)\)")
_UNTITLED = {"benchmarks/summary.md": "# The paper's experiments in one table\n\n"}
_TITLE = re.compile(r"^# ([^\n]+)\n+(?:(?![#|`>-])(.+?)(?=\n\n|\Z))?", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """A section: its page, title and first sentence, and its documents as patterns, in order."""

    page: str
    title: str
    about: str
    patterns: tuple[str, ...]


SECTIONS = (
    Section(
        "tutorials",
        "Tutorials",
        "Learn by doing. Each page was run when this site was built, and can be downloaded as a "
        "notebook.",
        ("tutorial-first-run", "tutorial-*"),
    ),
    Section(
        "how-to",
        "How-to",
        "Steps for a task you have in mind.",
        ("how-to-choose-by-symptom", "how-to-*"),
    ),
    Section(
        "methods",
        "Methods",
        "A page per method: equations, cost from the ledger, what the tests show, and choices made "
        "where the paper is silent.",
        ("reference-methods", *(f"reference-{name}" for name in METHODS.names())),
    ),
    Section("explanation", "Explanation", "How it works, and why it is so.", ("explanation-*",)),
    Section(
        "benchmarks",
        "Benchmarks",
        "What was measured: the claim, the set-up, the command and the figures of each.",
        ("benchmarks/summary", "benchmarks/*"),
    ),
    Section(
        "reference",
        "Reference",
        "What is public, and every setting.",
        ("reference-api", "reference-*"),
    ),
)
# The order of the navigation; a name may be that of a section or of a document.
NAVIGATION = (
    "tutorials",
    "how-to",
    "methods",
    "Gallery <gallery/index>",
    "explanation",
    "Reproduction <explanation-reproduction>",
    "benchmarks",
    "reference",
    "Changelog <changelog>",
)


def documents() -> list[str]:
    """Return the files of the repository that are pages."""
    patterns = ("CHANGELOG.md", "docs/*.md", "benchmarks/*.md", "benchmarks/*/*.md")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    names = sorted(path.relative_to(ROOT).as_posix() for path in found)
    return [name for name in names if links.place(name)]


def written() -> Iterator[tuple[str, str]]:
    """Yield path and text of every page of the site."""
    pages: dict[str, str] = {}
    for file in documents():
        text = _UNTITLED.get(file, "") + (ROOT / file).read_text(encoding="utf-8")
        pages[links.place(file) or file] = links.rewritten(text, file)
    yield from _sections(pages)
    pages["reference-api.md"] += _toctree(f"api/{title}" for title in api_pages.NAMESPACES)
    yield from ((path, _finished(path, text)) for path, text in pages.items())
    yield from api_pages.pages()


def _finished(path: str, text: str) -> str:
    return notebooks.notebook(text) if path.endswith(".ipynb") else text


def _sections(pages: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the start page and those of the sections."""
    start = (HERE / "index.md").read_text(encoding="utf-8")
    yield "index.md", links.rewritten(start, "docs/site/index.md") + _toctree(NAVIGATION)
    texts = {path.rpartition(".")[0]: text for path, text in pages.items()}
    free = dict.fromkeys(name for name in texts if not any(f"<{name}>" in n for n in NAVIGATION))
    for section in sorted(SECTIONS, key=lambda one: one.page == "reference"):  # it takes the rest
        names = list(dict.fromkeys(n for p in section.patterns for n in fnmatch.filter(free, p)))
        free = {name: None for name in free if name not in names}
        lines = [f"# {section.title}\n\n{section.about}\n", *(_item(n, texts[n]) for n in names)]
        yield f"{section.page}.md", "\n".join(lines) + _toctree(names)
    if free:
        raise SystemExit(f"In no section of the site: {', '.join(free)}.")


def _item(name: str, text: str) -> str:
    """Return a line about a document: its title and first sentence."""
    title, sentence = summary(text)
    return f"- [{title}](/{name})" + (f": {sentence}" if sentence else "")


def summary(text: str) -> tuple[str, str]:
    """Return the title of a document and its first sentence, if it starts with one."""
    match = _TITLE.search(text)
    assert match is not None, text[:80]
    paragraph = " ".join((match[2] or "").removeprefix("**Claim.**").split())
    return match[1], re.split(r"(?<=\.) (?=[A-Z])", _LINK.sub(r"\1", _ASIDE.sub("", paragraph)))[0]


def _toctree(names: Iterable[str]) -> str:
    return "\n".join(["\n", "```{toctree}", ":hidden:", "", *names, "```", ""])


def write(path: Path, content: str | bytes) -> None:
    """Write a file unless it is so already: Sphinx builds again what changed."""
    data = content.encode() if isinstance(content, str) else content
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def main(folder: Path) -> None:
    """Write everything that Sphinx reads."""
    if missing := api_pages.undocumented():
        raise SystemExit(f"Public names without a docstring: {', '.join(missing)}.")
    for path, text in written():
        write(folder / "pages" / path, text)
    for picture in links.pictures(documents()):
        write(folder / "pages" / (links.place(picture) or ""), (ROOT / picture).read_bytes())
    for script in (ROOT / "examples").glob("*.py"):
        text = notebooks.gallery_script(script.read_text(encoding="utf-8"))
        write(folder / "examples" / script.name, text)
    write(folder / "examples" / "GALLERY_HEADER.rst", (HERE / "gallery.rst").read_text("utf-8"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
