"""What builds the documentation site: links, notebooks, the check of the pages, versions.

`make docs` builds the site itself.
"""

import json
import re
from pathlib import Path

import api_pages
import check_html
import gather
import links
import notebooks
import pytest
import sections
import versions

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ("README.md", "index.md"),
        ("docs/how-to-deploy.md", "how-to-deploy.md"),
        ("docs/tutorial-first-run.md", "tutorial-first-run.ipynb"),
        ("benchmarks/bytes/README.md", "benchmarks/bytes.md"),
        ("benchmarks/trust/door.md", "benchmarks/trust-door.md"),
        ("benchmarks/bytes/figure.png", "benchmarks/bytes/figure.png"),
        ("examples/fair.py", "gallery/fair.rst"),
        ("src/simfbo/core/sampling.py", "api/simfbo.sampling.rst"),
        ("benchmarks/bytes/table.md", None),
        ("src/simfbo/core/exchange.py", None),
    ],
)
def test_place_on_the_site(file, page):
    assert links.place(file) == page


def test_links_lead_to_pages_or_to_the_repository():
    text = "[a](how-to-deploy.md#tls), [b](../benchmarks/bytes/README.md), [c](#here), [d](../src)"
    assert links.rewritten(text, "docs/tutorial-first-run.md") == (
        "[a](how-to-deploy.md#tls), [b](benchmarks/bytes.md), [c](#here), "
        f"[d]({links.REPOSITORY}/tree/main/src)"
    )
    nested = links.rewritten("[a](../../docs/x.md) [b](run.py)", "benchmarks/bytes/README.md")
    assert nested == f"[a](../x.md) [b]({links.REPOSITORY}/blob/main/benchmarks/bytes/run.py)"


def test_code_and_other_sites_are_left_alone():
    text = "```python\na[0](x.md)\n```\n[flower](https://flower.ai)\n[s]: https://semver.org\n"
    assert links.rewritten(text, "docs/a.md") == text


def test_a_tutorial_becomes_a_notebook():
    made = json.loads(notebooks.notebook("# T\n\ntext\n\n```python\nx = 1\n```\n\n    make\n"))
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in made["cells"]] == [
        ("markdown", "# T\n\ntext"),
        ("code", "x = 1"),
        ("markdown", "    make"),
    ]


def test_an_example_becomes_a_script_of_the_gallery():
    script = '"""Help."""\n\n# %% [markdown]\n# # T\n#\n# Some `code`.\n\n# %%\nx = 1\n\n'
    script += "# %% [markdown]\n# ## Part\n# [a](b)\n\n# %%\ny = 2\n"
    assert notebooks.gallery_script(script) == (
        '"""\nT\n=\n\nSome ``code``.\n"""\n\nx = 1\n\n# %%\n# Part\n# ----\n# `a <b>`__\n\ny = 2\n'
    )


def test_examples_keep_their_code():
    for file in sorted((ROOT / "examples").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        made = notebooks.gallery_script(text)
        compile(made, file.name, "exec")
        code = [line for line in text.splitlines()[1:] if line and not line.startswith("#")]
        assert [line for line in code if line not in made] == [], file
        assert re.search(r'^"""\n.+\n=+\n', made), file


def test_every_page_is_once_in_the_navigation():
    pages = gather.pages()
    shown = [line for text in pages.values() for line in toctrees(text)]
    names = {path.rpartition(".")[0] for path in pages}
    assert sorted(shown) == sorted(names - {"index"} | {"gallery/index"})


def toctrees(text):
    for block in re.findall(r"```{toctree}\n:hidden:\n\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            yield re.sub(r".*<(.+)>", r"\1", line)


def test_a_document_heads_its_section():
    texts = {"index": "", "reference-methods": "# Which?", "reference-simfbo": "# SimFBO"}
    made = sections.arranged(texts)
    assert made["reference-methods"].startswith("# Which?\n")
    assert list(toctrees(made["reference-methods"])) == ["reference-simfbo"]
    assert made["explanation"].startswith("# Explanation\n")
    with pytest.raises(SystemExit, match="In no section of the site: lost"):
        sections.arranged({**texts, "lost": "# Lost"})


def test_titles_and_first_sentences():
    text = "<!-- needs: torch -->\n# T\n\n**Claim.** A is\nb ([how](x.md)). Also [c](d.md).\n"
    assert sections.summary(text) == ("T", "A is b.")
    assert sections.summary("# T\n\n## Part\n") == ("T", "")


def test_old_pages_go_and_the_gallery_stays(tmp_path):
    gather.write(tmp_path, {"a.md": b"a", "old.md": b"b", "gallery/c.rst": b"c"})
    gather.write(tmp_path, {"a.md": b"a"}, kept="gallery/")
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")]
    assert sorted(left) == ["a.md", "gallery/c.rst"]


def test_a_name_without_a_docstring_is_found(monkeypatch):
    assert api_pages.undocumented() == []
    monkeypatch.setattr("simfbo.core.partition.iid.__doc__", "")
    assert api_pages.undocumented() == ["simfbo.partition.iid"]


def test_names_differ_in_more_than_capitals():
    names = [*api_pages.NAMESPACES, *(one.full for one in api_pages.public_names())]
    files = [api_pages.FILES.get(name, name) for name in names]
    assert len({file.lower() for file in files}) == len(files) > 120


FAULTS = {
    '<a href="b.html#x">': "has no such anchor",
    '<a href="c.html">': "does not exist",
    '<img src="c.png">': "does not exist",
    '<script src="https://cdn.example/x.js">': "is loaded from elsewhere",
    "<p>&lt;function f at 0x7f142b792ca0&gt;</p>": "is of this machine",
    "<p>written to /root/x.png</p>": "is of this machine",
    '<link rel="stylesheet" href="//cdn.example/x.css">': "is loaded from elsewhere",
}


@pytest.mark.parametrize("tag", FAULTS)
def test_faults_are_found(tmp_path, tag):
    (tmp_path / "b.html").write_text('<p id="y">')
    (tmp_path / "a.html").write_text(f'<a href="b.html#y"><a href="https://x.org">{tag}')
    assert [(one.page, one.why) for one in check_html.faults(tmp_path)] == [("a.html", FAULTS[tag])]


def test_fonts_from_elsewhere_are_found(tmp_path):
    (tmp_path / "a.css").write_text('@import "https://x.org/a.css"; b {c: url(fonts/a.woff2)}')
    assert [one.target for one in check_html.faults(tmp_path)] == ["https://x.org/a.css"]


def test_names_without_a_page_are_found(tmp_path):
    assert "simfbo.run" in check_html.without_page(tmp_path)
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "simfbo.run.html").touch()
    assert "simfbo.run" not in check_html.without_page(tmp_path)


def test_mathematics_loads_only_fonts_that_are_here():
    folder = ROOT / "docs" / "site" / "_static" / "katex"
    named = set(re.findall(r"url\((fonts/[^)]+)\)", (folder / "katex.min.css").read_text()))
    assert named == {f"fonts/{path.name}" for path in (folder / "fonts").iterdir()}


def test_versions(tmp_path):
    build, site = tmp_path / "build", tmp_path / "site"
    build.mkdir()
    site.mkdir()
    for name in ("latest", "v0.9.0", "v0.10.0", "v0.11.0rc1", "latest"):
        (build / "index.html").write_text(name)
        versions.add(site, name, build)
    assert (site / "stable" / "index.html").read_text() == "v0.10.0"
    assert "stable/index.html" in (site / "index.html").read_text()
    listed = json.loads((site / "versions.json").read_text())
    assert [one["version"] for one in listed] == ["latest", "v0.10.0", "v0.9.0"]
    assert [one["url"] for one in listed if one.get("preferred")] == ["/simfbo/stable/"]
