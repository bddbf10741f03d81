"""`simfbo flower new`: apps that pass their own tests, and names that are none."""

import importlib
import sys
import tomllib

import pytest

from simfbo.cli.main import main
from simfbo.flower.ops.control_api import bundle

pytest.importorskip("pandas")


@pytest.fixture
def modules(monkeypatch):
    """Return a function that imports a module of an app, which is forgotten afterwards."""
    before = {*sys.modules}

    def load(app, name):
        monkeypatch.syspath_prepend(str(app))
        return importlib.import_module(name)

    yield load
    for name in {*sys.modules} & {"task", "records", "test_task"} - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("words", "estimator"),
    [
        (["--losses"], None),
        pytest.param([], "FederatedLogistic", marks=pytest.mark.slow),
        pytest.param(["--estimator", "FederatedRidge"], "FederatedRidge", marks=pytest.mark.slow),
    ],
)
def test_an_app_passes_its_own_tests(tmp_path, capsys, modules, single_precision, words, estimator):
    app = tmp_path / "demo"
    assert main(["flower", "new", str(app), *words]) == 0
    assert "Created" in capsys.readouterr().out
    assert (estimator or "simfbo(BilevelProblem(") in (app / "task.py").read_text()
    tests = modules(app, "test_task")
    own = [name for name in dir(tests) if name.startswith("test_")]
    assert len(own) == 2
    for name in own:
        getattr(tests, name)(*[tmp_path] * ("missing" in name))
    settings = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert settings["data"] == str(app / "data")
    assert {*tests.CONFIG} | {"folder"} == {*settings}
    assert all(len(line) <= 120 for line in (app / "README.md").read_text().splitlines())
    assert b"data/client-0.csv" not in bundle(app)  # rows never travel with the app


def test_rows_are_read_from_parquet_or_csv(tmp_path, modules, monkeypatch):
    assert main(["flower", "new", str(tmp_path / "demo")]) == 0
    records = modules(tmp_path / "demo", "records")
    monkeypatch.setattr(records.pd, "read_parquet", lambda file: file.name)
    (tmp_path / "client-3.parquet").touch()
    assert records.read_client(3, {"data": str(tmp_path)}, "nowhere") == "client-3.parquet"
    data = str(tmp_path / "demo" / "data")
    assert len(records.read_client(3, {}, data)) == 40
    task = modules(tmp_path / "demo", "task")
    plan = task.deployment({"rounds": 9, "seed": 0, "timeout": 5.0, "data": data})
    (columns, labels, folds), _ = plan.load_client(5, {})
    assert columns.shape == (40, 2, 4)  # each number as the sum of two floats
    assert {*labels.tolist()} == {0, 1}
    assert {*folds.tolist()} == {*range(5)}


@pytest.mark.parametrize("name", ["2much", "a b", "ümlaut", "x" * 64])
def test_a_bad_name_ends_in_a_sentence(tmp_path, capsys, name):
    assert main(["flower", "new", str(tmp_path / name)]) == 2
    assert "An app cannot be called" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["flower", "new", str(tmp_path / "file")]) == 2
    assert "exists already: choose another name" in capsys.readouterr().err
    assert main(["flower", "new", str(tmp_path / "file" / "demo")]) == 2
    assert "Cannot write to" in capsys.readouterr().err
