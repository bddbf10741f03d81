"""Documents: their Python code runs, their links lead somewhere, and they speak plain English."""

import json
import re
import runpy
import shlex
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import mean

import jax
import pytest

from simfbo.cli.arguments import configuration
from simfbo.cli.main import build_parser

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
START_PAGE = ROOT / "docs" / "site" / "index.md"
SYMPTOMS = ROOT / "docs" / "how-to-choose-by-symptom.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    START_PAGE,
    *sorted((ROOT / "benchmarks").glob("*/README.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NEEDS = re.compile(r"^<!-- needs: (.+) -->$", re.MULTILINE)  # packages that code needs
ANCHOR = re.compile(r'<a id="([^"]+)">')
NOT_PROSE = re.compile(
    r"^```.*?^```$|`[^`\n]*`|(?<=\n\n) {4}[^\n]*(?:\n+ {4}[^\n]*)*", re.MULTILINE | re.DOTALL
)
DISPLAY = re.compile(r"(?<=\n\n)\$\$\n(.*?)\n\$\$(?=\n\n|\n?\Z)", re.DOTALL)
INLINE = re.compile(r"(?<![\w$\-\"'])\$(?! )([^$\n]+)(?<! )\$(?![\w$\-\"])")
# GitHub reads Markdown before mathematics: in a formula it takes for its own *, <, backslashes
# before punctuation, _ behind a bracket, and lines that begin like a list. Hence \ast, \lt, \cr.
MISREAD = re.compile(r"[*<>]|\\[^a-zA-Z]|[^a-zA-Z0-9]_|\\operatorname|\n *[-+=#]|[^\x00-\x7f]")
BRACKETS = ((r"\{", r"\}"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\\left\b", r"\\right\b"))
WIDTH = 120
START = "0.003 0.003"  # L2 weights of an estimator that has learnt nothing
# Phrases and names of an earlier style, none of which a native engineer would write.
DIALECT = (
    "is told",
    "are told",
    "goes on with",
    "is no setting",
    "one could do",
    "beside it",
    "as ever,",
    "without a word",
    "rehears",
    "spoilt",
    "weighed again",
    "made-up",
    "kept apart",
)


def name(page):
    return str(page.relative_to(ROOT))


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    return CODE.findall(text_of(page))


def anchors(page):
    """Return a page's own anchors, and those that GitHub makes of its headings."""
    text = FENCED.sub("", text_of(page))
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text)]
    return {heading.replace(" ", "-") for heading in words} | set(ANCHOR.findall(text))


def execute(page):
    """Run the Python blocks of a page, one after the other, as a user would."""
    names = {"__name__": "documentation"}
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        for block in blocks(page):
            exec(compile(block, page.name, "exec"), names)


# Slow: the code of these takes longest; `make docs` runs the tutorials too.
LONG = ("how-to-come-from-pytorch.md", "how-to-come-from-fednest.md", "how-to-use-flax-equinox.md",
        "tutorial-own-losses.md", "tutorial-compare-methods.md", "tutorial-first-run.md",
        "how-to-choose-by-symptom.md", "how-to-tune-clean-repair.md")  # fmt: skip
RUN = [
    pytest.param(p, id=name(p), marks=[pytest.mark.slow] if p.name in LONG else [])
    for p in PAGES
    if blocks(p) and p not in (README, START_PAGE)
]


@pytest.mark.filterwarnings("error:The fit has not converged")
@pytest.mark.parametrize("page", RUN)
def test_code_runs_without_warnings_and_prints_what_was_learnt(page, tmp_path, monkeypatch, capsys):
    for needed in NEEDS.findall(text_of(page)):
        for package in needed.split(", "):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    execute(page)
    assert START not in capsys.readouterr().out


@pytest.mark.filterwarnings("error:The fit has not converged")
def test_the_readme_example_runs_and_tells_which_features_matter(capsys):
    execute(README)
    table, _, scores = capsys.readouterr().out.partition("loss: mean")
    assert set(re.findall(r"^(\w+) ", table, re.MULTILINE)[:2]) == {"age", "test_0"}
    assert "north" in scores
    assert "bytes sent to the server" in scores


def test_the_start_page_opens_like_the_readme():
    """Links aside, up to the second heading."""
    opening, same = (
        LINK.sub("", text_of(page).partition("\n## ")[0]) for page in (README, START_PAGE)
    )
    assert opening == same
    assert opening.count("```python") == 1


def test_the_readme_is_short_and_has_one_figure():
    assert len(text_of(README).splitlines()) <= 130
    assert re.findall(r"!\[[^]]*\]\(([^)]+)\)", text_of(README)) == ["docs/figure-readme.svg"]


def dead_links(page):
    missing = []
    for target in (inline or reference for inline, reference in LINK.findall(text_of(page))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    return missing


def long_lines(page):
    """Return their numbers; tables are exempt, since a row cannot be broken."""
    lines = enumerate(text_of(page).splitlines(), 1)
    return [n for n, line in lines if len(line) > WIDTH and not line.startswith("|")]


def dialect(page):
    text = " ".join(text_of(page).lower().split())
    return [phrase for phrase in DIALECT if phrase in text]


def mistakes(formula):
    """Return what would keep GitHub or KaTeX from showing a formula."""
    found = MISREAD.findall(formula)
    for pair in BRACKETS:
        opened, closed = (len(re.findall(bracket, formula)) for bracket in pair)
        found += [] if opened == closed else [f"{opened} of {pair[0]}, {closed} of {pair[1]}"]
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", formula) for word in ("begin", "end"))
    return found if begun == ended[::-1] else [*found, f"{begun} begin, {ended} end"]


def broken_formulas(page):
    text = NOT_PROSE.sub("", text_of(page))
    formulas = DISPLAY.findall(text)
    text = DISPLAY.sub("", text)
    lone = ["a lone $"] if "$" in INLINE.sub("", text) else []
    return lone + [formula for formula in [*formulas, *INLINE.findall(text)] if mistakes(formula)]


OFFENCES = dead_links, long_lines, dialect, broken_formulas


def test_pages_have_no_offences():
    found = {(name(page), kind.__name__): kind(page) for page in PAGES for kind in OFFENCES}
    assert {place: wrong for place, wrong in found.items() if wrong} == {}


def test_offences_are_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(f"[a](b.md) and [c](#d) are told $ and $y^*$\n\n{'x' * 121}\n")
    wrong = {kind.__name__: kind(page) for kind in OFFENCES}
    assert wrong == {
        "dead_links": ["b.md", "#d"],
        "long_lines": [3],
        "dialect": ["are told"],
        "broken_formulas": ["a lone $", "y^*"],
    }
    formulas = ("a<b", r"\{x\}", r"\hat{p}_i", r"a \\", "x^{2", r"\left[x]", r"\begin{array}", "τ",
                "x\n- y")  # fmt: skip
    assert all(map(mistakes, formulas))


def test_documents_are_named_by_kind():
    kinds = ("tutorial-", "how-to-", "explanation-", "reference-")
    assert all(page.name.startswith(kinds) for page in (ROOT / "docs").glob("*.md"))


def test_the_start_page_links_every_document_and_the_readme_the_start_page():
    index = text_of(START_PAGE)
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"(../{p.name})" not in index] == []
    assert "(docs/site/index.md)" in text_of(README)


def test_the_readme_and_ci_run_the_same_tests():
    """Both say `make test`; every target that CONTRIBUTING names is in the Makefile."""
    targets = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
    named = re.findall(r"`make ([\w-]+)", text_of(ROOT / "CONTRIBUTING.md"))
    assert set(named) <= set(targets)
    assert "    make test " in text_of(README)
    assert "run: make test\n" in text_of(ROOT / ".github" / "workflows" / "ci.yml")


def test_the_readme_names_extras_that_exist():
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    named = re.findall(r"simfbo\[(\w+)\]", "".join(map(text_of, PAGES)))
    assert set(named) <= set(project["optional-dependencies"])
    assert {"all", "estimators", "flower", "privacy"} <= set(named)


FIGURES = sorted([*(ROOT / "docs").glob("*.svg"), *(ROOT / "benchmarks").glob("*/*.svg")])


def test_figures_are_small_need_nothing_else_and_have_dark_colours():
    for figure in FIGURES:
        text = text_of(figure)
        assert len(text) < 300_000, figure
        assert ET.fromstring(text).findtext("{http://www.w3.org/2000/svg}title"), figure
        assert "@media (prefers-color-scheme: dark)" in text, figure
        links = re.findall(r"""(?:href|src)=["']([^"']*)|url\(([^)]*)""", text)
        assert all((a or b).startswith(("#", "data:image/png;")) for a, b in links), figure
        assert not re.search(r"<script|@import|<foreignObject", text), figure


def test_pictures_are_svg_and_shown_somewhere():
    shown = "".join(map(text_of, PAGES))
    assert [figure for figure in FIGURES if figure.name not in shown] == []
    pixels = [*(ROOT / "benchmarks").glob("*/*.png"), *(ROOT / "docs").glob("*.png")]
    assert [file.name for file in pixels] == ["figure-watch.png"]  # a screen
    assert pixels[0].stat().st_size < 150_000


def test_the_first_picture_of_the_start_page_explains_the_idea():
    assert re.findall(r"\]\(([^)]+\.svg)\)", text_of(START_PAGE))[0] == "../figure-idea.svg"


def test_the_readme_figure_has_the_numbers_of_the_table():
    folder = ROOT / "benchmarks" / "mnist-iid"
    figure = runpy.run_path(str(folder / "readme_figure.py"))
    runs = {"SimFBO, paper's settings": "simfbo-paper", "FedNest, tuned": "fednest",
            "FBO-AggITD, tuned": "aggitd"}  # fmt: skip
    cells = [line.split(" | ") for line in text_of(folder / "table.md").splitlines()]
    to_97 = next(row for row in cells if row[0] == "| method").index(
        "to 97 %: exchanges / MB / CPU s"
    )
    rows = {row[0].removeprefix("| "): row[to_97] for row in cells if len(row) > to_97}
    for label, name in runs.items():
        assert f" / {figure['cost'](figure['runs'](name)):,.0f} / " in rows[label]


def test_what_leaks_has_the_numbers_that_were_measured():
    page = text_of(ROOT / "docs" / "explanation-what-leaks.md")
    found = json.loads(text_of(ROOT / "benchmarks" / "leakage" / "results.json"))
    lines = text_of(ROOT / "benchmarks" / "leakage" / "preset.jsonl").splitlines()
    preset = list(map(json.loads, lines))
    best, runs = found["messages"]["best"], found["training"]["runs"]
    shares = {
        "batches of 8, first round": best["round 1, batch 8"]["images"],
        "batches of 16, first round": best["round 1, batch 16"]["images"],
        "batches of 64, first round": best["round 1, batch 64"]["images"],
        "batches of 64, after 100 rounds": best["round 101, batch 64"]["images"],
        "batches of 1, five local steps": best["round 1, batch 1, 5 local steps"]["images"],
        "no noise | ∞": mean(one["acc"][-1] for one in preset if not one["private"]),
        "z = 4 | 7.6": mean(one["acc"][-1] for one in preset if one["private"]),
        "z = 11 | 2.0": runs["z = 11, C = 0.4, 1, 0.4"]["test_accuracy"],
    }
    said = {
        row: float(re.search(rf"{re.escape(f'| {row} |')} ([\d.]+)[^|]*%", page)[1])
        for row in shares
    }
    assert said == pytest.approx({row: 100 * share for row, share in shares.items()}, abs=0.0501)
    assert 6e-8 < found["messages"]["exact"]["largest"] < 7e-8  # "at most 7e-8"


def test_the_page_on_citing_agrees_with_the_citation_file():
    file = text_of(ROOT / "CITATION.cff")
    page = " ".join(text_of(ROOT / "docs" / "reference-citing.md").replace("\n> ", " ").split())
    titles, (version,) = (
        re.findall(r'title: "(.+)"', file),
        re.findall(r"^version: (.+)", file, re.M),
    )
    names = [f"{given} {family}" for family, given in
             re.findall(r"family-names: (\w+)\n *given-names: (\w+)", file)]  # fmt: skip
    shared = [titles[1], *names, *re.findall(r'url: "(.+)"', file), f"version = {{{version}}}"]
    assert len(shared) == 6
    assert [one for one in shared if one not in page] == []


def sections(page):
    """Return the sections of a page by heading."""
    _, *parts = re.split(r"^## (.+)$", text_of(page), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("symptom", "text"), sections(SYMPTOMS).items())
def test_a_symptom_has_a_command_that_is_accepted_and_numbers_that_were_measured(symptom, text):
    commands = re.findall(r"^    (simfbo (?:.+\\\n)*.+)", text, re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        configuration(build_parser(words[1]).parse_args(words[1:]))
    gain, _, limit = text.partition("**You get:**")[2].partition("**Does not help**")
    pages = [SYMPTOMS.parent / path for path in re.findall(r"\]\(([^)#]+\.md)", text)]
    measured = "".join(map(text_of, pages))
    assert [n for n in re.findall(r"\d+\.\d+", gain + limit) if n not in measured] == []
