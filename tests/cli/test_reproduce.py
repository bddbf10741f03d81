"""`simfbo reproduce`, on a small experiment."""

import json
import shutil
from pathlib import Path

import pytest

from simfbo.config.run import checked
from simfbo.experiments import experiment, results
from simfbo.runs.history import History

SMALL = """
title = "Small"
claims = [["It runs", "holds"]]
minutes = 3
seeds = [0, 1]
every = 2
targets = [0.05, 2.0]
costs = ["rounds", "s"]
limits = [0.0, 1.0]
goal = 0.05
pairs = [["b", "a"]]
[quick]
minutes = 1
seeds = [0]
share = 0.25
only = ["a"]
[task]
name = "hyper-representation"
clients = 2
hidden = 3
train_images = 80
test_images = 40
[tuning]
seed = 7
budget = 4
trials = 2
[tuning.begin]
y = 0.2
v = 0.1
x = 0.05
[tuning.ranges]
y = [0.1, 1.0]
v = [0.01, 0.1]
x = [0.01, 0.1]
[methods.a]
label = "A"
paper = 0.9
rounds = 8
[methods.b]
label = "B, tuned"
tuned = true
rounds = 2
algorithm = { name = "lfednest", steps = { y = 0.2, v = 0.1, x = 0.05 } }
"""


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Put the small experiment in the place of mnist-iid."""
    real = experiment.file
    own = tmp_path / "small.toml"
    own.write_text(SMALL)
    monkeypatch.setattr(experiment, "file", lambda name: own if name == "mnist-iid" else real(name))


def stamps(folder):
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).rglob("*.jsonl")}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_list(simfbo):
    code, out, err = simfbo("reproduce", "--list")
    assert (code, err) == (0, "")
    assert all(name in out for name in experiment.NAMES)
    assert "\n  It runs: holds\n" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Name an experiment, or all. simfbo reproduce --list lists them."),
        (("",), "Unknown experiment ''. simfbo reproduce --list lists them."),
        (("mnits-iid",), "Unknown experiment 'mnits-iid'. Did you mean 'mnist-iid'?"),
        (("all", "--jobs", "0"), "--jobs must be at least 1, got 0."),
        (("--resume", "nowhere"),
         "nowhere was not written by `simfbo reproduce`: give another folder."),
        (("all", "--resume", "x"),
         "--resume takes the settings in the folder: omit NAME."),
        (("--quick", "--resume", "x"),
         "--resume takes the settings in the folder: omit --quick."),
    ],
)  # fmt: skip
def test_wrong_input(simfbo, arguments, sentence):
    code, _, err = simfbo("reproduce", *arguments)
    assert (code, err) == (2, f"simfbo: {sentence}\n")


@pytest.fixture
def validated(monkeypatch):
    """Return the algorithms of all configurations that the experiments validate, as they do."""
    found = []

    def counted(tree, overrides):
        config = checked(tree, overrides)
        found.append(config.algorithm.name)
        return config

    for module in (experiment, results):
        monkeypatch.setattr(module, "checked", counted)
    return found


def test_reproduce(simfbo, in_process, validated):
    code, out, err = simfbo("reproduce", "mnist-iid", "--output", "out", "--quiet")
    assert (code, err) == (0, "")
    # For its two runs a method is validated twice: to run it, and to sum it up.
    assert sorted(validated) == ["lfednest", "lfednest", "simfbo", "simfbo"]
    assert out.startswith("Into out\n\nSmall (1 of 1)\n  It runs: holds\nAbout 3 min")
    folder = Path("out/mnist-iid")
    assert sorted(path.name for path in folder.iterdir()) == [
        "figure.svg", "results", "runs", "table.md"]  # fmt: skip
    assert not list((folder / "runs").iterdir())
    histories = {path.stem: History.load(path) for path in (folder / "results").iterdir()}
    assert sorted(histories) == [f"{name}-seed{seed}" for name in "ab" for seed in (0, 1)]
    lines = (folder / "table.md").read_text().splitlines()
    head, a, b = cells(lines[0]), cells(lines[2]), cells(lines[3])
    last = [histories[f"a-seed{seed}"].records[-1]["test_accuracy"] for seed in (0, 1)]
    spread = abs(last[0] - last[1]) / 2**0.5
    shown = dict(zip(head, a))
    assert shown["test accuracy, %"] == f"{100 * sum(last) / 2:.2f} ± {100 * spread:.2f}"
    assert shown["the paper's"] == "90"
    assert (shown["exchanges an iteration"], shown["iterations"], shown["exchanges"]) == (
        "1",
        "8",
        "8",
    )
    assert shown["to 200 %: exchanges / s"] == "–"  # noqa: RUF001
    assert shown["to 5 %: exchanges / s"].split(" / ")[0] in ("0", "1", "2")
    assert dict(zip(head, b))["exchanges an iteration"] == "2"
    assert "Seed by seed:" in lines
    one = (Path("out") / "summary.md").read_text()
    assert "| A | 1 | " in one
    assert "(90)" in one

    # What is there is kept; what is not is run, also when it goes on.
    before = stamps("out")
    gone = folder / "results" / "b-seed1.jsonl"
    gone.unlink()
    code, _, err = simfbo("reproduce", "--resume", "out", "--quiet", "--jobs", "2")
    assert (code, err) == (0, "")
    after = stamps("out")
    assert {name for name in before if before[name] != after[name]} == {"b-seed1.jsonl"}
    again = History.load(gone).column("test_accuracy")
    assert again == histories["b-seed1"].column("test_accuracy")

    # An incomplete one is refused, with advice.
    whole = gone.read_bytes()
    gone.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    code, _, err = simfbo("reproduce", "--resume", "out", "--quiet")
    assert (code, err) == (
        2,
        f"simfbo: {gone} is incomplete: delete it to run it again.\n",
    )
    gone.write_bytes(whole)
    after = stamps("out")

    # The short form has other settings, which is refused before anything is lost.
    code, _, err = simfbo("reproduce", "mnist-iid", "--quick", "--output", "out", "--quiet")
    assert (code, err) == (
        2, "simfbo: out was started without --quick: choose another output folder.\n")  # fmt: skip
    assert stamps("out") == after

    # A search of its own: in a fresh folder, with the runs of the other method kept.
    shutil.copytree(folder / "results", "own/mnist-iid/results")
    for path in Path("own/mnist-iid/results").glob("b-*"):
        path.unlink()
    code, _, err = simfbo("reproduce", "mnist-iid", "--tune", "--output", "own", "--quiet")
    assert (code, err) == (0, "")
    trials = Path("own/mnist-iid/tuning/b.jsonl").read_text().splitlines()
    assert len(trials) == 2
    best = max(map(json.loads, trials), key=lambda trial: trial["score"])["settings"]
    found = History.load("own/mnist-iid/results/b-seed0.jsonl").header["config"]
    assert found["algorithm"]["steps"] == {key[-1]: value for key, value in best.items()}
    assert (found["rounds"], found["seed"]) == (2, 0)


def test_interrupted(simfbo, monkeypatch):
    def stop(*ignored):
        raise KeyboardInterrupt

    monkeypatch.setattr("simfbo.experiments.results.sweep", stop)
    code, _, err = simfbo("reproduce", "mnist-iid", "--quick", "--quiet")
    assert (code, err) == (
        130, "simfbo: interrupted. Resume with: simfbo reproduce --resume runs/reproduce-quick\n"
    )  # fmt: skip
    file = Path("runs/reproduce-quick/study.json")
    asked = {"study": "reproduce", "names": ["mnist-iid"], "quick": True, "tune": False}
    assert json.loads(file.read_text()) == asked
    # What was begun is not forgotten when another experiment is begun beside it.
    monkeypatch.setattr("simfbo.experiments.theory.compute", stop)
    assert simfbo("reproduce", "speedup", "--quick", "--quiet")[0] == 130
    assert json.loads(file.read_text()) == {**asked, "names": ["mnist-iid", "speedup"]}
    for wrong in (["all"], ["../../mnist-iid"]):
        file.write_text(json.dumps({**asked, "names": wrong}))
        code, _, err = simfbo("reproduce", "--resume", "runs/reproduce-quick")
        assert (code, err) == (2, f"simfbo: {file} names no experiments: delete it.\n")
    for wrong in ({"names": 5}, {"names": [3]}, {"names": []}, {"quick": "maybe"}):
        file.write_text(json.dumps({**asked, **wrong}))
        code, _, err = simfbo("reproduce", "--resume", "runs/reproduce-quick")
        sentence = (
            "runs/reproduce-quick was not written by `simfbo reproduce`: give another folder."
        )
        assert (code, err) == (2, f"simfbo: {sentence}\n")
    other = Path("other/mnist-iid/results/a-seed0.jsonl")
    other.parent.mkdir(parents=True)
    other.write_text('{"kind": "header"}\n')
    code, _, err = simfbo("reproduce", "mnist-iid", "--output", "other")
    sentence = "holds a run with other settings: choose another output folder."
    assert (code, err) == (2, f"simfbo: {other} {sentence}\n")


def test_results_of_the_long_form_are_not_touched(simfbo):
    """Committed results come without study.json, so the cells themselves must tell."""
    kept = Path("out/speedup/results/cells.jsonl")
    kept.parent.mkdir(parents=True)
    kept.write_text('{"P": 1, "mean_grad_norm_squared": 0.5}\n')
    code, _, err = simfbo("reproduce", "speedup", "--quick", "--output", "out")
    assert not Path("out/study.json").exists()
    assert (code, err) == (
        2, f"simfbo: {kept} holds results of other settings: choose another output folder.\n"
    )  # fmt: skip
