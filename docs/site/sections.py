"""The navigation: which sections there are, which documents are in them, and their pages."""

import fnmatch
import re
from collections.abc import Iterable
from typing import NamedTuple

from simfbo.config.catalogue import METHODS

_ASIDE = re.compile(r" \(\[[^]]+\]\([^)]*\)\)")
_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")
_TITLE = re.compile(r"^# ([^\n]+)\n+(?:(?![#|`>-])(.+?)(?=\n\n|\Z))?", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """An entry of the navigation.

    Attributes:
        page: where it leads; the page is written here unless a document has that name.
        title: its name.
        about: what a page written here says before it lists the documents.
        patterns: the documents below it, in order; one that matches twice is in the first section.
    """

    page: str
    title: str
    about: str = ""
    patterns: tuple[str, ...] = ()


NAVIGATION = (
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
        "reference-methods",
        "Methods",
        "A page per method: equations, cost from the ledger, what the tests show, and choices made "
        "where the paper is silent.",
        tuple(f"reference-{name}" for name in METHODS.names()),
    ),
    Section("gallery/index", "Gallery"),
    Section("explanation-reproduction", "Reproduction"),
    Section("explanation", "Explanation", "How it works, and why.", ("explanation-*",)),
    Section(
        "reference-benchmarks",
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
    Section("changelog", "Changelog"),
)


def arranged(texts: dict[str, str]) -> dict[str, str]:
    """Return the documents with the navigation in them, and the pages that sections need.

    Args:
        texts: the documents, by name.

    Raises:
        SystemExit: if a document is in no section.
    """
    texts = dict(texts)
    free = texts.keys() - {"index"} - {section.page for section in NAVIGATION}
    for section in NAVIGATION:
        below = [name for pattern in section.patterns for name in _matching(free, pattern)]
        below = list(dict.fromkeys(below))
        free -= set(below)
        if section.about and section.page not in texts:
            texts[section.page] = _page(section, [_item(name, texts[name]) for name in below])
        if below:
            texts[section.page] += toctree(below)
    texts["index"] += toctree(f"{section.title} <{section.page}>" for section in NAVIGATION)
    if free:
        raise SystemExit(f"In no section of the site: {', '.join(sorted(free))}.")
    return texts


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    return sorted(fnmatch.filter(names, pattern))


def _page(section: Section, items: list[str]) -> str:
    return "\n".join([f"# {section.title}\n\n{section.about}\n", *items])


def _item(name: str, text: str) -> str:
    """Return a line about a document: its title and first sentence."""
    title, sentence = summary(text)
    return f"- [{title}](/{name})" + (f": {sentence}" if sentence else "")


def summary(text: str) -> tuple[str, str]:
    """Return the title of a document and its first sentence, if it starts with one."""
    match = _TITLE.search(text)
    assert match is not None, text[:80]
    paragraph = " ".join((match[2] or "").removeprefix("**Claim.**").split())
    plain = _LINK.sub(r"\1", _ASIDE.sub("", paragraph))
    return match[1], re.split(r"(?<=\.) (?=[A-Z])", plain)[0]


def toctree(names: Iterable[str]) -> str:
    """Return what makes pages part of the navigation, below the page it is on."""
    return "\n".join(["\n", "```{toctree}", ":hidden:", "", *names, "```", ""])
