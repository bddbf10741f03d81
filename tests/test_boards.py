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


def test_claims_are_shown_by_an_experiment_that_exists():
    for claim, verdict, measured, date, command, evidence in rows(BOARD):
        name = linked(evidence)
        assert name in NAMES, claim
        assert command == f"`simfbo reproduce {name}`" or is_run(command), claim
        assert verdict in VERDICTS, claim
        assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", date), claim
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


def test_results_have_the_same_date_on_both_pages():
    for row in rows(BOARD)[:-1]:  # the last is a run whose results are not kept
        assert re.search(rf"\| {row[4]} \|[^|]+\| {row[3]} \|", INDEX), row[0]
