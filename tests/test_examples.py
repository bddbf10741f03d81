"""The examples with --small: what they print, draw and find.

By default one of them trains; the others run from the first line to the last without training.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import simfbo
from simfbo import History, Point
from simfbo.tasks import baselines

EXAMPLES = Path(__file__).parent.parent / "examples"
SENT = {"communication_rounds": 1, "bytes_up": 1, "bytes_down": 1}


@pytest.fixture
def untrained(monkeypatch):
    """Replace runs and baselines by an evaluation of the initial point."""

    def solve(task, rounds):
        state = Point(x=task.x0, y=task.y0)
        records = [{"round": t, **SENT, **task.evaluate(state)} for t in (0, rounds)]
        return History({}, records, state=state)

    def compare(task, federate, *, rounds, budget):
        return [
            baselines.Outcome(
                one.name, one.evaluate(Point(x=one.candidates[0], y=one.y0)), 0, 1, rounds, budget
            )
            for one in task.baselines
        ]

    monkeypatch.setattr(simfbo, "solve", solve)
    monkeypatch.setattr(baselines, "compare", compare)


@pytest.fixture
def example(single_precision, monkeypatch, tmp_path, capsys):
    """Return (name) -> an example's variables, after a check of what it printed and drew."""

    def run(name: str) -> dict[str, Any]:
        folder = tmp_path / name
        arguments = [f"{name}.py", "--small", "--output", str(folder)]
        monkeypatch.setattr(sys, "argv", arguments)
        found = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        printed = capsys.readouterr().out
        assert "SimFBO" in printed
        assert found["outcomes"]
        assert all(one.name in printed and one.sent > 0 for one in found["outcomes"])
        _check_picture(folder / "figure.png")
        return found

    return run


def _check_picture(file: Path) -> None:
    with Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width, _ = pixels.shape
    assert width >= 800
    assert 300 <= height <= width
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100  # something was drawn
    assert file.stat().st_size < 120_000


def test_penalties_separate_features_that_matter_from_others(example):
    found = example("regularisation")
    relevant, penalties = found["held"].relevant, found["learnt"]
    assert np.median(penalties[~relevant]) > 1.5 * np.median(penalties[relevant])
    assert found["last"]["test_loss"] < found["outcomes"][0].metrics["test_loss"]


@pytest.mark.usefixtures("untrained")
def test_label_cleaning_without_training(example):
    found = example("label_cleaning")
    np.testing.assert_array_equal(found["trust"], 0.5)
    _check_noise(found)
    zeros = np.mean(found["rows"].test_target == 0)  # a model of zeros predicts the first class
    assert found["last"]["test_accuracy"] == pytest.approx(zeros)


@pytest.mark.usefixtures("untrained")
def test_long_tail_without_training(example):
    found = example("long_tail")
    _check_digits(found)
    assert found["last"]["digit 0"] == 1  # a model of zeros predicts the first class
    assert 19 < max(found["counts"]) / min(found["counts"]) < 21


@pytest.mark.usefixtures("untrained")
def test_fair_without_training(example):
    found = example("fair")
    for name in found["NAMES"]:
        assert found["last"][f"weight {name}"] == pytest.approx(1, rel=1e-5)
        assert found["last"][f"loss {name}"] == pytest.approx(np.log(10), rel=1e-5)


@pytest.mark.usefixtures("untrained")
def test_personal_heads_without_training(example):
    _check_heads(example("personal_heads"))


@pytest.mark.slow
def test_trust_follows_the_noise_and_helps(example):
    found = example("label_cleaning")
    trust = [found["trust"][own].mean() for own in found["lower"]]
    assert np.corrcoef(found["shares"], trust)[0, 1] < -0.9
    _check_noise(found)
    noisy = found["outcomes"][0].metrics
    assert found["last"]["test_accuracy"] > noisy["test_accuracy"]


@pytest.mark.slow
def test_rare_classes_gain(example):
    found = example("long_tail")
    counts, before, after = found["counts"], found["outcomes"][0].metrics, found["last"]
    rare = np.argsort(counts)[:4]
    gain = [after[f"digit {digit}"] - before[f"digit {digit}"] for digit in rare]
    assert np.mean(gain) > 0.05
    _check_digits(found)


@pytest.mark.slow
def test_worst_group_gains(example):
    found = example("fair")
    before, after = found["outcomes"][0].metrics, found["last"]
    assert after["worst_group_loss"] < before["worst_group_loss"]
    worst = max(after[f"loss {name}"] for name in found["NAMES"])
    np.testing.assert_allclose(worst, after["worst_group_loss"], rtol=1e-6)
    assert after["weight upside down"] > 1 > after["weight upright"]


@pytest.mark.slow
def test_own_heads_beat_the_shared_one(example):
    _check_heads(example("personal_heads"))


def _check_noise(found: dict[str, Any]) -> None:
    """Check that the noise in the figure is that of the task."""
    labels = np.asarray(found["task"].data.lower.samples[1])
    assert (labels == found["noisy"].labels).all()


def _check_heads(found: dict[str, Any]) -> None:
    """Check that clients gain by heads of their own, and that the figure shows the metrics."""
    assert found["after"].mean() > found["before"].mean() + 5
    means = found["before"].mean() / 100, found["after"].mean() / 100
    keys = "unseen_shared_accuracy", "unseen_accuracy"
    np.testing.assert_allclose(means, [found["last"][key] for key in keys], rtol=1e-5)


def _check_digits(found: dict[str, Any]) -> None:
    """Check that the accuracies of the digits are those of which the metric is the mean."""
    digits = [found["last"][f"digit {digit}"] for digit in range(10)]
    np.testing.assert_allclose(np.mean(digits), found["last"]["balanced_accuracy"])
