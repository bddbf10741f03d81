"""The page has the measured tables, and claims what they show."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TABLES = runpy.run_path(str(FOLDER / "table.py"))
RESULTS = TABLES["results"]()


@pytest.mark.parametrize("name", ["linear", "gaps", "networks", "seconds"])
def test_the_page_has_the_measured_tables(name):
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n{TABLES[name]()}\n" in page


def test_learning_pays_on_digits_alone():
    for table, methods in RESULTS.items():
        gained, _ = TABLES["gap"](methods, "ours", "0.003 for all")
        if table == "digits":
            assert -18 < gained < -12
        else:
            assert gained > -0.1, table
        start, _ = TABLES["gap"](methods, "0.003 for all", "pooled")
        assert (start > 8) if table == "digits" else (start < 0.75), table
