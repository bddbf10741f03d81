"""Write llms.txt and llms-full.txt: the site for readers that are programs. A Sphinx extension.

llms.txt lists title, address and first sentence of every page in the order of the navigation;
llms-full.txt is the Markdown of all of them in one file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_ABOUT = "> Federated bilevel optimisation in JAX: learn hyperparameters, weights or features from "
_ABOUT += "data that stays with many owners."


def ordered(env: Any, page: str = "index") -> Iterator[str]:
    """Yield the pages in the order of the navigation."""
    yield page
    for below in env.toctree_includes.get(page, ()):
        yield from ordered(env, below)


def sentence(tree: nodes.document) -> str:
    """Return the first sentence of a page."""
    for paragraph in tree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if text:
            return text.partition(". ")[0].rstrip(".:")
    return ""


def entry(app: Sphinx, page: str) -> str:
    """Return the line about a page."""
    link = f"- [{app.env.titles[page].astext()}]({app.config.html_baseurl}{page}.html)"
    about = sentence(app.env.get_doctree(page))
    return f"{link}: {about}" if about else link


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write both files beside the pages."""
    if exception or app.builder.format != "html":
        return
    pages, out = list(dict.fromkeys(ordered(app.env))), Path(app.outdir)
    entries = [entry(app, page) for page in pages]
    (out / "llms.txt").write_text("\n".join(["# simfbo", "", _ABOUT, "", *entries, ""]), "utf-8")
    markdown = [path for one in pages if (path := Path(app.env.doc2path(one))).suffix == ".md"]
    full = "\n\n".join(path.read_text("utf-8") for path in markdown)
    (out / "llms-full.txt").write_text(full, "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the files when all pages are written."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
