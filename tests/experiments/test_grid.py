"""Cells of a grid: computed once, kept line by line."""

import json

import pytest

from simfbo.errors import UserError
from simfbo.experiments.grid import compute

CELLS = [{"a": 1, "list": [1, 2]}, {"a": 2, "list": [1, 2]}, {"a": 3, "list": [1, 2]}]


def test_each_cell_is_computed_once(tmp_path):
    file, calls, reports = tmp_path / "deep" / "cells.jsonl", [], []

    def square(cell):
        calls.append(cell["a"])
        return {"square": cell["a"] ** 2}

    expected = [{**cell, "square": cell["a"] ** 2} for cell in CELLS]
    assert compute(CELLS, square, file, lambda *now: reports.append(now)) == expected
    assert reports == [(1, 3), (2, 3), (3, 3)]
    assert compute(CELLS, square, file) == expected
    assert calls == [1, 2, 3]
    assert [json.loads(line) for line in file.read_text().splitlines()] == expected


def test_it_goes_on_after_an_interruption(tmp_path):
    file, calls = tmp_path / "cells.jsonl", []

    def fragile(cell):
        if cell["a"] == 2 and len(calls) < 2:
            calls.append("stopped")
            raise KeyboardInterrupt
        calls.append(cell["a"])
        return {"value": 0.5}

    with pytest.raises(KeyboardInterrupt):
        compute(CELLS, fragile, file)
    with file.open("ab") as stream:
        stream.write(b'{"a": 2, "list": [1, 2]\xff\n{"a": 3, "list"')  # torn: neither counts
    found = compute(CELLS, fragile, file)
    assert calls == [1, "stopped", 2, 3]
    assert [cell["value"] for cell in found] == [0.5] * 3
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.parametrize("line", ['{"a": 2, "list": [9], "value": 7}', '{"a": 1, "list": [1, 2]}'])
def test_results_of_other_settings_are_not_touched(tmp_path, line):
    file = tmp_path / "cells.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UserError, match=r"holds results of other settings: choose another output"):
        compute(CELLS, lambda cell: {"value": 1.0}, file)
    assert file.read_text() == line + "\n"
