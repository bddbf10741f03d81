"""What newcomers type and what machines do to a command: one sentence each, never a traceback."""

from pathlib import Path

import pytest

from simfbo import __version__
from simfbo.cli import compare, main
from simfbo.runs.history import History

SMALL = ("--clients", "3", "--cohort", "3", "--rounds", "3", "--quiet")
RUN = ("run", "quadratic", *SMALL, "--output", "it")


def test_version(simfbo, capsys):
    with pytest.raises(SystemExit, match="0"):
        simfbo("--version")
    assert capsys.readouterr().out == f"simfbo {__version__}\n"


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("mnist", "is a data set, not a task: write hyper-representation --dataset mnist."),
        ("Schools", "is a data set, not a task: write regularisation --dataset schools."),
        ("voters", "is a data set, not a task: load it in Python by "
         "simfbo.datasets.load_frame('voters')."),
        ("my.csv", "is a file, not a task: a table of yours is fitted in Python, as in "
         "FederatedLogistic().fit(df, y, clients='hospital') (docs/how-to-tune-clean-repair.md)."),
        ("my.toml", "is a file, not a task: write --config my.toml."),
        ("my/task.py", "is a file, not a task: write task:NAME, with the name of the task in it."),
        ("begun", "is a run, not a task: continue it with simfbo run --resume begun."),
    ],
)  # fmt: skip
def test_what_is_no_task(simfbo, task, sentence):
    Path("begun").mkdir()
    Path("begun", "history.jsonl").touch()
    for command in ("run", "compare", "tune", "cost"):
        assert simfbo(command, task) == (2, "", f"simfbo: '{task}' {sentence}\n")


def test_fedavg_is_known_and_not_listed(simfbo):
    assert simfbo(*RUN, "--algorithm", "FedAvg")[0] == 0
    first, *_, last = History.load("it").records
    assert last["y_error"] < first["y_error"]
    assert last["x_error"] == first["x_error"]
    assert "fedavg" not in simfbo("run", "quadratic", "--algorithm", "none")[2]
    assert "Did you mean 'fedavg'?" in simfbo("run", "quadratic", "--algorithm", "fedavgg")[2]


@pytest.mark.parametrize(
    ("flags", "file", "seeds"),
    [
        (("--seeds", "3"), "[7]", [0, 1, 2]),
        (("--seeds", "7..7"), "2", [7]),
        ((), "2", [0, 1]),
        ((), "[2]", [2]),
    ],
)
def test_how_many_seeds(flags, file, seeds):
    Path("my.toml").write_text(f"seeds = {file}\n[task]\nname = 'quadratic'\n[methods.simfbo]\n")
    parser = main.build_parser("compare")
    assert compare.plan(parser.parse_args(["compare", "--config", "my.toml", *flags]))[1] == seeds
