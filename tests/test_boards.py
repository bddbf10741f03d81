"""The board of the reproduction and the index of benchmarks agree with the benchmarks.

So do the numbers that other pages quote.
"""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from simfbo.cli.arguments import configuration
from simfbo.cli.main import build_parser
from simfbo.experiments.experiment import NAMES, load

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
BOARD = (ROOT / "docs" / "explanation-reproduction.md").read_text(encoding="utf-8")
VERDICTS = ("holds", "holds under conditions", "not confirmed")
INDEX = (ROOT / "docs" / "reference-benchmarks.md").read_text(encoding="utf-8")
WRITER = runpy.run_path(str(ROOT / "docs" / "make_numbers.py"))
# Numbers that no benchmark measured: targets and versions.
GIVEN = ("97.4 %", "95.2 %", "3.11", "0.1.0")
OURS = {"bytes", "sampled-clients"}  # experiments on claims that are not the paper's


def rows(page):
    """Return the cells of the first table of a page, without its head."""
    lines = [line for line in page.partition("\n|")[2].partition("\n\n")[0].splitlines()][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def unnamed(text):
    """Return the numbers that look measured and do not name their source."""
    for given in GIVEN:
        text = text.replace(given, "")
    named = r"[\d,.e-]+(?:\s±\s[\d.]+)?<!--[\w-]+-->"
    return re.findall(r"\d[\d,]*\.\d+|\d,\d{3}|\de-\d+", re.sub(named, "", text))


def linked(cell):
    """Return the folder that a link to its README leads to."""
    return re.search(r"\(\.\./benchmarks/([\w-]+)/README\.md\)", cell)[1]


def is_run(command):
    """Return whether a command runs something else, after a check that its settings exist."""
    _, name, *words = command.strip("`").split()
    return name == "run" and configuration(build_parser("run").parse_args(["run", *words]))


def test_claims_are_shown_by_an_experiment_that_exists():
    for claim, verdict, measured, date, command, evidence in rows(BOARD):
        name = linked(evidence)
        assert name in NAMES, claim
        assert command == f"`simfbo reproduce {name}`" or is_run(command), claim
        assert verdict in VERDICTS, claim
        assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", date), claim
        assert unnamed(measured) == [], claim


def test_the_list_of_experiments_has_the_claims_and_verdicts_of_the_board():
    board = sorted((linked(row[5]), row[0], row[1]) for row in rows(BOARD))
    listed = [(name, *one) for name in set(NAMES) - OURS for one in load(name).claims]
    assert sorted(listed) == board


def test_the_board_has_every_experiment_on_the_paper():
    assert {linked(row[5]) for row in rows(BOARD)} == set(NAMES) - OURS


@pytest.mark.parametrize("verdict", VERDICTS)
def test_claims_of_a_verdict_are_explained_below(verdict):
    """One paragraph may explain two claims."""
    section = BOARD.partition(f"\n## {verdict.capitalize()}\n")[2].partition("\n## ")[0]
    explained = len(re.findall(r"^- \*\*", section, re.MULTILINE))
    claimed = sum(row[1] == verdict for row in rows(BOARD))
    assert explained <= claimed <= explained + 1


def test_every_benchmark_is_in_the_index():
    for folder in sorted(p.parent.name for p in BENCHMARKS.glob("*/README.md")):
        (row,) = (line for line in INDEX.splitlines() if line.startswith(f"| [{folder}]("))
        _, claim, command, time, date = row.strip("|").split(" | ")
        assert claim, folder
        assert time, folder
        assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d ?", date), folder
        reproduced = command == f"`simfbo reproduce {folder}`"
        script = re.fullmatch(r"`python (benchmarks/[\w/-]+\.py)`", command)
        assert reproduced == (folder in NAMES), folder
        assert reproduced or (ROOT / script[1]).is_file(), folder


def test_quoted_numbers_are_those_of_the_results():
    for page in WRITER["PAGES"]:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert WRITER["quoted"](text) == text, f"{page}: run make numbers"


def test_every_source_of_a_number_is_quoted():
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in WRITER["PAGES"])
    assert set(re.findall(r"<!--([\w-]+)-->", text)) == set(WRITER["NUMBERS"])


def test_measured_numbers_in_the_readme_name_their_source():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|^    .*$", "", text, flags=re.M | re.S)
    assert unnamed(text) == []


def test_dates_are_those_of_the_results():
    git = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if git.stdout.strip() != "false":
        pytest.skip("dates need the whole history")
    for page in WRITER["DATED"]:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert WRITER["dated"](text) == text, "run make numbers"
