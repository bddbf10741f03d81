"""What benchmarks/flower says is what was measured, and what was measured is good enough."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "benchmarks" / "flower"
TABLES = runpy.run_path(str(FOLDER / "tables.py"))


@pytest.mark.parametrize("name", TABLES["ALL"])
def test_the_page_has_the_measured_tables(name):
    assert TABLES["ALL"][name]() in (FOLDER / "README.md").read_text()


def test_what_was_asked_for_was_measured():
    rows = TABLES["rows"]
    for row in rows("equality"):
        assert row["ledgers equal"]
        assert row["largest gap"] < 1e-6
    assert {row["method"] for row in rows("equality")} == {"simfbo", "shrofbo", "fednest"}
    assert rows("overhead")[0]["largest"] < 5
    assert [row["status"] for row in rows("faults")] == ["finished"] * 6
    assert [row["exit code"] for row in rows("refusals")] == [2] * 4
