"""Resumed runs end, to the bit, as if nothing had happened."""

import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from functional import Functional

from simfbo import DebugFederation, Point, SimulatedFederation, algorithms
from simfbo.algorithms import simfbo
from simfbo.core.exchange import Exchange
from simfbo.core.ledger import Ledger
from simfbo.core.local_work import momentum, proximal, sgd, uniform
from simfbo.core.sampling import drop_out, without_replacement
from simfbo.engines.base import Engine
from simfbo.engines.rounds import Rounds
from simfbo.errors import UserError
from simfbo.privacy import Privacy, private
from simfbo.runs.checkpoint import files, load
from simfbo.runs.history import History
from simfbo.runs.runner import run
from simfbo.tasks._quadratic import quadratic

TASK = quadratic(clients=6, dim_x=2, dim_y=3, samples=4, noise=0.3, batch_size=2, seed=4)
STEPS = Point(x=0.05, y=0.1, v=0.1)
HEAVY = simfbo(TASK.problem, STEPS, Point(*[optax.sgd(0.05, momentum=0.9)] * 3), radius=0.4)
CLOCKS = ("seconds", "cpu_seconds", "crc32")


class Stop(BaseException):
    """What a kill looks like from within: nothing is cleaned up."""


class MadeUp(Engine):
    """Clients that reply made-up numbers which depend on the payload: nothing is compiled."""

    def collect(self, call):
        like, size = self.message_of(call), len(call.cohort.ids)
        sent = sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(call.payload))
        rng = np.random.default_rng(np.asarray(jax.random.key_data(call.key)))
        first = (size,) if self.stacks(call, like) else ()

        def reply(leaf):
            numbers = np.cos(sent + rng.normal(size=first + leaf.shape))
            return jnp.asarray(numbers.astype(leaf.dtype))

        squares = np.zeros((size, len(jax.tree.leaves(like))))
        exchange = Exchange(self.request(call, like), np.ones(size, bool), squares, [])
        return jax.tree.map(reply, like), exchange


ALIKE = uniform(1, 3)
DIFFERENT = uniform(1, 3, [sgd(), momentum(0.5), proximal(0.2)], rules_every_round=True)
FEDERATIONS = {
    engine: engine(TASK.data, without_replacement(3), work, absence=drop_out(0.2))
    for engine, work in (
        (SimulatedFederation, DIFFERENT),
        (DebugFederation, ALIKE),
        (MadeUp, ALIKE),
    )
}


def go(directory=None, algorithm=HEAVY, kill=None, error=Stop, engine=SimulatedFederation,
       **options):  # fmt: skip
    def on_round(t, record):
        if t == kill:
            raise error

    options = {"rounds": 12, "every": 4, "seed": 5, "checkpoint_seconds": 0.0, **options}
    federation = FEDERATIONS[engine]
    federation.ledger = Ledger()
    return run(
        algorithm, federation, TASK.x0, TASK.y0, evaluate=TASK.evaluate,
        directory=directory, on_round=on_round, **options,
    )  # fmt: skip


def lines(directory):
    """Return the lines of a history, without what the clock says."""
    found = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return [{key: a for key, a in line.items() if key not in CLOCKS} for line in found]


def assert_same_state(a, b):
    for u, w in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        assert u.dtype == w.dtype
        np.testing.assert_array_equal(u, w)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return go(directory), directory


@pytest.mark.parametrize("kill", [0, 1, 4, 7, 11])
def test_killed_after_any_round(whole, tmp_path, kill):
    history, directory = whole
    with pytest.raises(Stop):
        go(tmp_path, kill=kill)
    assert History.load(tmp_path).end is None
    again = go(tmp_path, resume=True)
    assert_same_state(again, history)
    assert lines(tmp_path) == lines(directory)
    assert again.refusals == history.refusals
    assert [r["round"] for r in again.records] == [0, 4, 8, 12]


def test_killed_over_and_over(whole, tmp_path):
    history, directory = whole
    for kill in (0, 2, 2, 3, 6, 6, 9, 12):
        with pytest.raises(Stop):
            go(tmp_path, kill=kill, resume=True)
    again = go(tmp_path, resume=True)
    assert_same_state(again, history)
    assert lines(tmp_path) == lines(directory)


def test_rare_checkpoints_cost_time_but_no_bit(whole, tmp_path):
    """Lines after the last checkpoint are cut off and written again."""
    history, directory = whole
    with pytest.raises(Stop):
        go(tmp_path, kill=5)
    with pytest.raises(Stop):
        go(tmp_path, kill=11, resume=True, checkpoint_seconds=1e9)
    assert len(lines(tmp_path)) > 8
    again = go(tmp_path, resume=True)
    assert_same_state(again, history)
    assert lines(tmp_path) == lines(directory)


def test_killed_before_the_first_checkpoint(whole, tmp_path):
    history, directory = whole
    with pytest.raises(Stop):
        go(tmp_path, kill=3, checkpoint_seconds=1e9)
    assert files(tmp_path) == []
    assert_same_state(go(tmp_path, resume=True), history)
    assert lines(tmp_path) == lines(directory)


def test_torn_last_line(whole, tmp_path):
    history, directory = whole
    with pytest.raises(Stop):
        go(tmp_path, kill=6)
    with open(tmp_path / "history.jsonl", "ab") as file:
        file.write(b'{"kind": "record", "rou')
    (tmp_path / ".checkpoint-0000000099.npz.tmp").write_bytes(b"half")
    assert_same_state(go(tmp_path, resume=True), history)
    assert lines(tmp_path) == lines(directory)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


@pytest.mark.parametrize("harm", ["checkpoint", "history cut", "history line", "history digit"])
def test_damage_falls_back_to_the_previous_checkpoint(whole, tmp_path, harm):
    """Where that one's history is whole, nothing at all is lost."""
    history, directory = whole
    with pytest.raises(Stop):
        go(tmp_path, kill=9)
    file = files(tmp_path)[0]
    book = tmp_path / "history.jsonl"
    data = book.read_bytes()[: load(file).manifest["written"]]
    if harm == "checkpoint":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "history cut":
        book.write_bytes(data[:-9])
    elif harm == "history line":
        last = data.rindex(b'{"kind"')
        book.write_bytes(data[:last] + data[last:].replace(b"{", b"<"))
    else:
        last = data.rindex(b"0.")
        book.write_bytes(data[:last] + b"7." + data[last + 2 :])
    with pytest.warns(UserWarning, match=re.escape(f"{file} cannot be used")):
        again = go(tmp_path, resume=True)
    assert_same_state(again, history)
    assert lines(tmp_path) == lines(directory)


def test_a_skipped_checkpoint_is_not_found_again(tmp_path):
    """After a fall-back, a later checkpoint of another history must not come back."""
    with pytest.raises(Stop):
        go(tmp_path, kill=9)
    book = tmp_path / "history.jsonl"
    book.write_bytes(book.read_bytes()[: load(files(tmp_path)[0]).manifest["written"] - 1])
    with pytest.warns(UserWarning, match="cannot be used"), pytest.raises(Stop):
        go(tmp_path, kill=8, resume=True, checkpoint_seconds=1e9)
    assert [file.name for file in files(tmp_path)] == ["checkpoint-0000000007.npz"]


def test_a_run_in_progress_cannot_be_resumed(tmp_path):
    def resume(t, record):
        if t == 3:
            half = tmp_path / ".checkpoint-0000000003.npz.tmp"
            half.write_bytes(b"being written")
            with pytest.raises(UserError, match="is in progress in another process"):
                go(tmp_path, resume=True)
            assert half.exists()
            raise Stop

    with pytest.raises(Stop):
        run(HEAVY, FEDERATIONS[SimulatedFederation], TASK.x0, TASK.y0, rounds=5, every=4, seed=5,
            evaluate=TASK.evaluate, directory=tmp_path, on_round=resume)  # fmt: skip


def test_ctrl_c_saves_and_evaluates_once(whole, tmp_path):
    history, directory = whole
    cut = go(tmp_path, kill=6, error=KeyboardInterrupt, checkpoint_seconds=1e9)
    assert cut.end == {"status": "interrupted"}
    assert [r["round"] for r in cut.records] == [0, 4, 6]
    assert [file.name for file in files(tmp_path)] == ["checkpoint-0000000006.npz"]
    again = go(tmp_path, resume=True)
    assert_same_state(again, history)
    assert lines(tmp_path) == lines(directory)


def test_ctrl_c_within_a_round_restores_the_previous_one(whole, tmp_path, monkeypatch):
    """Exchanges of the broken round are in no ledger, no history and no checkpoint."""
    history, directory = whole
    calls, account = iter(range(100)), Rounds.account
    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "account", lambda *a: _maybe_stop([*account(*a)], next(calls) == 6))
        cut = go(tmp_path)
    assert cut.end == {"status": "interrupted"}
    assert cut.records[-1]["communication_rounds"] == cut.records[-1]["round"] == 6
    assert_same_state(go(tmp_path, resume=True), history)
    assert lines(tmp_path) == lines(directory)


def _maybe_stop(state, stop):
    if stop:
        raise KeyboardInterrupt
    return state


def test_the_clocks_continue(tmp_path):
    with pytest.raises(Stop):
        go(tmp_path, kill=8)
    before = load(files(tmp_path)[0]).manifest
    after = go(tmp_path, resume=True).records[-1]
    assert after["seconds"] > before["seconds"]
    assert after["cpu_seconds"] > before["cpu_seconds"]


METHODS = {
    "shrofbo": algorithms.shrofbo(TASK.problem, STEPS),
    "fednest": algorithms.fednest(TASK.problem, STEPS, neumann_terms=2),
    "lfednest": algorithms.lfednest(TASK.problem, STEPS),
    "aggitd": algorithms.aggitd(TASK.problem, STEPS, lower_rounds=2),
    "fedbio": algorithms.fedbio(TASK.problem, STEPS),
    "fedmbo": algorithms.fedmbo(TASK.problem, STEPS, neumann_terms=2),
    "memfbo": algorithms.memfbo(TASK.problem, STEPS),
    "memfbo, order 2": algorithms.memfbo(TASK.problem, STEPS, order=2),
    "fedmsa": algorithms.fedmsa(TASK.problem, STEPS),
    "fedbioacc": algorithms.fedbioacc(TASK.problem, STEPS),
    "tuning-free": algorithms.tuning_free(
        lambda plan: algorithms.shrofbo(TASK.problem, plan.local, plan.server)
    ),
    "private": private(HEAVY, Privacy()),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, tmp_path):
    """All that a method remembers is in its state, which a checkpoint holds."""
    options = {"algorithm": METHODS[name], "rounds": 4, "every": 2, "engine": MadeUp}
    expected = go(tmp_path / "a", **options)
    with pytest.raises(Stop):
        go(tmp_path / "b", kill=2, **options)
    assert_same_state(go(tmp_path / "b", resume=True, **options), expected)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


def walk_step(at, client):
    return Point(*(z + jax.random.normal(client.key, z.shape) for z in at))


def walk_round(state, federation, key):
    return federation.sum(walk_step, state, federation.cohort(key), key)


# The debug engine interprets every operation of a client step, so this one has few.
WALK = Functional("random walk", lambda x, y: Point(*map(jnp.asarray, (x, y, y))), walk_round,
                 (walk_step,))  # fmt: skip


def test_the_debug_engine_resumes_too(tmp_path):
    options = {"engine": DebugFederation, "rounds": 2, "every": 1, "algorithm": WALK}
    expected = go(tmp_path / "a", **options)
    with pytest.raises(Stop):
        go(tmp_path / "b", kill=1, **options)
    assert_same_state(go(tmp_path / "b", resume=True, **options), expected)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 6}, "seed"),
        ({"rounds": 13}, "rounds"),
        ({"every": 3}, "every"),
        ({"config": {"a": 1}}, "config"),
        ({"algorithm": METHODS["shrofbo"]}, "algorithm"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, field):
    with pytest.raises(Stop):
        go(tmp_path, kill=5)
    before = (tmp_path / "history.jsonl").read_bytes()
    with pytest.raises(UserError) as caught:
        go(tmp_path, resume=True, **change)
    assert str(caught.value) == (
        f"The run was started with different settings ({field}): resume it with the same ones, or "
        "choose another folder."
    )
    assert (tmp_path / "history.jsonl").read_bytes() == before


def test_another_version_is_a_warning(tmp_path, monkeypatch):
    with pytest.raises(Stop):
        go(tmp_path, kill=5)
    monkeypatch.setenv("PJRT_NPROC", "77")
    with pytest.warns(UserWarning, match="started with another version of threads"):
        go(tmp_path, resume=True)


def test_without_checkpoints_only_the_same_run_is_started_again(tmp_path):
    with pytest.raises(Stop):
        go(tmp_path, kill=3, checkpoint_seconds=1e9)
    before = (tmp_path / "history.jsonl").read_bytes()
    with pytest.raises(UserError, match="started with different settings"):
        go(tmp_path, resume=True, seed=6)
    assert (tmp_path / "history.jsonl").read_bytes() == before
    go(tmp_path, resume=True)
    for file in files(tmp_path):
        file.unlink()
    before = (tmp_path / "history.jsonl").read_bytes()
    with pytest.raises(UserError, match="has ended and its checkpoints are missing"):
        go(tmp_path, resume=True)
    assert (tmp_path / "history.jsonl").read_bytes() == before


def test_any_config_can_be_resumed(tmp_path):
    config = {"a": (1, 2), 3: float("inf")}
    with pytest.raises(Stop):
        go(tmp_path, kill=3, config=config)
    assert go(tmp_path, resume=True, config=config).end == {"status": "finished"}


def test_ctrl_c_in_an_evaluation_undoes_the_round(whole, tmp_path):
    """Lines of rounds that were not evaluated are in no output of the interrupted run."""
    history, directory = whole
    calls = iter(range(100))

    def evaluate(state):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return TASK.evaluate(state)

    federation = FEDERATIONS[SimulatedFederation]
    federation.ledger = Ledger()
    cut = run(HEAVY, federation, TASK.x0, TASK.y0, rounds=12, every=4, seed=5, evaluate=evaluate,
              directory=tmp_path, checkpoint_seconds=1e9)  # fmt: skip
    assert max(line["round"] for line in [*cut.records, *cut.refusals]) == 4
    assert max(line.get("round", 0) for line in lines(tmp_path)) == 4
    assert_same_state(go(tmp_path, resume=True), history)
    assert lines(tmp_path) == lines(directory)


def test_other_random_numbers_are_refused(tmp_path):
    with pytest.raises(Stop):
        go(tmp_path, kill=3)
    with (
        jax.default_prng_impl("rbg"),
        pytest.raises(UserError, match="started with another jax_default_prng_impl"),
    ):
        go(tmp_path, resume=True)


def test_resume_needs_a_folder():
    with pytest.raises(UserError, match="needs the run's folder: pass directory="):
        go(resume=True)
