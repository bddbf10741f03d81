"""Metrics of clients on Flower's nodes are those of a simulation."""

import jax
import numpy as np
import pytest

from simfbo import ClientMetric, Point
from simfbo.algorithms import simfbo
from simfbo.flower.app import serve
from simfbo.flower.deployment import simulate
from simfbo.runs.history import History
from simfbo.tasks import random_quadratic

TASK = random_quadratic(6, 3, 4, seed=2).task(np.arange(1, 7), samples=6, noise=1.0, batch_size=2)
STEPS = Point(x=0.02, y=0.05, v=0.05)
ASKED = {
    "upper_loss": TASK.problem.upper,
    "fit": ClientMetric(lambda x, y, batch: -TASK.problem.upper(x, y, batch), "max"),
}


def federated(flower, lower_level="shared", **options):
    method = simfbo(TASK.problem._replace(lower_level=lower_level), STEPS)
    given = {"rounds": 4, "every": 2, "client_metrics": ASKED}
    plan = flower.deployed(TASK, method, **given | options)
    return plan, flower.Grid(plan, flower.parts(2))


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def columns(history):
    return [{k: r[k] for k in r if k.startswith("clients_")} for r in history.records]


@pytest.mark.parametrize(
    ("lower_level", "partial_sums"),
    [("shared", False), ("private", False), pytest.param("shared", True, marks=pytest.mark.slow)],
)
def test_nodes_measure_what_a_simulation_does(flower, tmp_path, lower_level, partial_sums):
    plan, grid = federated(flower, lower_level, partial_sums=partial_sums)
    found, wanted = serve(grid, plan, tmp_path, {}), simulate(plan)
    same(found.state, wanted.state)
    assert len(columns(found)[0]) == 10
    same(columns(found), columns(wanted))
    same(found.client_scores.values, wanted.client_scores.values)
    assert found.client_scores.missing == []
    sent = [history.records[-1]["bytes_evaluation"] for history in (found, wanted)]
    assert sent[0] == sent[1] > 0
    same(History.load(tmp_path).client_scores.values, wanted.client_scores.values)
    plain, grid = federated(flower, lower_level, client_metrics=None)
    same(serve(grid, plain, tmp_path / "plain", {}).state, found.state)


def test_clients_of_a_node_that_is_away_are_unknown_and_named(flower, tmp_path):
    plan, grid = federated(flower)
    lost = max(grid.online)  # which holds clients 3, 4 and 5

    def spoil(node, message, reply):
        if message.metadata.message_type == "train.client_metrics" and len(grid.sent) > 8:
            grid.online.discard(lost)
        return reply if node in grid.online else None

    grid.spoil = spoil
    plan = plan._replace(timeout=0.2)
    found, wanted = serve(grid, plan, tmp_path, {}), simulate(plan)
    assert found.client_scores.missing == [3, 4, 5]
    assert not np.isnan(found.clients[0]["values"]["fit"]).any()
    away = [r for r in found.refusals if r["client_step"] == "client_metrics"]
    assert {r["client"] for r in away} == {3, 4, 5}
    assert {r["reason"] for r in away} == {"node-away"}
    here = ~np.isnan(found.client_scores.values["fit"])
    assert found.end == {"status": "finished"}
    first = [history.clients[0]["values"]["upper_loss"] for history in (found, wanted)]
    same(*first)
    assert found.client_scores.mean() == pytest.approx(
        np.average(found.client_scores.values["upper_loss"][here], weights=TASK.data.p[here])
    )
