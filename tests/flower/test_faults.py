"""Nodes that fail, lie or disappear: the run continues and the history records it."""

import json
import time
from contextlib import nullcontext
from functools import cache

import jax
import numpy as np
import pytest
from flwr.app import Message
from flwr.app.error import Error

from simfbo import Gate, Point, SimulatedFederation, UserError, algorithms, run
from simfbo.core.exchange import Reason
from simfbo.core.keys import keyed
from simfbo.errors import ClientWarning
from simfbo.flower import app as adapter
from simfbo.flower.app import FlowerFederation, serve
from simfbo.flower.discovery import LOG
from simfbo.flower.transport import Package
from simfbo.tasks import quadratic

TASK = quadratic(clients=6, samples=5, noise=0.3, batch_size=2, seed=1)
METHOD = algorithms.simfbo(TASK.problem, Point(x=0.05, y=0.1, v=0.1))
NODES = 3  # node 1 holds clients 0 and 1, and so on


@pytest.fixture
def made(flower):
    """Return a grid and a federation on it; options go to the deployment."""

    def make(**options):
        plan = flower.deployed(TASK, METHOD, **{"timeout": 0.3, "wait": 0.3} | options)
        grid = flower.Grid(plan, flower.parts(NODES))
        federation = FlowerFederation(grid, plan, poll=0.01)
        federation.connect()
        return grid, federation

    return make


class Killed(BaseException):
    """What no handler catches."""


def second(grid):
    return sorted(grid.settings)[1]


def trained(federation, rounds=3, **options):
    return run(METHOD, federation, TASK.x0, TASK.y0, rounds=rounds, seed=2, **options)


@cache
def x_without(*clients):
    """Return x after a simulated run in which these clients never reply."""

    @keyed
    def absence(key, ids):
        return np.isin(ids, clients)

    return trained(SimulatedFederation(TASK.data, absence=absence)).state.x


def only_training(change):
    def spoil(node, message, reply):
        return reply if "hello" in message.metadata.message_type else change(node, message, reply)

    return spoil


def reasons(history):
    return {(line["client"], line["reason"], line["text"]) for line in history.refusals}


def refused(clients, reason, text=None):
    """Return the reasons of a history in which these clients were refused."""
    return {(client, reason, text or reason.text) for client in clients}


def errs(code, text="x"):
    return lambda message: Message(Error(code, text), reply_to=message)


@pytest.mark.parametrize(
    ("reply", "reason", "text"),
    [
        (errs(2, "<class 'ValueError'>:<'no disk'>"), Reason.NODE_FAILED,
         "did not reply: its app failed with <class 'ValueError'>:<'no disk'>"),
        (errs(8), Reason.NODE_FAILED, "did not reply: its process died"),
        (errs(5), Reason.NODE_AWAY, "did not reply: its node is away"),
        (errs(4), Reason.TIMED_OUT, "did not reply in time"),
        (errs(1), Reason.NODE_FAILED, "did not reply: its app cannot be loaded"),
        (lambda message: None, Reason.TIMED_OUT, "did not reply within 0.3 s"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("partial_sums", [False, True])
def test_a_node_that_fails_is_left_out_and_recorded(made, reply, reason, text, partial_sums):
    grid, federation = made(partial_sums=partial_sums)
    bad = second(grid)
    grid.spoil = only_training(lambda node, m, r: reply(m) if node == bad else r)
    history = trained(federation)
    assert history.end == {"status": "finished"}
    assert reasons(history) == refused({2, 3}, reason, text)
    np.testing.assert_allclose(history.state.x, x_without(2, 3), rtol=1e-12)
    # 4 of 6 replied, three times, with floats of x, y and v.
    assert federation.ledger.total.floats_up == 3 * 4 * (4 + 5 + 5)


def test_a_run_with_known_weights_starts_without_a_node_that_fails(flower):
    def load(client, node):
        if client == 4:
            raise OSError("the disk is gone")
        return flower.samples_of(TASK.data, client)

    plan = flower.deployed(TASK, METHOD, wait=0.3)._replace(load_client=load)
    federation = FlowerFederation(flower.Grid(plan, flower.parts(NODES)), plan, poll=0.01)
    with pytest.raises(UserError, match=r"2 of 6 clients \(the first is client 4\) have no node"):
        federation.connect()
    federation.connect(p=np.ones(6))  # weights are known: the run starts without the others
    history = trained(federation)
    assert reasons(history) == refused({4, 5}, Reason.NODE_AWAY)
    np.testing.assert_allclose(history.state.x, x_without(4, 5), rtol=1e-12)


@pytest.mark.parametrize("partial_sums", [False, True])
def test_nan_in_a_clients_data_is_said_by_its_node_and_by_the_server(
    flower, monkeypatch, partial_sums
):
    def load(client, node):
        lower, upper = flower.samples_of(TASK.data, client)
        bad = np.nan if client == 4 else 1.0
        return jax.tree.map(lambda a: a * bad, lower), upper

    said = []
    monkeypatch.setattr(LOG, "warning", lambda text, *parts: said.append(text % parts))
    plan = flower.deployed(TASK, METHOD, partial_sums=partial_sums)._replace(load_client=load)
    federation = FlowerFederation(flower.Grid(plan, flower.parts(NODES)), plan, poll=0.01)
    federation.connect()
    with pytest.warns(
        ClientWarning, match="Iteration 1: client 4 sent a message that is not finite"
    ):
        history = trained(federation)
    assert said == ["Client 4's samples hold NaN or infinite numbers, so its messages may not "
                    "count: clean or drop those rows."]  # fmt: skip
    assert [one["clients"] for one in history.warnings] == [[4]]
    np.testing.assert_allclose(history.state.x, x_without(4), rtol=1e-12)


def altered(**arrays):
    """Return a change of a reply's arrays, by name."""

    def change(node, message, reply):
        package = adapter._package(reply.content)
        found = dict(package.arrays)
        for name, value in arrays.items():
            found[name] = value(found[name])
        return Message(adapter._content(Package(package.settings, found)), reply_to=message)

    return change


LIES = {
    "other clients": (altered(ids=lambda a: a - 2), "sent a response for other clients"),
    "none": (altered(ids=lambda a: a[:0]), "sent a response for other clients"),
    "not whole": (altered(ids=lambda a: a.astype(float)), "sent no list of ids"),
}
EACH = LIES | {
    "short": (altered(**{"message.x": lambda a: a[:1]}), "sent a different number of messages"),
    "shape": (altered(**{"message.x": lambda a: a[:, :2]}), "sent shape (2,) for .x, not (4,)"),
    "type": (altered(**{"message.x": lambda a: a.astype("float32")}), "sent float32 numbers"),
    "nan": (altered(**{"message.x": lambda a: a * np.nan}), "sent .x that is not finite"),
    "huge": (altered(**{"message.v": lambda a: a + 1e9}), "sent a message of norm"),
    "repeats": (altered(repeats=lambda a: a + 1), "sent a response for other clients"),
}
SUMS = LIES | {
    "shape": (altered(**{"message.x": lambda a: a[:2]}), "sent a sum that does not match"),
    "nan": (altered(**{"message.x": lambda a: a * np.nan}), "sent a sum that is not finite"),
    "passed": (altered(passed=lambda a: a.astype(int)), "sent a sum without a list of"),
    "nobody": (altered(passed=lambda a: a & False), "sent a sum for clients 2, 3 whose .x has"),
    "squares": (altered(squares=lambda a: a[:1]), "sent a sum without the norms"),
}
KINDS = {"nan": Reason.NOT_FINITE, "huge": Reason.TOO_LARGE, "nobody": Reason.TOO_LARGE}


@pytest.mark.parametrize(
    ("lie", "partial_sums"), [(k, False) for k in EACH] + [(k, True) for k in SUMS]
)
def test_a_node_that_lies_does_not_count(made, lie, partial_sums):
    change, text = (SUMS if partial_sums else EACH)[lie]
    grid, federation = made(partial_sums=partial_sums, gate=Gate(max_norm=1e6))
    bad = second(grid)
    grid.spoil = only_training(lambda node, m, r: change(node, m, r) if node == bad else r)
    warned = pytest.warns(ClientWarning, match="clients 2, 3 sent messages that are not finite")
    with warned if lie == "nan" else nullcontext():
        history = trained(federation)
    assert history.end["status"] == "finished"
    assert {one[:2] for one in reasons(history)} == {
        (client, KINDS.get(lie, Reason.MALFORMED)) for client in (2, 3)
    }
    assert all(found.startswith(text) for *_, found in reasons(history))
    np.testing.assert_allclose(history.state.x, x_without(2, 3), rtol=1e-12)


@pytest.mark.parametrize("partial_sums", [False, True])
def test_a_stale_response_does_not_count(made, partial_sums):
    grid, federation = made(partial_sums=partial_sums)
    bad, kept = second(grid), []

    def stale(node, message, reply):
        if node != bad:
            return reply
        kept.append(adapter._package(reply.content))
        return Message(adapter._content(kept[0]), reply_to=message)

    grid.spoil = only_training(stale)
    history = trained(federation)
    assert {(line["round"], line["client"]) for line in history.refusals} == {
        (t, client) for t in (2, 3) for client in (2, 3)
    }
    text = "sent a response to another exchange" if partial_sums else "answered exchange 1, not 2"
    assert (2, Reason.WRONG_EXCHANGE, text) in reasons(history)
    assert not any(reason == Reason.NODE_AWAY for _, reason, _ in reasons(history))


def test_an_unreadable_reply_does_not_affect_the_others(made):
    grid, federation = made()
    bad = second(grid)

    def unreadable(node, message, reply):
        if node == bad:
            raise ValueError("bytes that are no message")
        return reply

    grid.spoil = only_training(unreadable)
    history = trained(federation)
    assert history.end == {"status": "finished"}
    assert reasons(history) == refused({2, 3}, Reason.MALFORMED, "sent an unreadable message")
    np.testing.assert_allclose(history.state.x, x_without(2, 3), rtol=1e-12)


def test_a_node_cannot_reply_for_another(made):
    grid, federation = made()
    first, bad = sorted(grid.settings)[:2]
    numbers = {}

    def forged(node, message, reply):
        numbers[node] = message.metadata.message_id
        if node == bad:
            reply.metadata.__dict__["_reply_to_message_id"] = numbers[first]
        return reply

    grid.spoil = only_training(forged)
    np.testing.assert_allclose(trained(federation).state.x, x_without(), rtol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.clear(),
        lambda content: content["texts"].update(settings="[1"),
        lambda content: content["texts"].update(settings="[]"),
        lambda content: content["texts"].update({"own arrays": "{}"}),
        lambda content: content["texts"].update({"own arrays": '[["a", "object", [1]]]'}),
        lambda content: content["texts"].update({"own arrays": '[["a", "int8", [-1]]]'}),
        lambda content: content["texts"].update(own=b"1"),
        lambda content: content["texts"].update(own="text"),
        lambda content: content["texts"].pop("own"),
    ],
)
def test_whatever_a_node_sends_the_run_continues(made, change):
    grid, federation = made()
    bad = second(grid)

    def spoilt(node, message, reply):
        if node == bad:
            change(reply.content)
        return reply

    grid.spoil = only_training(spoilt)
    history = trained(federation)
    assert history.end == {"status": "finished"}
    assert {one[:2] for one in reasons(history)} == {(2, "malformed"), (3, "malformed")}


def test_a_node_that_leaves_is_not_waited_for_and_counts_again_when_it_is_back(made):
    grid, federation = made(timeout=30.0)
    away = second(grid)

    def on_round(t, record):
        grid.online = set(grid.settings) - ({away} if t in (1, 2) else set())

    history = trained(federation, rounds=5, on_round=on_round)
    assert {(line["round"], line["client"]) for line in history.refusals} == {
        (t, client) for t in (2, 3) for client in (2, 3)
    }
    assert {reason for _, reason, _ in reasons(history)} == {Reason.NODE_AWAY}


def test_a_node_that_comes_back_under_another_number_is_found(made):
    grid, federation = made()
    old, new = second(grid), 77

    def on_round(t, record):
        if t == 1:
            grid.settings[new] = grid.settings.pop(old)
            grid.online = set(grid.settings)

    history = trained(federation, rounds=5, on_round=on_round)
    assert {line["round"] for line in history.refusals} == {2}


def test_a_node_that_comes_back_with_other_clients_is_not_asked_for_those_it_had(made):
    grid, federation = made(timeout=5.0)
    changed = second(grid)

    def on_round(t, record):
        if t == 1:
            grid.settings[changed] = {"clients": "3"}
            grid.app = type(grid.app)(lambda config: grid.plan)

    history = trained(federation, rounds=5, on_round=on_round)
    text = "This node does not hold client 2."
    failed = f"did not reply: its app failed with <class 'simfbo.errors.UserError'>:<'{text}'>"
    away = Reason.NODE_AWAY.text
    assert {(line["round"], line["client"], line["text"]) for line in history.refusals} == {
        (2, 2, failed), (2, 3, failed), (3, 2, failed), (3, 3, failed), (4, 2, away), (5, 2, away),
    }  # fmt: skip


def test_a_second_node_with_the_same_clients_does_not_end_a_run(made):
    grid, federation = made()

    def on_round(t, record):
        if t == 1:
            grid.settings[77] = {"clients": "2-3"}
            grid.online = set(grid.settings)

    history = trained(federation, rounds=4, on_round=on_round)
    assert history.end == {"status": "finished"}
    assert history.refusals == []


def test_a_reply_just_before_the_end_of_the_time_counts(made, monkeypatch):
    grid, federation = made(timeout=1.0)
    ready = time.perf_counter()
    pull = grid.pull_messages
    monkeypatch.setattr(
        grid, "pull_messages", lambda ids: pull(ids) if time.perf_counter() > ready + 0.97 else []
    )
    history = trained(federation, rounds=1)
    assert history.refusals == []


def test_the_error_says_why_a_node_could_not_be_used(flower):
    def load(client, node):
        raise OSError("the disk is gone")

    plan = flower.deployed(TASK, METHOD, wait=0.3)._replace(load_client=load)
    federation = FlowerFederation(flower.Grid(plan, flower.parts(NODES)), plan, poll=0.01)
    with pytest.raises(UserError, match=r"a node did not reply: its app failed .*the disk is gone"):
        federation.connect()


def test_two_nodes_with_the_same_clients_are_refused(flower):
    plan = flower.deployed(TASK, METHOD, wait=0.3)
    grid = flower.Grid(plan, {5: {"clients": "0-3"}, 6: {"clients": "3-5"}})
    with pytest.raises(UserError, match="Two nodes hold client 3"):
        FlowerFederation(grid, plan, poll=0.01).connect()


def test_too_few_replies_end_the_run_and_it_can_be_resumed(made, tmp_path, flower):
    grid, federation = made(gate=Gate(min_replies=5))
    bad = second(grid)
    away = only_training(lambda node, m, r: None if node == bad else r)

    def on_round(t, record):
        grid.spoil = away if t == 2 else grid.spoil

    history = trained(federation, rounds=6, directory=tmp_path, on_round=on_round)
    assert history.end["status"] == "starved"
    assert "4 of 6 replies to 'simfbo_step' count" in history.end["reason"]
    grid, federation = made(gate=Gate(min_replies=5))
    resumed = trained(federation, rounds=6, directory=tmp_path, resume=True)
    grid, federation = made()
    np.testing.assert_array_equal(resumed.state.x, trained(federation, rounds=6).state.x)


def test_a_server_that_is_killed_resumes_with_the_same_weights(flower, tmp_path, monkeypatch):
    plan = flower.deployed(TASK, METHOD, rounds=5, p=None, wait=0.3)
    whole = serve(flower.Grid(plan, flower.parts(NODES)), plan, tmp_path / "whole", {})
    grid = flower.Grid(plan, flower.parts(NODES))

    def dies(node, message, reply):
        if message.metadata.group_id == "4":
            raise Killed
        return reply

    grid.spoil = dies
    with pytest.raises(Killed):
        serve(grid, plan, tmp_path / "cut", {})
    assert json.loads((tmp_path / "cut" / "weights.json").read_text()) == [10] * 6
    again = serve(flower.Grid(plan, flower.parts(NODES)), plan, tmp_path / "cut", {})
    np.testing.assert_array_equal(again.state.x, whole.state.x)
    assert [line["round"] for line in again.records] == [0, 1, 2, 3, 4, 5]
