"""Gather the sources of the site: `python docs/site/gather.py FOLDER`.

Pages are the documents of the repository, with links that lead to the site, and a few that are
written here: the start page, pages of sections, and the API reference.
"""

import sys
from pathlib import Path

import api_pages
import links
import notebooks
import sections
from links import ROOT

HERE = Path(__file__).parent
_UNTITLED = {"benchmarks/summary.md": "# The paper's experiments in one table\n\n"}


def documents() -> list[str]:
    """Return the files of the repository that are pages."""
    patterns = ("CHANGELOG.md", "docs/*.md", "benchmarks/*.md", "benchmarks/*/*.md")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    names = sorted(path.relative_to(ROOT).as_posix() for path in found)
    return ["docs/site/index.md", *(name for name in names if links.place(name))]


def pages() -> dict[str, str]:
    """Return the text of every page of the site, by path."""
    texts: dict[str, str] = {}
    for file in documents():
        text = _UNTITLED.get(file, "") + (ROOT / file).read_text(encoding="utf-8")
        texts[_name(links.place(file) or file)] = links.rewritten(text, file)
    texts["reference-api"] += sections.toctree(f"api/{one}" for one in api_pages.NAMESPACES)
    found = dict(_file(name, text) for name, text in sections.arranged(texts).items())
    return found | dict(api_pages.pages())


def _name(path: str) -> str:
    return path.rpartition(".")[0]


def _file(name: str, text: str) -> tuple[str, str]:
    """Return path and content of a page: tutorials are notebooks."""
    if name.startswith("tutorial-"):
        return f"{name}.ipynb", notebooks.notebook(text)
    return f"{name}.md", text


def examples() -> dict[str, str]:
    """Return what sphinx-gallery reads, by path."""
    found = {
        script.name: notebooks.gallery_script(script.read_text(encoding="utf-8"))
        for script in sorted((ROOT / "examples").glob("*.py"))
    }
    return {"GALLERY_HEADER.rst": (HERE / "gallery.rst").read_text(encoding="utf-8"), **found}


def pictures() -> dict[str, bytes]:
    """Return the pictures of the pages, by path."""
    files = links.pictures(documents())
    return {links.place(file) or file: (ROOT / file).read_bytes() for file in files}


def write(folder: Path, files: dict[str, bytes], kept: str = "") -> None:
    """Write files that have changed, and remove all others but those in the folder `kept`."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files and not (kept and name.startswith(kept)):
            path.unlink()
    for name, data in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def main(folder: Path) -> None:
    """Write everything that Sphinx reads; what sphinx-gallery has made of examples is kept."""
    if missing := api_pages.undocumented():
        raise SystemExit(f"Public names without a docstring: {', '.join(missing)}.")
    texts = {name: text.encode() for name, text in pages().items()}
    write(folder / "pages", texts | pictures(), kept="gallery/")
    write(folder / "examples", {name: text.encode() for name, text in examples().items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
