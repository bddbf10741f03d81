"""What clients remember on Flower's nodes: versions, restarts, losses and hostile names."""

import jax
import numpy as np
import pytest
from flwr.app import RecordDict

from simfbo import Point, SimulatedFederation, UserError, run
from simfbo.algorithms import mimefbo
from simfbo.core.gate import Gate
from simfbo.core.keys import keyed
from simfbo.core.local_work import fixed
from simfbo.core.sampling import without_replacement
from simfbo.flower.app import FlowerFederation, serve
from simfbo.flower.deployment import simulate
from simfbo.flower.memory import DiskStore, keep, lost, recall
from simfbo.tasks import random_quadratic

TASK = random_quadratic(6, 3, 4, seed=2).task(np.arange(1, 7), samples=6, noise=1.0, batch_size=2)
METHOD = mimefbo(TASK.problem, Point(x=0.02, y=0.05, v=0.05), control="memory")
OPTIONS = {"sampler": without_replacement(3), "local_work": fixed([1, 2, 3, 1, 2, 5]), "rounds": 6}


def same(got, want, tolerance=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), got, want)


def federated(flower, **options):
    plan = flower.deployed(TASK, METHOD, **OPTIONS | options)
    return plan, flower.Grid(plan, flower.parts(2))


def on_disk(grid, folder):
    """Let every node keep memories in a folder of its own."""
    for k, node in enumerate(grid.settings):
        grid.settings[node] = {**grid.settings[node], "memory": str(folder / f"node-{k}")}


@pytest.mark.parametrize("partial_sums", [False, True])
def test_nodes_remember_as_a_simulation_does(flower, tmp_path, partial_sums):
    plan, grid = federated(flower, partial_sums=partial_sums)
    history = serve(grid, plan, tmp_path, {})
    same(history.state, simulate(plan).state)
    assert not history.warnings


def test_a_reply_that_the_server_refuses_changes_no_memory(flower, tmp_path):
    """The server's limit refuses replies that the node has already remembered."""
    plan, grid = federated(flower, gate=Gate(max_norm=9.0))
    history = serve(grid, plan, tmp_path, {})
    assert history.refusals
    same(history.state, simulate(plan).state)


def test_a_lost_reply_changes_no_memory(flower, tmp_path):
    plan, grid = federated(flower, timeout=0.2)
    drops = iter([False, False, False, False, True] + [False] * 50)
    grid.spoil = lambda node, message, reply: None if next(drops) else reply
    history = serve(grid, plan, tmp_path, {})
    (refused,) = {line["round"] for line in history.refusals}
    assert refused > 1
    lines = [line["client"] for line in history.refusals]
    federation = SimulatedFederation(
        TASK.data, OPTIONS["sampler"], OPTIONS["local_work"],
        absence=keyed(lambda key, ids: np.isin(ids, lines) & (done[-1] == refused - 1)),
    )  # fmt: skip
    done = [0]
    count = lambda t, record: done.append(t)  # noqa: E731
    want = run(METHOD, federation, TASK.x0, TASK.y0, rounds=6, on_round=count)
    same(history.state, want.state)


def test_a_restarted_node_reads_its_memory_from_disk(flower, tmp_path):
    plan, grid = federated(flower)
    on_disk(grid, tmp_path)

    def restart(node, message, reply):
        grid.states = {one: RecordDict() for one in grid.states}
        return reply

    grid.spoil = restart
    history = serve(grid, plan, tmp_path / "run", {})
    same(history.state, simulate(plan).state)
    assert not history.warnings
    files = list((tmp_path / "node-0").glob("*/*.npz"))
    assert 0 < len(files) <= 3 * 4  # of three clients at most four versions


def test_a_resumed_server_names_the_versions_it_had(flower, tmp_path):
    plan, grid = federated(flower)
    on_disk(grid, tmp_path)
    calls = []

    def stop(node, message, reply):
        calls.append(node)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return reply

    grid.spoil = stop
    with pytest.raises(UserError, match="interrupted"):
        serve(grid, plan, tmp_path / "run", {})
    grid.spoil = lambda node, message, reply: reply
    grid.states = {one: RecordDict() for one in grid.states}  # of another run of Flower's
    history = serve(grid, plan, tmp_path / "run", {})
    same(history.state, simulate(plan).state)
    assert not history.warnings


def test_a_node_that_lost_its_memory_says_so_once(flower, tmp_path):
    plan, grid = federated(flower, sampler=None)
    exchanges = []

    def lose(node, message, reply):
        exchanges.append(node)
        if len(exchanges) == 6:  # of the second round
            grid.states[node] = RecordDict()
        return reply

    grid.spoil = lose
    with pytest.warns(match="lost the saved memory"):
        history = serve(grid, plan, tmp_path, {})
    (line,) = history.warnings
    assert line["about"] == "forgot"
    assert line["clients"] == [3, 4, 5]
    assert history.end["status"] == "finished"


def test_two_runs_on_the_same_nodes_do_not_meet(flower, tmp_path):
    plan, grid = federated(flower)
    first = serve(grid, plan, tmp_path / "a", {})
    second = serve(grid, plan, tmp_path / "b", {})
    same(first.state, second.state, 0)


def test_the_server_holds_no_memory(flower):
    plan, grid = federated(flower)
    federation = FlowerFederation(grid, plan)
    federation.remember(METHOD, TASK.x0, TASK.y0)
    assert federation.client_memory is None
    assert federation.memory_bytes == 8 * 11


def test_stores_keep_what_a_server_can_still_ask_for(tmp_path):
    store, initial = DiskStore(tmp_path, "0" * 16), {"a": np.zeros(2)}
    for number, oldest in ((3, 0), (5, 0), (9, 4), (13, 8), (12, 8)):  # one comes late
        keep(store, 1, number, {"a": np.full(2, float(number))}, oldest)
    assert store.numbers(1) == [5, 9, 12, 13]
    np.testing.assert_array_equal(recall(store, 1, 13, initial)["a"], [13, 13])
    assert recall(store, 1, 0, initial) is initial
    assert recall(store, 1, 3, initial) is None
    assert recall(store, 1, 13, {"a": np.zeros(3)}) is None
    file = next(tmp_path.glob("*/1-*13.npz"))
    file.write_bytes(file.read_bytes()[:-5])
    assert recall(store, 1, 13, initial) is None


@pytest.mark.parametrize("name", ["../../etc", "", "0" * 15, "0" * 17, 7, "G" * 16])
def test_names_of_runs_that_would_be_other_folders_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="sent an invalid name of a run"):
        DiskStore(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_what_a_node_says_it_lost_is_not_trusted():
    asked = np.array([1, 4])
    assert lost({"lost": [4, 1, 4, 9, "x", True, None]}, asked) == [1, 4]
    assert lost({"lost": "all"}, asked) == lost({}, asked) == []


def test_old_runs_are_removed_from_disk(tmp_path):
    for k in range(6):
        DiskStore(tmp_path, f"{k:016x}")
    assert len(list(tmp_path.iterdir())) == 4
