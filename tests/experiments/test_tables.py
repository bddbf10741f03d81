"""Tables of runs: differences seed by seed, and who is drawn how."""

import numpy as np
import pytest

from simfbo.config.catalogue import colour_of
from simfbo.experiments import tables
from simfbo.experiments.experiment import load
from simfbo.runs.history import History
from simfbo.runs.palette import GREY


def ending(accuracy, loss=0.5):
    record = {"round": 1, "communication_rounds": 1, "bytes_up": 1, "bytes_down": 1,
              "seconds": 1.0, "cpu_seconds": 1.0, "test_accuracy": accuracy,
              "train_accuracy": accuracy, "test_loss": loss}  # fmt: skip
    return History({}, [record, {**record, "round": 2}], {"status": "finished"})


def test_differences_are_paired():
    """Seeds differ widely, but one method is always the better by 1, 2, 3, 2 or 2 points."""
    part = load("heterogeneous").parts[1]
    base, gains = [0.1, 0.5, 0.9, 0.3, 0.7], [0.01, 0.02, 0.03, 0.02, 0.02]
    groups = {
        "simfbo": [ending(a) for a in base],
        "shrofbo": [ending(a + gain, 0.5 - gain) for a, gain in zip(base, gains)],
    }
    accuracy, loss = tables.differences(part, groups, [["shrofbo", "simfbo"]])
    half = 2.7764451 * np.sqrt(0.5) / np.sqrt(5)  # Student's 97.5 % point with 4 degrees of freedom
    assert accuracy["difference at the end"] == "ShroFBO minus SimFBO"
    assert accuracy["mean"] == "+2.000"
    assert accuracy["95 % interval"] == f"{2 - half:+.3f} to {2 + half:+.3f}"
    assert float(accuracy["p (t)"]) == pytest.approx(0.0032, rel=0.02)
    assert float(accuracy["p (signed ranks)"]) == pytest.approx(2 / 2**5, abs=1e-3)  # of one sign
    assert (loss["of"], loss["mean"], loss["seeds"]) == ("test loss", "-0.020", "5")
    # Nothing to test where all differences are the same, and nothing to say of a run that was lost.
    same = {"simfbo": groups["simfbo"], "shrofbo": groups["simfbo"]}
    accuracy, _ = tables.differences(part, same, [["shrofbo", "simfbo"]])
    assert (accuracy["mean"], accuracy["p (t)"]) == ("+0.000", "")
    groups["simfbo"][0].end = {"status": "diverged"}
    assert tables.differences(part, groups, [["shrofbo", "simfbo"]]) == []


def test_lost_runs_are_named():
    experiment = load("heterogeneous")
    part = experiment.parts[2]
    early = ending(float("nan"))
    early.records, early.end = [{**early.records[0], "round": 0}], {"status": "diverged"}
    groups = {"simfbo": [ending(0.9), early], "shrofbo": [early, early]}
    simfbo, shrofbo = tables.accuracy(part, groups, experiment.tree)
    assert simfbo["test accuracy, %"] == simfbo["train accuracy, %"] == "1 of 2 diverged"
    assert shrofbo["exchanges an iteration"] == "–"  # noqa: RUF001
    assert tables.ratios(part, groups, "simfbo") == []


def test_a_colour_per_algorithm_and_a_style_per_setting():
    experiment = load("running-time")
    (part,) = experiment.parts
    groups = {name: [ending(0.9), ending(0.95)] for name in part.methods}
    figure = tables.draw(part, groups, experiment.tree)
    assert len(figure.axes) == 2
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    paper, tuned, other = (
        lines[part.methods[name].label] for name in ("simfbo-paper", "simfbo", "fednest")
    )
    assert paper.get_color() == tuned.get_color() != other.get_color()
    assert paper.get_linestyle() != tuned.get_linestyle()


def test_what_is_not_highlighted_is_grey_and_the_papers_figures_are_dotted():
    experiment = load("mnist-iid")
    (part,) = experiment.parts
    groups = {name: [ending(0.9), ending(0.95)] for name in part.methods}
    ax = tables.draw(part, groups, experiment.tree).axes[0]
    lines = {line.get_label(): line for line in ax.get_lines()}
    for name, method in part.methods.items():
        line, main = lines[method.label], name in experiment.tree["highlight"]
        assert line.get_color() == (colour_of(method.config.algorithm.name) if main else GREY)
        assert not main or line.get_linestyle() == "-"
    dotted = [line for line in ax.get_lines() if line.get_label().startswith("_")]
    across = [line.get_ydata()[0] for line in dotted if line.get_linestyle() == "--"]
    assert sorted(across) == [0.9104, 0.918, 0.928, 0.974]


def path(*accuracies):
    """Return a run that sends 3 MB and takes 2 rounds between evaluations."""
    records = [
        {"round": i, "communication_rounds": 2 * i, "bytes_up": 1_000_000 * i,
         "bytes_down": 2_000_000 * i, "cpu_seconds": 0.5 * i, "test_accuracy": accuracy}
        for i, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    return History({}, records, {"status": "finished"})


def test_ratios_to_a_reference():
    part = load("mnist-iid").parts[0]
    few = part._replace(methods={name: part.methods[name] for name in ("simfbo", "fednest")})
    slow = [path(*np.linspace(0, 0.9, 21)), path(*np.linspace(0, 0.7, 21))]  # 0.8 at the end
    fast = [path(0, 0.85, 0.9), path(0, 0.7, 0.79, 0.8)]  # there after 1 and 3
    (row,) = tables.ratios(few, {"fednest": slow, "simfbo": fast}, "fednest")
    assert list(row.values()) == ["SimFBO, tuned", "4", "10", "6", "10", "1.0", "10"]
    assert tables.ratios(few, {"fednest": slow, "simfbo": [path(0, 0.5)] * 2}, "fednest") == []
