"""The examples, in the form that takes seconds: what they print, draw and find."""

import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def quick_to_compile():
    """Compile in half of the time programs that run for a second."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def example(single_precision, quick_to_compile, monkeypatch, tmp_path, capsys):
    """Return (name) -> an example's variables, after a look at what it printed and drew."""

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


def test_penalties_tell_features_that_matter_from_others(example):
    found = example("regularisation")
    relevant, penalties = found["held"].relevant, found["penalties"]
    assert np.median(penalties[~relevant]) > 1.5 * np.median(penalties[relevant])
    assert found["last"]["test_loss"] < found["outcomes"][0].metrics["test_loss"]


def test_trust_follows_the_noise_and_helps(example):
    found = example("label_cleaning")
    trust = [found["trust"][own].mean() for own in found["lower"]]
    assert np.corrcoef(found["shares"], trust)[0, 1] < -0.9
    labels = np.asarray(found["task"].data.lower.samples[1])
    assert (labels == found["noisy"].labels).all()  # the figure's noise is the task's
    noisy = found["outcomes"][0].metrics
    assert found["last"]["test_accuracy"] > noisy["test_accuracy"]


def test_rare_classes_gain(example):
    found = example("long_tail")
    counts, before, after = found["counts"], found["outcomes"][0].metrics, found["last"]
    rare = np.argsort(counts)[:4]
    gain = [after[f"digit {digit}"] - before[f"digit {digit}"] for digit in rare]
    assert np.mean(gain) > 0.05
    digits = np.mean([after[f"digit {digit}"] for digit in range(10)])
    np.testing.assert_allclose(digits, after["balanced_accuracy"])


def test_worst_group_gains(example):
    found = example("fair")
    before, after = found["outcomes"][0].metrics, found["last"]
    assert after["worst_group_loss"] < before["worst_group_loss"]
    worst = max(after[f"loss {name}"] for name in found["NAMES"])
    np.testing.assert_allclose(worst, after["worst_group_loss"], rtol=1e-6)
    assert after["weight upside down"] > 1 > after["weight upright"]


def test_own_heads_beat_the_shared_one(example):
    found = example("personal_heads")
    assert found["after"].mean() > found["before"].mean() + 5
    means = found["before"].mean() / 100, found["after"].mean() / 100
    keys = "unseen_shared_accuracy", "unseen_accuracy"
    np.testing.assert_allclose(means, [found["last"][key] for key in keys], rtol=1e-5)
