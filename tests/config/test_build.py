"""From a configuration to the objects of a run."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import aggregation, datasets
from simfbo.config.build import build_algorithm, build_federation
from simfbo.config.build_task import build_task
from simfbo.config.run import checked
from simfbo.errors import UserError
from simfbo.runs.runner import run

DIGITS = {"name": "hyper-representation", "clients": 4}


def test_first_images_only():
    task = build_task(checked({"task": {**DIGITS, "train_images": 80, "test_images": 30}}, {}))
    whole = datasets.load("digits")
    assert task.data.n == 4
    both = np.concatenate([task.data.lower.rows, task.data.upper.rows])
    np.testing.assert_array_equal(np.sort(both), np.arange(80))
    np.testing.assert_array_equal(task.data.lower.samples[1], whole.train_labels[:80])
    right = task.evaluate(run_state(task))["test_accuracy"] * 30
    assert right == pytest.approx(round(right), abs=1e-5)


def run_state(task):
    """Return the initial state, as far as the metrics need it."""
    return SimpleNamespace(x=task.x0, y=task.y0)


def test_more_images_than_there_are():
    config = checked({"task": {**DIGITS, "test_images": 9999}}, {})
    with pytest.raises(UserError, match=r"^'task.test_images' is 9,999, but digits has 3\d\d: low"):
        build_task(config)


def test_cosine_schedule():
    """With one local step and everyone, a step of the server is its step size times a mean."""
    task_config = {"name": "quadratic", "clients": 3}
    moves = {}
    for schedule in ("constant", "cosine"):
        algorithm = {"name": "simfbo", "server_schedule": schedule}
        config = checked({"task": task_config, "algorithm": algorithm, "rounds": 4}, {})
        task = build_task(config)
        federation = build_federation(config, task.data)
        method = build_algorithm(config.algorithm, task.problem, config.rounds)
        moves[schedule] = [
            np.asarray(run(method, federation, task.x0, task.y0, rounds=t, seed=0).state.y)
            for t in (1, 2)
        ]
    slow, fast = moves["cosine"], moves["constant"]
    np.testing.assert_allclose(slow[0], fast[0])  # the first step is whole
    share = 0.5 * (1 + np.cos(np.pi / 4))
    np.testing.assert_allclose(slow[1] - slow[0], share * (fast[1] - fast[0]), rtol=1e-5)


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ({"x": "geometric-median"}, aggregation.geometric_median()),
        ({"x": "geometric-median", "iterations": 2}, aggregation.geometric_median(2)),
        ({"x": "centred-clipping"}, aggregation.centred_clipping()),
        (
            {"x": "centred-clipping", "radius": 0.5, "iterations": 3},
            aggregation.centred_clipping(0.5, 3),
        ),
        ({"x": "trimmed-mean", "trim": 0.3}, aggregation.trimmed_mean(0.3)),
    ],
)
def test_aggregators_by_name(table, rule):
    """The rule of a configuration combines messages as the one made by hand does."""
    config = checked({"task": {"name": "quadratic", "clients": 3}, "aggregation": table}, {})
    found = build_federation(config, build_task(config).data).aggregators
    assert [one.name for one in found] == [rule.name, "mean", "mean"]
    stack, weights = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4))), jnp.full(7, 1 / 7)
    np.testing.assert_array_equal(
        found.x.combine([stack], weights)[0], rule.combine([stack], weights)[0]
    )
