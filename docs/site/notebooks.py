"""Tutorials as notebooks, and example scripts as sphinx-gallery reads them.

Tutorials are Markdown with Python blocks, examples are scripts with Markdown in cells marked
`# %% [markdown]`. Both stay as they are in the repository.
"""

import json
import re

_BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"^# %%.*$\n?", re.MULTILINE)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[([^]]+)\]\(([^)\s]+)\)")


def notebook(text: str) -> str:
    """Return a tutorial as a notebook that has not been run."""
    cells = [_cell(part, index) for index, part in enumerate(_BLOCK.split(text)) if part.strip()]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    found = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, indent=1) + "\n"


def _cell(part: str, index: int) -> dict[str, object]:
    """Return a cell: parts with an odd number are what the blocks hold."""
    source = part.strip("\n").splitlines(keepends=True)
    cell: dict[str, object] = {"id": f"cell-{index}", "metadata": {}, "source": source}
    if index % 2 == 0:
        return {"cell_type": "markdown", **cell}
    return {"cell_type": "code", "execution_count": None, "outputs": [], **cell}


def gallery_script(text: str) -> str:
    """Return an example with its text in reST, and its first text as the docstring."""
    marks = _CELL.findall(text)
    parts = _CELL.split(text)[1:]  # what stands before is the docstring, for --help
    title, *cells = [
        _rest(part) if "markdown" in mark else part.strip("\n")
        for mark, part in zip(marks, parts, strict=True)
    ]
    found = [f'"""\n{title}\n"""']
    for mark, cell in zip(marks[1:], cells, strict=True):
        found.append(f"# %%\n{_commented(cell)}" if "markdown" in mark else cell)
    return "\n\n".join(found) + "\n"


def _rest(cell: str) -> str:
    """Return the Markdown of a cell of comments as reST."""
    text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in cell.splitlines())
    text = _HEADING.sub(_underlined, text.strip())
    return _LINK.sub(r"`\1 <\2>`__", _CODE.sub(r"``\1``", text))


def _underlined(heading: re.Match[str]) -> str:
    level, title = heading.groups()
    return f"{title}\n{'=-~'[len(level) - 1] * len(title)}"


def _commented(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())
