"""The practical tasks from the command line: no flags needed, baselines next to every result."""

import json
import re
from pathlib import Path

import pytest

from simfbo.config import run as config
from simfbo.errors import UserError
from simfbo.tasks import baselines

TINY = (
    "run", "regularisation", "--rounds", "60", "--clients", "3", "--set", "task.features=4",
    "--set", "task.relevant=1", "--set", "task.folds=2", "--output", "out",
)  # fmt: skip


def numbers(line: str) -> list[float]:
    """Return the numbers in a row of the printed table."""
    return [float(part) for part in re.findall(r"\d+\.\d+", line)]


def test_a_result_stands_next_to_its_baselines(simfbo, monkeypatch):
    monkeypatch.setattr(baselines, "_FEWEST", 2)  # rounds of a candidate: this test is short
    monkeypatch.setattr(baselines, "_PROBING", 0.1)
    code, out, err = simfbo(*TINY, "--quiet")
    assert (code, err) == (0, "")
    rows = {line[:35].strip(): numbers(line[35:])[0] for line in out.splitlines()[6:10]}
    assert list(rows) == ["SimFBO", "no tuning", "one lambda, 20 tried",
                          "the features that matter (oracle)"]  # fmt: skip
    stored = json.loads(Path("out/baselines.json").read_text())
    assert [round(one["metrics"]["test_loss"], 4) for one in stored] == list(rows.values())[1:]
    sent = re.search(r"Cost: .*", out)
    assert sent is not None
    assert stored[1]["tried"] == 20
    assert Path("out/summary.txt").read_text() in out


def test_baselines_can_be_left_out_and_a_finished_run_is_left_alone(simfbo):
    code, out, _ = simfbo(*TINY, "--no-baselines", "--quiet")
    assert code == 0
    assert "no tuning" not in out
    assert not Path("out/baselines.json").exists()
    assert simfbo("run", "--resume", "out")[1] == "out has finished: nothing left to do.\n"


@pytest.mark.parametrize("task", ["regularisation", "label-cleaning", "long-tail", "fair"])
def test_practical_tasks_need_no_settings(task):
    found = config.load(None, {"task.name": task})
    assert (found.steps, found.sampling.kind) == ("auto", "everyone")
    assert found.algorithm.model_dump()["radius"] is None
    assert config.checked(found.model_dump(mode="json"), {}) == found


def test_a_step_size_that_is_given_counts():
    given = config.load(None, {"task.name": "fair", "algorithm.local.x": 0.1})
    assert given.steps == "given"
    assert config.load(None, {"task.name": "quadratic"}).steps == "given"
    assert config.load(None, {"task.name": "quadratic", "steps": "auto"}).steps == "auto"
    some = config.load(None, {"task.name": "fair", "sampling.size": 5})
    assert some.sampling.kind == "without-replacement"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"task.name": "fair", "task.groups": "clients"}, "groups can be the clients of a table"),
        ({"task.name": "fair", "task.clients": 1}, "clients must be at least 2"),
        ({"task.name": "fair", "task.dataset": "exam", "task.clients": 9}, "65 clients of its own"),
        ({"task.name": "regularisation", "task.dataset": "exam", "task.features": 9},
         "features is not a setting of this data set"),
        ({"task.name": "fair", "task.dataset": "exam", "task.turned": 0.5},
         "turned is not a setting of this data set"),
        ({"task.name": "regularisation", "task.relevant": 41}, "relevant must not exceed features"),
        ({"task.name": "regularisation", "task.features": 100_000, "task.clients": 1000},
         "must not exceed 100,000,000"),
        ({"task.name": "long-tail", "task.imbalance": 0.5}, "greater than or equal to 1"),
        ({"task.name": "hyper-representation", "task.unseen": 20}, "leave some of the 20 clients"),
        ({"task.name": "fair", "privacy.where": "client"},
         "does not cover the search for step sizes"),
    ],
)  # fmt: skip
def test_mistakes_are_sentences(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        config.load(None, settings)


def test_cost_says_what_automatic_steps_add(simfbo):
    code, out, _ = simfbo("cost", *TINY[1:-2])
    assert code == 0
    assert "Automatic step sizes add up to" in out
    assert "simfbo_step" in out


def test_other_methods_find_their_steps_too(simfbo):
    code, out, _ = simfbo("run", "quadratic", "--algorithm", "fednest", "--steps", "auto",
                          "--rounds", "60", "--clients", "4", "--quiet")  # fmt: skip
    assert code == 0
    found = re.search(r"grad norm squared ([\d.e-]+)", out)
    assert found is not None
    assert float(found[1]) < 0.01
