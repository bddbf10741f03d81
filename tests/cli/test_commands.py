"""`simfbo cost`, `check`, `data` and `report`."""

import re
import sys
from pathlib import Path

import pytest

from simfbo import checks, datasets
from simfbo.cli.console import OUT

FILES = {"history.jsonl", "figure.png", "figure.svg", "report.html", "card.md", "summary.txt",
         "variables.npz"}  # fmt: skip
SMALL = ("--clients", "3", "--cohort", "3", "--rounds", "3", "--every", "1")
RUN = ("run", "quadratic", *SMALL)
DIGITS = (
    "run", "hyper-representation", "--clients", "4", "--cohort", "2", "--rounds", "2",
    "--set", "task.hidden=5", "--set", "task.batch_size=8",
)  # fmt: skip


def rows(out: str) -> dict[str, list[str]]:
    """Return the table's rows by their first cell."""
    cells = [re.split(r"\s*[│┃]\s*|\s{2,}", line.strip(" │┃")) for line in out.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 1}


def test_cost_on_digits(simfbo):
    # x: 64 x 200 + 200; y and v: 200 x 10 + 10 each; ten clients.
    floats = 10 * (64 * 200 + 200 + 2 * (200 * 10 + 10))
    assert floats == 170_200
    code, out, err = simfbo("cost", "hyper-representation")
    assert (code, err) == (0, "")
    table = rows(out)
    assert table["client step"] == ["exchanges", "floats down", "floats up", "down", "up"]
    assert table["simfbo_step"][:3] == table["total"][:3] == ["1", "170,200", "170,200"]
    assert "One iteration of SimFBO on hyper-representation" in out
    assert not Path("runs").exists()


def test_cost_of_shrofbo(simfbo):
    code, out, _ = simfbo("cost", "quadratic", "--algorithm", "shrofbo", "--cohort", "4")
    assert code == 0
    # 4 + 5 + 5 floats down, one more up; eight bytes each under the tests' double precision.
    assert rows(out)["shrofbo_step"] == ["1", "56", "60", "448 B", "480 B"]


# check

CHEAT = """
from simfbo.algorithms import simfbo
from simfbo.core.method import Wrapper

CALLS = []

class Cheat(Wrapper):
    def round(self, state, federation, key):
        CALLS.append(key)
        if len(CALLS) % 2:
            self.inner.round(state, federation, key)
        return self.inner.round(state, federation, key)

def cheats(problem, local, server):
    return Cheat(simfbo(problem, local, server))

class Humble(Wrapper):
    known_violations = {"ledger is cost": "It [lies]."}

    def round(self, state, federation, key):
        return self.inner.round(state, federation, key)

def humble(problem, local, server):
    return Humble(simfbo(problem, local, server))

def crashes(problem, local, server):
    raise ValueError("on purpose")
"""


@pytest.fixture
def one_law(monkeypatch):
    law = next(law for law in checks.LAWS if law.name == "ledger is cost")
    monkeypatch.setattr(checks, "LAWS", (law,))
    Path("my_factories.py").write_text(CHEAT)
    monkeypatch.delitem(sys.modules, "my_factories", raising=False)


@pytest.mark.parametrize(
    ("factory", "code", "line"),
    [
        (
            "simfbo",
            0,
            "ok      ledger is cost: every iteration must send what `cost` says "
            "(measured 0, limit 0).",
        ),
        (
            "my_factories:humble",
            1,
            "BROKEN  ledger is cost: declared as violated (It [lies].) but it holds "
            "(measured 0, limit 0).",
        ),
        ("my_factories:crashes", 1, "FAILED  ledger is cost: ValueError: on purpose"),
    ],
)
def test_check(simfbo, one_law, factory, code, line):
    assert simfbo("check", factory) == (
        code,
        f"{line}\n{1 - code} of 1 laws hold or are violated as declared.\n",
        "",
    )


def test_check_finds_a_cheat(simfbo, one_law):
    code, out, err = simfbo("check", "my_factories:cheats")
    assert (code, err) == (1, "")
    assert out.startswith("BROKEN  ledger is cost: every iteration must send what `cost` says (")


def test_check_adds_the_single_loop_laws(simfbo, one_law, monkeypatch):
    law = checks.Law("mine", "it must be small", lambda factory: 0.25, 0.5)
    monkeypatch.setattr(checks, "SINGLE_LOOP_LAWS", (law,))
    code, out, _ = simfbo("check", "simfbo.algorithms:simfbo", "--single-loop")
    assert code == 0
    assert "ok      mine: it must be small (measured 0.25, limit 0.5).\n" in out
    assert out.endswith("2 of 2 laws hold or are violated as declared.\n")


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("simfb", "Unknown algorithm 'simfb'. Did you mean 'simfbo'?"),
        (":simfbo", "Write ':simfbo' as package.module:name."),
        ("simfbo:", "Write 'simfbo:' as package.module:name."),
        ("no_such:x", "'no_such:x' cannot be imported: No module named 'no_such'."),
        (
            "simfbo.checks:x",
            "'simfbo.checks:x' cannot be imported: module 'simfbo.checks' has no attribute 'x'.",
        ),
        ("math:pi", "The algorithm 'math:pi' must be a function, got float."),
        (
            "math:sin",
            "'math:sin' must take its step sizes as (problem, local, server) or as (problem, "
            "steps).",
        ),
    ],
)
def test_check_what_cannot_be_imported(simfbo, factory, sentence):
    assert simfbo("check", factory) == (2, "", f"simfbo: {sentence}\n")


# data and report


def test_data_lists(simfbo):
    code, out, err = simfbo("data", "--data-dir", "empty")
    assert (code, err) == (0, "")
    table = rows(out)
    images = ["digits", "mnist", "fashion-mnist", "cifar10", "optdigits", "exercises"]
    assert list(table)[1:] == [*images, *datasets.FRAMES]
    assert (table["digits"][0], table["mnist"][0]) == ("yes", "no")
    assert out.endswith("simfbo data NAME fetches one, into the data folder:\nempty\n")


def test_data_fits_a_terminal(simfbo, monkeypatch):
    monkeypatch.setattr(OUT, "_width", 80)
    _, out, _ = simfbo("data", "--data-dir", "empty")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_data_of_digits(simfbo):
    assert simfbo("data", "digits") == (
        0,
        "digits: 1,437 training and 360 test images of 8 x 8.\n",
        "",
    )


def test_data_of_an_unknown_name(simfbo):
    code, out, err = simfbo("data", "mnits")
    assert (code, out) == (2, "")
    assert err == "simfbo: Unknown dataset 'mnits'. Did you mean 'mnist'?\n"


def test_report_of_nothing(simfbo):
    assert simfbo("report", "nowhere") == (
        2,
        "",
        "simfbo: There is no run at nowhere: pass the folder of a run.\n",
    )
