"""The verdict on a run, against closed forms and by hand."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import Point, SimulatedFederation, run
from simfbo.algorithms import fednest, lfednest, simfbo
from simfbo.runs.history import History
from simfbo.tasks import random_quadratic
from simfbo.tasks._quadratic import PROBLEM

MODULE = importlib.import_module("simfbo.runs.verdict")
Q = random_quadratic(4, 2, 3, seed=1)
TASK, TRUTH = Q.task(), Q.closed_form()
STEPS = Point(x=0.1, y=0.3, v=0.3)


def go(algorithm, rounds, federation=None, **options):
    federation = federation or SimulatedFederation(TASK.data)
    return run(algorithm, federation, TASK.x0, TASK.y0, rounds=rounds, every=rounds, **options)


def seen(**norms):
    """Return what is seen of channels whose sums have these norms, one number each."""
    found = {}
    for name, values in norms.items():
        one = None
        for t, value in enumerate(values, 1):
            one = MODULE._added(one, (t - 1) * 20 // len(values), abs(value), np.array([value]))
        found[name] = one
    return found


def test_with_given_step_sizes_a_solved_run_is_unknown(tmp_path):
    """All residuals are small, but nothing was measured that bounds the errors."""
    history = go(simfbo(PROBLEM, STEPS), 150, directory=tmp_path)
    verdict = history.verdict
    assert (verdict["status"], verdict["converged"]) == ("unknown", None)
    assert verdict["text"].startswith("unknown: lower-level residual ")
    assert verdict["text"].endswith("(automatic steps of bilevel methods bound it)")
    fall = np.linalg.norm(TRUTH.hypergradient(history.state.x))
    fall /= np.linalg.norm(TRUTH.hypergradient(TASK.x0))
    assert verdict["hypergradient"] < 0.05
    assert fall < 0.05
    assert History.load(tmp_path).verdict == verdict


def test_a_run_that_is_too_short_says_so():
    history = go(simfbo(PROBLEM, Point(x=0.001, y=0.3, v=0.3)), 40)
    assert history.end == {"status": "finished"}
    assert history.verdict["converged"] is False
    assert history.verdict["lower"] < 0.05
    assert history.verdict["hypergradient"] > 0.9
    advice = "; use more iterations or larger step sizes"
    assert history.verdict["text"].endswith(advice)


def test_other_steps_of_several_exchanges():
    history = go(fednest(PROBLEM, Point(x=0.2, y=0.3, v=0.3), 1, 8), 60)
    assert set(history.verdict) == {"lower", "hypergradient", "status", "converged", "text"}
    assert history.verdict["status"] == "unknown"


def test_a_method_without_residuals_has_no_verdict():
    method = lfednest(PROBLEM, STEPS)
    assert go(method, 3).verdict is None


def test_an_interrupted_run_has_no_verdict():
    def stop(t, record):
        if t == 2:
            raise KeyboardInterrupt

    assert go(simfbo(PROBLEM, STEPS), 9, on_round=stop).verdict is None


@pytest.mark.parametrize("kill", [3, 37])
def test_a_resumed_run_has_the_same_verdict(tmp_path, kill):
    def stop(t, record):
        if t == kill:
            raise KeyboardInterrupt

    method, federation = simfbo(PROBLEM, STEPS), SimulatedFederation(TASK.data)
    expected = go(method, 40, federation).verdict
    go(method, 40, federation, directory=tmp_path, on_round=stop)
    assert go(method, 40, federation, directory=tmp_path, resume=True).verdict == expected


def test_noise_is_not_taken_for_a_residual():
    """Of a drift of 0.2 under noise of deviation 1, the drift is found."""
    rng = np.random.default_rng(0)
    one = None
    for t in range(2000):
        at = (20.0 if t < 100 else 0.2) + rng.normal(size=50)
        one = MODULE._added(one, t * 20 // 2000, float(np.linalg.norm(at)), at)
    assert MODULE.verdict({"y": one})["lower"] == pytest.approx(0.2 / 20, rel=0.1)


def test_a_slow_swing_is_not_taken_for_noise():
    swing = seen(y=np.cos(np.arange(200) / 30))
    assert MODULE.verdict(swing)["lower"] > 0.5


def test_the_hypergradient_counts_from_when_y_and_v_are_near():
    decays = np.append([1.0] * 50, [1e-3] * 150)
    early = seen(y=decays, v=decays, x=np.append([1000.0] * 50, [1.0] * 150))
    assert MODULE.verdict(early)["hypergradient"] == pytest.approx(1.0)
    fell = seen(y=decays, v=decays, x=np.append([1000.0] * 50, np.geomspace(1.0, 1e-4, 150)))
    assert MODULE.verdict(fell)["hypergradient"] < 1e-3


def test_growing_residuals_ask_for_smaller_steps():
    grows = seen(y=np.geomspace(1, 100, 100), x=np.ones(100))
    text = MODULE.verdict(grows)["text"]
    assert text.startswith("not converged: lower-level residual ")
    assert text.endswith("; residuals grow: use smaller or automatic step sizes")
    assert "automatic" not in MODULE.verdict(grows, EVIDENCE)["text"]


def test_residuals_of_zero_are_solved():
    assert MODULE.verdict(seen(y=np.zeros(40), x=np.zeros(40)), EVIDENCE)["converged"] is True


SMALL = seen(
    y=np.geomspace(1, 1e-4, 200), v=np.geomspace(1, 1e-4, 200), x=np.geomspace(1, 1e-4, 200)
)
EVIDENCE = {
    "y": 0.01, "v": 0.01, "hypergradient": 0.01, "first": 1.0, "gain": 1.0, "late": 1.0,
    "doubt": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(("evidence", "status"), [
    ({}, "converged"), ({"y": 0.06}, "unknown"), ({"v": 0.06}, "unknown"),
    ({"late": 0.9}, "still improving"), ({"hypergradient": 0.2}, "not converged"),
    ({"first": 0.0}, "not converged"), ({"doubt": 2.0}, "unknown"),
])  # fmt: skip
def test_converged_needs_bounded_errors_a_small_hypergradient_and_a_flat_upper_loss(
    evidence, status
):
    verdict = MODULE.verdict(SMALL, EVIDENCE | evidence)
    assert verdict["status"] == status
    assert verdict["converged"] is {"converged": True, "unknown": None}.get(status, False)
    assert verdict["text"].startswith(f"{status}: ")


def test_without_a_first_hypergradient_there_is_no_share_of_it():
    verdict = MODULE.verdict(SMALL, EVIDENCE | {"first": 0.0, "hypergradient": 1e-5})
    assert "hypergradient" not in verdict
    assert "hypergradient" not in verdict["text"]


@pytest.mark.parametrize(("losses", "status"), [
    (np.geomspace(1, 0.5, 40), "still improving"), (np.ones(40), "unknown"),
    ([1.0, 0.5], "unknown"),
    (1 + 0.1 * np.random.default_rng(0).normal(size=40), "unknown"),
    # A network's loss: nearly all of the decrease is in its beginning.
    ([2.3, *np.geomspace(0.12, 0.09, 39)], "still improving"), ([2.3, *[0.1] * 39], "unknown"),
])  # fmt: skip
def test_a_falling_upper_loss_is_an_improvement(losses, status):
    """Without a measured curvature, the evaluated upper losses tell."""
    assert MODULE.verdict(SMALL, None, losses)["status"] == status


def test_bounded_errors_need_no_small_residuals():
    """Residuals relative to a start that is near the solution stay large."""
    large = seen(y=np.ones(40), v=np.ones(40), x=np.ones(40))
    assert MODULE.verdict(large, EVIDENCE)["status"] == "converged"
    assert MODULE.verdict(large)["status"] == "not converged"


def test_a_round_that_was_given_up_half_way_leaves_no_residuals():
    """Automatic steps catch a lack of replies within a round of FedNest, after y and before x."""
    federation, key = SimulatedFederation(TASK.data), jax.random.key(0)
    method = fednest(PROBLEM, Point(x=0.2, y=0.3, v=0.3), 1, 8)
    residuals = MODULE.Residuals(method, federation, rounds=4)
    residuals.begin(1)
    lower_grad = method.client_steps["lower_grad"]
    residuals.federation.sum(lower_grad, (TASK.x0, TASK.y0), federation.cohort(key), key)
    assert residuals.end(1, {}) == {}
    residuals.begin(2)
    method.round(method.init(TASK.x0, TASK.y0), residuals.federation, key)
    assert residuals.end(2, {}).keys() == {"y", "x"}


def test_places_are_taken_from_every_leaf():
    tree = {"a": jnp.arange(1000.0), "b": jnp.array([[7.0]])}
    norm, *places = np.asarray(MODULE.measured({"y": tree})["y"]).tolist()
    assert norm == pytest.approx(np.linalg.norm([*range(1000), 7]))
    assert 32 <= len(places) <= 70
    assert 7.0 in places
