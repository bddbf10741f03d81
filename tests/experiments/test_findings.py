"""What figures say: sentences whose numbers, and whose order, are those of the runs."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from simfbo.experiments import findings
from simfbo.experiments.experiment import NAMES, load
from simfbo.experiments.results import loaded
from simfbo.runs.history import History

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def path(*accuracies, status="finished"):
    """Return a run that takes 500 rounds and 2 MB between evaluations."""
    records = [
        {"communication_rounds": 500 * i, "bytes_up": 1_500_000 * i, "bytes_down": 500_000 * i,
         "seconds": 0.5 * i, "test_accuracy": accuracy}
        for i, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    return History({}, records, {"status": status})


GROUPS = {
    "fast": [path(0.1, 0.9, 0.96), path(0.1, 0.9, 0.98)],
    "slow": [path(0.1, 0.8, 0.89, 0.9), path(0.1, 0.8, 0.9, 0.9)],
    "short": [path(0.1, 0.2, 0.9), path(0.1, 0.2, 0.3)],
    "lost": [path(0.1, 0.99, status="diverged"), path(0.1, 0.99)],
}


def told(**asked):
    return findings.finding(GROUPS, {"finding": asked})


def test_where_methods_end_the_best_first():
    names = {"B": ["slow"], "A": ["fast"]}
    assert told(names=names) == "A ends at 97.0 %, B at 90.0 %"
    assert told(names=names, where="after all") == "After all A ends at 97.0 %, B at 90.0 %"
    assert told(names={"all": ["fast", "slow", "short"]}) == "All ends at 60.0 to 97.0 %"


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        ("rounds", "A reaches 90 % after 500 exchanges, B after 1,250, C in 1 of 2 seeds"),
        ("MB", "A reaches 90 % after 2 MB, B after 5 MB, C in 1 of 2 seeds"),
        ("s", "A reaches 90 % after 0.5 s, B after 1.2, C in 1 of 2 seeds"),
    ],
)
def test_what_it_takes_to_reach_an_accuracy(cost, text):
    names = {"C": ["short"], "B": ["slow"], "A": ["fast"]}
    assert told(names=names, reaches=0.9, cost=cost) == text


def test_what_nobody_reaches():
    told_of = told(names={"A": ["fast"], "C": ["short"]}, reaches=0.99, cost="MB")
    assert told_of == "None of A, C reaches 99 % in all seeds"


def test_what_was_not_run_or_lost_is_left_out():
    names = {"A": ["fast"], "lost": ["lost"], "absent": ["absent"]}
    assert told(names=names) == "A ends at 97.0 %"
    assert findings.finding(GROUPS, {}) == told(names={"absent": ["absent"]}) == ""


PARTS = [(name, part) for name in NAMES for part in load(name).parts]


@pytest.mark.parametrize(("name", "part"), PARTS, ids=[f"{n} {p.name}".strip() for n, p in PARTS])
def test_committed_figures_say_what_committed_runs_show(name, part):
    folder = BENCHMARKS / name
    wanted = {key for keys in part.tree["finding"]["names"].values() for key in keys}
    assert wanted <= set(part.methods)
    found = findings.finding({key: loaded(part, key, folder) for key in wanted}, part.tree)
    figure = folder / (f"figure-{part.name}.svg" if part.name else "figure.svg")
    assert ET.parse(figure).findtext("{http://www.w3.org/2000/svg}title") == found
    assert re.search(r"\d %", found)
