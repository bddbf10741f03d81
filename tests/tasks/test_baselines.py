"""Baselines: FedAvg by hand, what they may send, and which candidate wins."""

import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import SimulatedFederation
from simfbo.runs.history import History
from simfbo.tasks import baselines, random_quadratic
from simfbo.tasks._quadratic import PROBLEM
from simfbo.tasks.baselines import FILE, Outcome, compare, load, save, table
from simfbo.tasks.task import Baseline, Task

N, DIM_X, DIM_Y = 3, 2, 4
P = np.array([0.5, 0.3, 0.2])
Q = random_quadratic(N, DIM_X, DIM_Y, seed=2)
TRUTH = Q.closed_form(P)
DATA = Q.task(P).data
Y0 = np.ones(DIM_Y)
CANDIDATES = tuple(np.array(x) for x in ([3.0, 1.0], [0.5, -0.5], [-2.0, 2.0]))
ROUND = N * 8 * (DIM_X + 2 * DIM_Y)  # bytes of FedAvg: x and y down, y up
PROBE = N * 8 * (DIM_X + 3 * DIM_Y + 2)


LARGE = frozenset({"reach"})


def evaluate(state):
    distance = float(jnp.sum(jnp.asarray(state.x) ** 2))
    return {"size": distance, "reach": distance, **dict(zip("abcd", state.y.tolist()))}


def task(judge="size", evaluate=evaluate, **candidates):
    candidates = candidates or {"one": CANDIDATES[:1], "three": CANDIDATES}
    baselines = tuple(
        Baseline(name, PROBLEM, DATA, Y0, xs, evaluate) for name, xs in candidates.items()
    )
    return Task(
        "t", PROBLEM, DATA, CANDIDATES[0], Y0, evaluate, "size", "min", judge, LARGE, baselines
    )


@pytest.fixture(scope="module")
def federate():
    shared = SimulatedFederation(DATA)
    return lambda data: shared


def by_hand(x, rounds):
    """Return y after FedAvg with the automatic steps, which fall over the second half."""
    spectrum = np.linalg.eigvalsh(TRUTH.A)
    rate = np.sqrt(spectrum[0] / spectrum[-1])
    y, speed = Y0, np.zeros(DIM_Y)
    for t in range(rounds):
        share = max(0.0, 2 * t / rounds - 1) * 0.9
        gamma = (1 + np.cos(np.pi * share)) / 2 / spectrum[-1]
        speed = (1 - rate) ** 2 * speed + TRUTH.A @ y - TRUTH.B @ x - TRUTH.c
        y = y - gamma * speed
    return y


@pytest.fixture(autouse=True)
def exact_curvature(monkeypatch):
    """Search until mu and L are exact."""
    monkeypatch.setattr("simfbo.algorithms.steps.curvature._KNOWN", 0.0)


def test_fedavg_by_hand_and_the_best_candidate_is_kept(federate):
    started = []
    one, three = compare(task(), federate, rounds=12, budget=10**9, on_baseline=started.append)
    assert started == ["one", "three"]
    assert (one.name, one.chosen, one.tried, three.chosen, three.tried) == ("one", 0, 1, 1, 3)
    for outcome, x in ((one, CANDIDATES[0]), (three, CANDIDATES[1])):
        found = [outcome.metrics[name] for name in "abcd"]
        np.testing.assert_allclose(found, by_hand(x, 12), rtol=1e-9)
        assert outcome.metrics["size"] == pytest.approx(x @ x)
    assert np.linalg.norm(by_hand(CANDIDATES[0], 12) - TRUTH.y(CANDIDATES[0])) < 0.02
    assert one.sent == DIM_Y * PROBE + 12 * ROUND
    assert (three.sent, one.rounds, three.rounds) == (3 * one.sent, DIM_Y + 12, 3 * (DIM_Y + 12))


def test_the_judge_may_have_to_be_large(federate):
    (outcome,) = compare(task("reach", three=CANDIDATES), federate, rounds=1, budget=10**9)
    assert outcome.chosen == 0
    assert outcome.metrics["reach"] == 10


def test_without_a_judge_the_metric_decides(federate):
    (outcome,) = compare(task("", three=CANDIDATES), federate, rounds=1, budget=10**9)
    assert outcome.chosen == 1
    large = task("", three=CANDIDATES)._replace(goal="max")
    assert compare(large, federate, rounds=1, budget=10**9)[0].chosen == 0


def test_the_budget_is_divided_among_the_candidates(federate):
    """Each of three candidates gets budget / (3 rounds' bytes) - 24 rounds."""
    share = 21
    for spare in (0, 3 * ROUND - 1):
        budget = 3 * ROUND * (share + 24) + spare
        (outcome,) = compare(task(three=CANDIDATES), federate, rounds=500, budget=budget)
        assert outcome.rounds == 3 * (DIM_Y + share)
        assert outcome.sent == 3 * (DIM_Y * PROBE + share * ROUND)
        assert outcome.sent <= budget


def test_fifteen_probes_cost_less_than_is_reserved_for_them():
    """For any sizes of x and y: min(15, y) (x + 3 y + 2) <= 24 (x + 2 y)."""
    x, y = np.meshgrid(np.arange(200), np.arange(1, 200))
    assert (np.minimum(15, y) * (x + 3 * y + 2) <= 24 * (x + 2 * y)).all()


def test_a_search_with_too_small_a_budget_is_skipped(federate):
    budget = 3 * ROUND * (19 + 24)
    both = task(one=CANDIDATES[:1], three=CANDIDATES)
    one, three = compare(both, federate, rounds=25, budget=budget)
    assert one.rounds == DIM_Y + 25
    assert three == Outcome("three", {}, 0, 0, 0, 0)
    last = {"bytes_down": 3, "bytes_up": 4, "communication_rounds": 2, "size": 0.25}
    shown = table([one, three], "SimFBO", last, "size").splitlines()
    assert [line.split()[0] for line in shown] == ["size", "SimFBO", "one", "Skipped"]
    assert shown[1].split() == ["SimFBO", "0.2500", "2", "7", "B"]
    assert (
        shown[3] == "Skipped three: the byte budget allows fewer than 20 exchanges per candidate."
    )


def test_an_interruption_ends_the_comparison(federate, monkeypatch):
    stopped = History({}, end={"status": "interrupted"})
    monkeypatch.setattr(baselines, "run", lambda *given, **more: stopped)
    with pytest.raises(KeyboardInterrupt):
        compare(task(one=CANDIDATES[:1]), federate, rounds=5, budget=0)


def test_nan_never_wins(federate):
    def broken(state):
        first = np.array_equal(state.x, CANDIDATES[0])
        return {"size": float("nan") if first else evaluate(state)["size"]}

    (outcome,) = compare(task(evaluate=broken, three=CANDIDATES), federate, rounds=25, budget=10**9)
    assert outcome.chosen == 1


def test_saved_outcomes_come_back(tmp_path):
    outcomes = [
        Outcome("β, 20 tried", {"size": 0.1 + 0.2, "worst": float("inf")}, 3, 20, 75, 2**40),
        Outcome("plain", {}, 0, 1, 1, 0),
    ]
    assert load(tmp_path) == []
    save(outcomes, tmp_path)
    assert load(tmp_path) == outcomes
    assert (tmp_path / FILE).read_text(encoding="utf-8").endswith("]\n")
