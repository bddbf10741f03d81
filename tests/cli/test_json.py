"""Machine-readable results: standard output holds one JSON value and nothing else."""

import json

import pytest

from simfbo.runs.history import History


@pytest.fixture
def answer(simfbo):
    """Return a function that calls a command with --json and returns (code, value, stderr)."""

    def call(*arguments):
        code, out, err = simfbo(*arguments, "--json")
        return code, json.loads(out, parse_constant=lambda name: pytest.fail(name)), err

    return call


def test_run(answer):
    code, found, err = answer(
        "run", "quadratic", "--rounds", "4", "--every", "2", "--output", "out"
    )
    history = History.load("out")
    assert (code, found["status"], found["directory"]) == (0, "finished", "out")
    assert found["last"] == history.records[-1]
    assert found["config"] == history.header["config"]
    assert found["baselines"] == []
    assert "finished after 4 of 4 iterations" in err
    losses, scores = found["clients"]["upper_loss"], history.client_scores
    assert (losses["client"], losses["worst"]) == scores.worst("upper_loss")
    assert f"worst {losses['worst']:.4g} (client {losses['client']})" in err
    assert found["clients"]["missing"] == []
    again = answer("run", "--resume", "out")
    assert (again[0], again[1]) == (0, found)


def test_run_that_diverges(answer):
    steps = ("--set", "algorithm.local.x=1e9", "--set", "algorithm.local.y=1e9")
    code, found, _ = answer("run", "quadratic", "--rounds", "30", "--output", "out", *steps)
    assert (code, found["status"]) == (1, "diverged")
    assert found["reason"]


def test_compare(answer, in_process):
    given = ("--methods", "simfbo,fednest", "--seeds", "0,1", "--rounds", "2", "--output", "out")
    code, found, _ = answer("compare", "quadratic", "--clients", "3", *given)
    assert code == 0
    assert [(one["method"], one["seed"]) for one in found["runs"]] == [
        ("simfbo", 0), ("simfbo", 1), ("fednest", 0), ("fednest", 1),
    ]  # fmt: skip
    assert found["runs"][3]["last"] == History.load("out/fednest-seed1").records[-1]
    assert [row["method"] for row in found["table"]] == ["simfbo", "fednest"]


def test_cost(answer):
    code, found, _ = answer("cost", "quadratic", "--clients", "3", "--algorithm", "fednest")
    total = found["total"]
    assert (code, found["algorithm"], total["rounds"]) == (0, "FedNest", 10)
    assert sum(found["bytes_by_channel"].values()) == total["bytes_down"] + total["bytes_up"]
    assert sum(one["rounds"] for one in found["steps"].values()) == 10


def test_check(answer, somewhere):
    (somewhere / "cheating.py").write_text(
        "from simfbo.algorithms import simfbo\n"
        "def cheat(problem, local, server):\n"
        "    raise KeyError('no')\n"
    )
    code, found, _ = answer("check", "cheating:cheat")
    assert (code, found["passed"]) == (1, False)
    assert {one["verdict"] for one in found["laws"]} == {"failed"}


def test_data(answer):
    code, found, _ = answer("data")
    assert (code, found[0]["name"], found[0]["ready"]) == (0, "digits", True)
    code, found, _ = answer("data", "digits")
    assert (code, found["training_images"], found["shape"]) == (0, 1437, [8, 8])


def test_wrong_input_leaves_standard_output_empty(simfbo):
    code, out, err = simfbo("run", "quadratik", "--json")
    assert (code, out) == (2, "")
    assert "quadratic" in err
    assert simfbo("data")[1]  # and it is back afterwards
