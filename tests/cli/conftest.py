"""A folder of its own and a caller for every test of the command line."""

import sys

import pytest

from simfbo.cli.console import OUT
from simfbo.cli.main import main
from simfbo.config.catalogue import METHODS, TASKS


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Run every test in an empty folder, with tables wide enough to read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(OUT, "_width", 300)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for shelf in (METHODS, TASKS):  # what a test adds or imports is gone after it
        monkeypatch.setattr(shelf, "_records", dict(shelf._records))
        monkeypatch.setattr(shelf, "_places", {})
    return tmp_path


@pytest.fixture
def simfbo(capsys):
    """Return a function that calls the command line and returns (code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call
