"""Tuning: the plan of the stages, the trials, and a winner that is one."""

import json
import math

import numpy as np
import pytest

from simfbo import algorithms
from simfbo.config.build import build_algorithm, build_federation
from simfbo.config.build_task import build_task
from simfbo.config.run import load
from simfbo.core.problem import Point
from simfbo.engines.base import PROGRAMS
from simfbo.engines.debug import cost
from simfbo.errors import UserError
from simfbo.studies import tuning
from simfbo.tasks import quadratic

BASE = {"task.name": "quadratic", "task.clients": 3, "sampling.kind": "everyone"}


@pytest.mark.parametrize(
    ("iterations", "trials", "stages"),
    [
        (8100, 27, [(27, 100), (9, 300), (3, 900)]),
        (90, 9, [(9, 5), (3, 15)]),
        (100, 10, [(10, 3), (4, 8), (2, 16)]),
        (10, 1, [(1, 10)]),
    ],
)
def test_every_stage_gets_its_share(iterations, trials, stages):
    assert tuning.plan(iterations, trials) == stages
    assert sum(size * each for size, each in stages) <= iterations


def test_no_trials_and_settings_of_the_stages():
    with pytest.raises(UserError, match="--trials must be at least 1, got 0"):
        tuning.plan(20, 0)
    with pytest.raises(UserError, match="'rounds' cannot be tuned: the stages set it"):
        tuning.candidates(load(None, BASE), {"rounds": (1, 9)}, 3)


def test_a_budget_that_is_too_small():
    with pytest.raises(UserError, match="allows 20 iterations, too few for 27 trials"):
        tuning.plan(20, 27)


def test_candidates_fill_the_space_evenly():
    space = {"algorithm.steps.y": (0.01, 1.0), "algorithm.steps.x": (0.001, 0.1)}
    config = load(None, BASE | {"algorithm.name": "fednest", "algorithm.steps.y": 0.33})
    first, *others = tuning.candidates(config, space, 65)
    assert first == {"algorithm.steps.y": 0.33, "algorithm.steps.x": 0.05}
    for key, (low, high) in space.items():
        place = np.log([other[key] / low for other in others]) / math.log(high / low)
        counts = np.histogram(place, 4, (0, 1))[0]
        assert counts.min() >= 15
    assert len({tuple(other.values()) for other in others}) == 64


@pytest.mark.parametrize("span", [(0.0, 1.0), (1.0, 0.1), (1.0, math.inf)])
def test_a_range_that_is_invalid(span):
    with pytest.raises(UserError, match="must satisfy 0 < low < high"):
        tuning.candidates(load(None, BASE), {"algorithm.local.y": span}, 3)


@pytest.mark.parametrize("key", ["algorithm.local.z", "task.name", "algorithm"])
def test_what_cannot_be_tuned(key):
    with pytest.raises(UserError, match=f"'{key}' cannot be tuned"):
        tuning.candidates(load(None, BASE), {key: (0.1, 1.0)}, 3)


def test_default_space_is_the_methods_own():
    simfbo, memfbo, fednest = (
        list(tuning.default_space(load(None, BASE | {"algorithm.name": name})))
        for name in ("simfbo", "memfbo", "fednest")
    )
    assert simfbo == [f"algorithm.local.{z}" for z in "yvx"]
    assert memfbo == ["algorithm.local.y", "algorithm.local.x"]
    given = tuning.default_space(load(None, BASE | {"algorithm.server.x": 0.1}))
    assert list(given) == [f"algorithm.server.{z}" for z in "yvx"]
    assert fednest == [f"algorithm.steps.{z}" for z in "yvx"]


def test_tuning_finds_better_steps_and_continues_where_it_stopped(tmp_path, in_process):
    config = load(None, BASE | {"algorithm.name": "fedbio", "algorithm.steps.x": 0.0001})
    space = {"algorithm.steps.x": (0.0001, 1e6), "algorithm.steps.y": (0.2, 0.4)}
    tuned = tuning.tune(config, tmp_path, budget=360, trials=6, space=space)
    # Each of the two stages gets half of the 360 rounds.
    assert [(r.stage, r.iterations) for r in tuned.results] == [(0, 30)] * 6 + [(1, 90)] * 2
    assert tuned.metric == "grad_norm_squared"
    assert sum(r.communication_rounds for r in tuned.results) <= 360
    diverged = [r for r in tuned.results if r.status == "diverged"]
    assert diverged
    assert all(r.score is None for r in diverged)
    assert all(r.communication_rounds < r.iterations for r in diverged)
    last = tuned.results[6:]
    best = min(last, key=lambda r: r.score)
    assert best.score < 0.1 * tuned.results[0].score
    assert tuned.best.algorithm.steps.x == best.settings["algorithm.steps.x"]
    assert {r.trial for r in last} == {
        r.trial for r in sorted(tuned.results[:6], key=lambda r: r.score or math.inf)[:2]
    }
    assert load(tmp_path / "best.toml", {}) == tuned.best
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["trial"] for line in lines] == [r.trial for r in tuned.results]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("history.jsonl")}
    assert len(stamps) == 8
    again = tuning.tune(config, tmp_path, budget=360, trials=6, space=space)
    assert again == tuned
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("history.jsonl")}


def test_all_trials_diverge(tmp_path, in_process):
    config = load(None, BASE | {"algorithm.name": "fedbio", "algorithm.steps.x": 1e30})
    space = {"algorithm.steps.x": (1e30, 1e32)}
    with pytest.raises(UserError, match="All trials of stage 1 diverged"):
        tuning.tune(config, tmp_path, budget=40, trials=2, space=space)


@pytest.mark.parametrize(("name", "cost"), [("simfbo", 1), ("fednest", 10)])
def test_27_trials_compile_one_program(tmp_path, in_process, name, cost):
    """Step sizes are inputs of compiled programs, so other step sizes need no other program."""
    odd = {"task.dim_x": 2, "task.dim_y": 7}  # a shape that no other test compiles
    config = load(None, BASE | odd | {"algorithm.name": name})
    before = len(PROGRAMS.compiled)
    tuned = tuning.tune(config, tmp_path, budget=81 * cost, trials=27)
    assert [(r.stage, r.iterations) for r in tuned.results] == (
        27 * [(0, 1)] + 9 * [(1, 3)] + 3 * [(2, 9)]
    )
    assert len({tuple(r.settings.values()) for r in tuned.results}) == 27
    method = getattr(algorithms, name)(quadratic().problem, Point(x=0.1, y=0.1, v=0.1))
    assert PROGRAMS.compiled[before:] == [method.name]  # all of a round, in blocks


def test_a_budget_in_bytes(tmp_path, in_process):
    config = load(None, BASE | {"codecs.up.x": "bfloat16"})
    task = build_task(config)
    each = cost(
        build_algorithm(config.algorithm, task.problem, 1), build_federation(config, task.data),
        task.x0, task.y0,
    ).total  # fmt: skip
    budget = 12 * (each.bytes_up + each.bytes_down)
    tuned = tuning.tune(config, tmp_path, budget_bytes=budget, trials=3)
    assert [result.iterations for result in tuned.results] == [4, 4, 4]
