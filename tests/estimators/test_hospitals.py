"""The example with a pipeline, a search and cross-validation by hospitals."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import sklearn

SCRIPT = Path(__file__).parents[2] / "examples" / "hospitals.py"


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Return (arguments) -> the example's variables, after a check of its figure and settings."""

    def run(*arguments):
        before = sklearn.get_config()
        monkeypatch.setattr(sys, "argv", ["hospitals.py", "--output", str(tmp_path), *arguments])
        found = runpy.run_path(str(SCRIPT), run_name="__main__")
        assert (tmp_path / "figure.png").stat().st_size > 10_000
        assert "one other hospital" in capsys.readouterr().out
        assert sklearn.get_config() == before
        return found

    return run


@pytest.mark.slow
@pytest.mark.usefixtures("random_models")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_rows_of_a_hospital_judge_only_models_that_did_not_see_it(example):
    found = example("--small")
    for name, search in zip(found["order"], found["judged"]["estimator"], strict=True):
        model = search.best_estimator_["model"]
        assert set(model.clients_) == set(found["NAMES"]) - {name}
        tabular = search.best_estimator_["columns"].named_transformers_["tabular"]
        assert set(tabular.clients_) == set(model.clients_)
    assert found["results"].shape == (3, 3)
    assert np.isfinite(found["results"].to_numpy()).all()


@pytest.mark.slow
def test_it_does_about_as_well_as_pooled_rows(example):
    means = example()["results"].mean()
    assert means["federated"] < 1.05 * means["pooled"] < means["one other hospital"]
