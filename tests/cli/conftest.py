"""A folder of its own and a caller for every test of the command line."""

import sys

import pytest

from simfbo.cli.main import commands, main


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Run every test in an empty folder, with tables wide enough to read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "keep_compilations", lambda: None)
    monkeypatch.setattr(commands.OUT, "_width", 300)
    monkeypatch.setattr(sys, "path", list(sys.path))
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
