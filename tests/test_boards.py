"""The board of the reproduction and the index of benchmarks agree with the benchmarks."""

import re
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
OURS = {"bytes", "sampled-clients"}  # experiments on claims that are not the paper's


def rows(page):
    """Return the cells of the first table of a page, without its head."""
    lines = [line for line in page.partition("\n|")[2].partition("\n\n")[0].splitlines()][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def linked(cell):
    """Return the folder that a link to its README leads to."""
    return re.search(r"\(\.\./benchmarks/([\w-]+)/README\.md\)", cell)[1]


def is_run(command):
    """Return whether a command runs something else, after a check that its settings exist."""
    _, name, *words = command.strip("`").split()
    return name == "run" and configuration(build_parser("run").parse_args(["run", *words]))


@pytest.mark.parametrize("row", rows(BOARD), ids=lambda row: row[0])
def test_claims_are_shown_by_an_experiment_that_exists(row):
    claim, verdict, measured, date, command, evidence = row
    name = linked(evidence)
    assert name in NAMES
    assert command == f"`simfbo reproduce {name}`" or is_run(command)
    assert verdict in VERDICTS
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", date)
    page = (BENCHMARKS / name / "README.md").read_text(encoding="utf-8")
    numbers = re.findall(r"[\d,]*\d\.\d+|\d,\d{3}", measured)
    assert [number for number in numbers if number not in page] == [], claim


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


@pytest.mark.parametrize("folder", sorted(p.parent.name for p in BENCHMARKS.glob("*/README.md")))
def test_every_benchmark_is_in_the_index(folder):
    (row,) = (line for line in INDEX.splitlines() if line.startswith(f"| [{folder}]("))
    _, claim, command, time, date = row.strip("|").split(" | ")
    assert claim
    assert time
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d ?", date)
    reproduced = command == f"`simfbo reproduce {folder}`"
    script = re.fullmatch(r"`python (benchmarks/[\w/-]+\.py)`", command)
    assert reproduced == (folder in NAMES)
    assert reproduced or (ROOT / script[1]).is_file()


def test_results_have_the_same_date_on_both_pages():
    for row in rows(BOARD)[:-1]:  # the last is a run whose results are not kept
        assert re.search(rf"\| {row[4]} \|[^|]+\| {row[3]} \|", INDEX), row[0]
