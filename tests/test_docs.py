"""The Python code in README and documents runs, block after block, and links lead somewhere."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def blocks(page):
    return CODE.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "documentation"}
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        for block in blocks(page):
            exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


def test_documents_are_named_by_kind():
    kinds = ("tutorial-", "how-to-", "explanation-", "reference-")
    assert all(page.name.startswith(kinds) for page in (ROOT / "docs").glob("*.md"))


def test_readme_example_tells_features_that_matter(capsys):
    names = {"__name__": "documentation"}
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        exec(blocks(ROOT / "README.md")[0], names)
    penalties = [float(value) for value in re.findall(r"[\d.]+", capsys.readouterr().out)[:4]]
    assert max(penalties[:2]) < 0.05
    assert min(penalties[2:]) > 0.8
