"""`simfbo compare` and `simfbo tune`; their worker processes are tested in test_workers.py."""

import os
from pathlib import Path

import pytest

from simfbo.config.run import load
from simfbo.runs.history import History

COMPARE = ("compare", "quadratic", "--clients", "3", "--cohort", "3", "--rounds", "4")


def stamps(directory):
    return {path: path.stat().st_mtime_ns for path in Path(directory).rglob("history.jsonl")}


def test_compare(simfbo, in_process):
    arguments = (*COMPARE, "--methods", "simfbo,fednest", "--output", "out", "--every", "2")
    equal = "--equal", "iterations"
    code, out, err = simfbo(*arguments, *equal, "--seeds", "0,2", "--targets", "1e9")
    assert (code, err) == (0, "")
    assert out.startswith("2 methods x 2 seeds into out\n")
    assert out.endswith("Table, figures and page are in out\n")
    names = [f"{name}-seed{seed}" for seed in (0, 2) for name in ("simfbo", "fednest")]
    files = ["figure.png", "figure.svg", "report.html", "study.json", "table.md"]
    assert sorted(os.listdir("out")) == sorted(names + files)
    histories = {name: History.load(f"out/{name}") for name in names}
    for seed in (0, 2):
        a, b = histories[f"simfbo-seed{seed}"], histories[f"fednest-seed{seed}"]
        # The same data and the same start; then each its own way, ten rounds an iteration.
        assert a.records[0]["x_error"] == b.records[0]["x_error"]
        assert a.records[-1]["x_error"] != b.records[-1]["x_error"]
        assert (a.column("communication_rounds"), b.column("communication_rounds")) == (
            [0, 2, 4],
            [0, 20, 40],
        )
    first = [histories[f"simfbo-seed{seed}"].records[0]["x_error"] for seed in (0, 2)]
    assert first[0] != first[1]
    table = Path("out/table.md").read_text().splitlines()
    assert table[0].startswith(
        "| method | grad norm squared | iterations | exchanges | MB | CPU s | verdict | to "
    )
    assert table[3].split(" | ")[2:4] == ["4", "40"]
    before = stamps("out")
    # A third seed: what is there is kept, the rest is run; a torn run is run again.
    torn = Path("out/simfbo-seed0/history.jsonl")
    torn.write_text("".join(torn.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = simfbo(*arguments, *equal, "--seeds", "0..2", "--jobs", "2", "--quiet")
    assert (code, err) == (0, "")
    after = stamps("out")
    assert len(after) == 6
    assert {p for p in before if before[p] != after[p]} == {torn}
    table = Path("out/table.md").read_text()
    torn.write_text("".join(torn.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = simfbo("compare", "--resume", "out", "--quiet")
    assert (code, err) == (0, "")
    assert [row.split(" | ")[:4] for row in Path("out/table.md").read_text().splitlines()] == [
        row.split(" | ")[:4] for row in table.splitlines()
    ]
    again = History.load("out/simfbo-seed0")
    assert again.column("x_error") == histories["simfbo-seed0"].column("x_error")
    plan = Path("out/study.json").read_bytes()
    code, _, err = simfbo(*arguments, *equal, "--rounds", "5", "--seeds", "1")
    assert code == 2
    assert Path("out/study.json").read_bytes() == plan
    assert err == (
        "simfbo: out/simfbo-seed0 holds a run with other settings: choose another output folder.\n"
    )


def test_compare_gives_all_methods_the_same_exchanges_or_bytes(simfbo, in_process):
    arguments = (*COMPARE[:-1], "20", "--methods", "simfbo,fednest", "--seeds", "1", "--quiet")
    code, out, err = simfbo(*arguments, "--output", "out")
    assert (code, err) == (0, "")
    assert out.startswith("20 exchanges for each method; iterations: simfbo 20, fednest 2\n")
    runs = [History.load(f"out/{name}-seed0") for name in ("simfbo", "fednest")]
    assert [run.records[-1]["communication_rounds"] for run in runs] == [20, 20]
    study = Path("out/study.json").read_bytes()
    code, out, err = simfbo("compare", "--resume", "out", "--quiet")
    assert (code, err, Path("out/study.json").read_bytes()) == (0, "", study)
    code, out, err = simfbo(*arguments, "--output", "bytes", "--equal", "bytes")
    assert (code, err) == (0, "")
    runs = [History.load(f"bytes/{name}-seed0").records[-1] for name in ("simfbo", "fednest")]
    sent = [run["bytes_up"] + run["bytes_down"] for run in runs]
    assert runs[1]["round"] > 2
    assert sent[1] <= sent[0] < sent[1] * (1 + 1 / runs[1]["round"])


def test_compare_reads_a_file(simfbo, in_process):
    Path("mine.toml").write_text(
        'seeds = [5]\nrounds = 9\n[task]\nname = "quadratic"\nclients = 3\n'
        '[sampling]\nkind = "everyone"\n'
        '[methods.short]\nrounds = 2\nalgorithm = { name = "aggitd", lower_rounds = 2 }\n'
    )
    code, _, err = simfbo("compare", "--config", "mine.toml", "--output", "out", "--quiet")
    assert (code, err) == (0, "")
    history = History.load("out/short-seed5")
    assert history.records[-1]["communication_rounds"] == 2 * (2 * 2 + 3)


def test_a_run_that_fails_is_one_sentence(simfbo, in_process):
    code, _, err = simfbo(*COMPARE, "--methods", "simfbo", "--seeds", "1", "--cohort", "9")
    assert code == 2
    assert err == "simfbo: A cohort of 9 cannot be drawn from 3 clients: lower it.\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("compare",),
            "Name a task (quadratic, hyper-representation, regularisation, label-cleaning, "
            "long-tail or fair), or give --config FILE.",
        ),
        ((*COMPARE, "--seeds", "a"), "--seeds takes 3, 0..2 or 0,5,7; got 'a'."),
        (
            (*COMPARE, "--seeds", "1,1"),
            "'seeds' must be how many there are, such as 3 for 0, 1 and 2, or a list of different "
            "whole numbers from 0 to 4294967295; got [1, 1].",
        ),
        (
            (*COMPARE, "--seeds", "0..99999999999"),
            "--seeds takes up to 10,000 seeds, got '0..99999999999'.",
        ),
        (
            (*COMPARE, "--set", "seed=3"),
            "Write 'seeds', how many or a list, in place of 'seed'.",
        ),
        ((*COMPARE, "--targets", "x"), "--targets takes numbers as 0.9,0.95; got 'x'."),
        ((*COMPARE, "--targets", "nan"), "--targets takes numbers as 0.9,0.95; got 'nan'."),
        ((*COMPARE, "--methods", "simfbo", "--jobs", "0"), "--jobs must be at least 1, got 0."),
        (
            (*COMPARE, "--methods", "fednets"),
            "In method 'fednets': Unknown algorithm 'fednets'. Did you mean 'fednest'?",
        ),
        (("tune", "quadratic", "--range", "a=1"), "--range takes KEY=LOW..HIGH, got 'a=1'."),
        (
            ("tune", "quadratic", "--budget", "9"),
            "The budget allows 9 iterations, too few for 27 trials: raise the budget or lower "
            "--trials.",
        ),
    ],
)
def test_mistakes(simfbo, arguments, sentence):
    code, _, err = simfbo(*arguments)
    assert (code, err) == (2, f"simfbo: {sentence}\n")


def test_tune_prints_a_winner_that_runs(simfbo, in_process):
    code, out, err = simfbo(
        "tune", "quadratic", "--algorithm", "memfbo", "--clients", "3", "--cohort", "3",
        "--budget", "60", "--trials", "4", "--output", "out", "--quiet",
    )  # fmt: skip
    assert (code, err) == (0, "")
    printed = out.partition("# The best one, also in out/best.toml\n")[2]
    Path("printed.toml").write_text(printed)
    best = load(Path("printed.toml"), {})
    assert best == load(Path("out/best.toml"), {})
    assert best.algorithm.name == "memfbo"
    assert simfbo("run", "--config", "printed.toml", "--rounds", "2", "--quiet")[0] == 0
    Path("out/best.toml").unlink()
    code, again, err = simfbo("tune", "--resume", "out", "--quiet")
    assert (code, err) == (0, "")
    assert again.partition("# The best one")[2] == out.partition("# The best one")[2]
    code, _, err = simfbo("compare", "--resume", "out")
    assert (code, err) == (
        2,
        "simfbo: out was not written by `simfbo compare`: give another folder.\n",
    )


def test_a_metric_that_some_method_lacks(simfbo, in_process):
    arguments = (*COMPARE, "--methods", "simfbo,memfbo", "--seeds", "1", "--output", "out")
    code, _, err = simfbo(*arguments, "--metric", "v_error")
    assert code == 2
    assert err.startswith("simfbo: The history has no 'v_error'; it has round")
    assert simfbo(*arguments, "--metric", "y_error")[0] == 0


def test_a_wrong_range_is_refused_before_a_folder_exists(simfbo):
    code, out, err = simfbo("tune", "quadratic", "--range", "algorithm.local.x=1..0")
    sentence = "The range of 'algorithm.local.x' must satisfy 0 < low < high."
    assert (code, out, err) == (2, "", f"simfbo: {sentence}\n")
    assert not Path("runs").exists()
