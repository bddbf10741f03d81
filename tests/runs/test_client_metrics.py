"""Evaluation on clients: the right numbers, and a run that does not notice it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Changed

from simfbo import (
    BilevelProblem,
    ClientMetric,
    DebugFederation,
    Gate,
    History,
    Point,
    SimulatedFederation,
    UserError,
    codecs,
    from_clients,
    privacy,
    run,
)
from simfbo.algorithms import fedbioacc_local, simfbo, with_momenta
from simfbo.core.keys import keyed
from simfbo.core.sampling import drop_out, without_replacement
from simfbo.runs import report

RNG = np.random.default_rng(3)
COUNTS = (2, 5, 3, 4)
UPPER = [RNG.normal(size=(count, 3)) for count in COUNTS]
LOWER = [RNG.normal(size=(count, 3)) for count in (3, 3, 2, 4)]
DATA = from_clients(LOWER, UPPER, batch_size=2)
STEPS = Point(x=0.05, y=0.1, v=0.1)
X0, Y0 = np.zeros(3), np.zeros(3)


def upper(x, y, batch):
    return jnp.mean(jnp.sum((batch - y) ** 2, -1)) + jnp.sum(x**2)


def lower(x, y, batch):
    return jnp.mean(jnp.sum((batch + x - y) ** 2, -1)) + 0.1 * jnp.sum(y**2)


def near(x, y, batch):
    return jnp.mean(jnp.sum((batch - y) ** 2, -1) < 3, dtype=batch.dtype)


PROBLEM = BilevelProblem(upper, lower)
METHOD = simfbo(PROBLEM, STEPS)
ASKED = {"upper_loss": upper, "near": ClientMetric(near, "max")}


def by_hand(x, y):
    """Return each client's metrics, in NumPy."""
    squares = [((rows - np.asarray(y)) ** 2).sum(1) for rows in UPPER]
    loss = [s.mean() + (np.asarray(x) ** 2).sum() for s in squares]
    return np.array(loss), np.array([(s < 3).mean() for s in squares])


def go(federation=None, algorithm=METHOD, asked=ASKED, rounds=4, **options):
    federation = SimulatedFederation(DATA) if federation is None else federation
    given = {"every": 2, "seed": 5, **options}
    return run(algorithm, federation, X0, Y0, rounds=rounds, client_metrics=asked, **given)


@pytest.mark.parametrize("engine", [SimulatedFederation, DebugFederation])
def test_every_client_measures_all_its_upper_samples(engine):
    federation = engine(DATA, without_replacement(2))
    history = go(federation, rounds=2)
    loss, close = by_hand(history.state.x, history.state.y)
    scores = history.client_scores
    np.testing.assert_allclose(scores.values["upper_loss"], loss, rtol=1e-12)
    np.testing.assert_allclose(scores.values["near"], close, rtol=1e-12)
    np.testing.assert_array_equal(scores.weights, DATA.p)
    last = history.records[-1]
    assert [record["round"] for record in history.records] == [0, 2]
    assert last["clients_mean_upper_loss"] == pytest.approx(DATA.p @ loss, rel=1e-12)
    assert last["clients_worst_upper_loss"] == pytest.approx(loss.max())
    assert last["clients_worst_near"] == close.min()
    assert last["clients_q90_near"] == pytest.approx(np.quantile(close, 0.9))
    first = history.records[0]["clients_mean_upper_loss"]
    assert first == pytest.approx(DATA.p @ by_hand(X0, Y0)[0])


def test_its_traffic_is_counted_by_itself():
    federation = SimulatedFederation(DATA, without_replacement(2))
    history = go(federation)
    sent = federation.ledger.by_step["client_metrics"]
    assert sent == federation.ledger.evaluation
    assert sent[:5] == (3, 3 * 4 * 6, 3 * 4 * 2, 8 * 3 * 4 * 6, 8 * 3 * 4 * 2)
    assert federation.ledger.total.rounds == 4 == history.records[-1]["communication_rounds"]
    assert [r["bytes_evaluation"] for r in history.records] == [
        256,
        512,
        768,
    ]  # 8 numbers per client
    assert sum(federation.ledger.by_channel.values()) == sum(federation.ledger.total[3:5])


HALVES = codecs.Codecs(up=Point(*[codecs.dithered(0.5)] * 3))
SETTINGS = {
    "cohorts": {"sampler": without_replacement(2)},
    "drop-outs": {"absence": drop_out(0.4)},
    "auto": {"gate": Gate(max_norm="auto")},
    "codecs": {"codecs": HALVES},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_takes_the_same_course_with_and_without(name):
    found = []
    for asked in (None, ASKED):
        federation = SimulatedFederation(DATA, **SETTINGS[name])
        history = go(federation, asked=asked, rounds=12, every=1)
        found.append((history, federation))
    (plain, one), (measured, two) = found
    jax.tree.map(np.testing.assert_array_equal, plain.state, measured.state)
    assert (one.ledger.total, one.ledger.by_channel) == (two.ledger.total, two.ledger.by_channel)
    assert one.observed == two.observed
    assert plain.verdict == measured.verdict
    training = [r for r in measured.refusals if r["client_step"] != "client_metrics"]
    assert training == plain.refusals
    assert measured.records[-1]["refused"] == len(measured.refusals)


def test_clients_that_do_not_reply_are_unknown_and_named():
    federation = SimulatedFederation(DATA, absence=keyed(lambda key, ids: ids == 1))
    history = go(federation)
    loss, _ = by_hand(history.state.x, history.state.y)
    here = np.array([True, False, True, True])
    scores = history.client_scores
    np.testing.assert_allclose(scores.values["upper_loss"][here], loss[here], rtol=1e-12)
    assert scores.missing == [1]
    assert scores.mean() == pytest.approx(np.average(loss[here], weights=DATA.p[here]))
    asked = [r for r in history.refusals if r["client_step"] == "client_metrics"]
    assert [(r["round"], r["client"], r["reason"]) for r in asked] == [
        (t, 1, "no-reply") for t in (0, 2, 4)
    ]
    assert "Without a finite reply of: 1." in report.summary(history)


def test_numbers_that_are_not_finite_are_refused_and_large_ones_are_not():
    def wild(x, y, batch):
        return jnp.where(batch[0, 0] == UPPER[2][0, 0], jnp.nan, 1e9 * jnp.mean(batch[:, 0] ** 2))

    history = go(SimulatedFederation(DATA, gate=Gate(max_norm=50.0)), asked={"wild": wild})
    assert history.end == {"status": "finished"}
    assert history.client_scores.missing == [2]
    assert history.client_scores.worst().value > 1e8
    assert {(r["client"], r["reason"]) for r in history.refusals} == {(2, "not-finite")}


def test_an_evaluation_that_nobody_answers_does_not_end_a_run():
    @keyed
    def absence(key, ids):  # all are away when they are asked together
        return np.full(len(ids), len(ids) == 4)

    federation = SimulatedFederation(DATA, without_replacement(2), absence=absence)
    history = go(federation, evaluate=lambda state: {"norm": float(jnp.sum(state.x))})
    assert history.end == {"status": "finished"}
    assert np.isnan(history.column("clients_mean_upper_loss")).all()
    assert history.client_scores.missing == [0, 1, 2, 3]


def without_clocks(folder):
    found = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    clocks = ("seconds", "cpu_seconds", "crc32")
    return [{key: line[key] for key in line if key not in clocks} for line in found]


class Stop(BaseException):
    """A kill."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_resumed_run_is_the_same_and_a_loaded_history_has_the_scores(tmp_path, error):
    def stop(t, record):
        if t == 3:
            raise error

    given = {"rounds": 6, "checkpoint_seconds": 0.0}
    federation = SimulatedFederation(DATA, without_replacement(2), absence=drop_out(0.3))
    whole = go(federation, directory=tmp_path / "a", **given)
    federation = SimulatedFederation(DATA, without_replacement(2), absence=drop_out(0.3))
    try:
        part = go(federation, directory=tmp_path / "b", on_round=stop, **given)
        assert part.records[-1]["round"] == part.clients[-1]["round"] == 3
    except Stop:
        pass
    resumed = go(federation, directory=tmp_path / "b", resume=True, **given)
    assert without_clocks(tmp_path / "a") == without_clocks(tmp_path / "b")
    assert resumed.records[-1]["bytes_evaluation"] == whole.records[-1]["bytes_evaluation"]
    loaded = History.load(tmp_path / "b").client_scores
    for name in ASKED:
        np.testing.assert_array_equal(loaded.values[name], whole.client_scores.values[name])
    assert loaded.goals == {"upper_loss": "min", "near": "max"}
    with pytest.raises(UserError, match="different settings \\(client_metrics\\)"):
        go(federation, directory=tmp_path / "b", resume=True, asked=None, **given)


@pytest.mark.filterwarnings("ignore:Rounds of")  # it reads the ledger
def test_what_an_interrupted_iteration_sent_is_not_counted():
    def change(round, state, federation, key):
        after = round(state, federation, key)
        if federation.ledger.total.rounds == 3:
            raise KeyboardInterrupt
        return after

    federation = SimulatedFederation(DATA, absence=keyed(lambda key, ids: ids == 1))
    history = go(federation, Changed(METHOD, change), rounds=6, every=6, on_round=lambda *_: 0)
    assert history.end["status"] == "interrupted"
    last = history.records[-1]
    assert (last["round"], last["communication_rounds"]) == (2, 2)
    assert last["refused"] == 4  # in two evaluations and two iterations
    assert [line["round"] for line in history.refusals] == [0, 1, 2, 2]


def test_a_private_lower_level_is_measured_at_the_clients_own_y():
    problem = PROBLEM._replace(lower_level="private")
    for algorithm, own_y in (
        (simfbo(problem, STEPS), lambda memory: memory.y),
        (fedbioacc_local(problem, STEPS), lambda memory: memory.at.y),
        (with_momenta(simfbo(problem, STEPS), 0.5), lambda memory: memory.own.y),
    ):
        federation = SimulatedFederation(DATA, without_replacement(3))
        history = go(federation, algorithm)
        ys = np.asarray(own_y(federation.client_memory))
        assert np.abs(ys - ys[0]).max() > 1e-3
        wanted = [by_hand(history.state.x, y)[0][i] for i, y in enumerate(ys)]
        scores = history.client_scores
        np.testing.assert_allclose(scores.values["upper_loss"], wanted, rtol=1e-12)
        plain = go(SimulatedFederation(DATA, without_replacement(3)), algorithm, asked=None)
        jax.tree.map(np.testing.assert_array_equal, plain.state, history.state)
        assert federation.ledger.evaluation.floats_down == 3 * 4 * 3  # x alone


def test_what_cannot_be_measured():
    noisy = privacy.private(METHOD, privacy.Privacy())
    with pytest.raises(UserError, match="differentially private, and metrics of single clients"):
        go(algorithm=noisy)
    with pytest.raises(UserError, match="client_metrics is empty"):
        go(asked={})
    with pytest.raises(UserError, match="'rows' returns an array of shape \\(3,\\)"):
        go(asked={"rows": lambda x, y, batch: jnp.mean(batch, 0)})


def test_columns_that_should_be_large_are_named_for_who_shows_them():
    history = go(about={"metric": "a", "goal": "max", "maximise": ["b"]}, rounds=1)
    assert history.header["about"]["maximise"][:2] == ["b", "clients_mean_near"]
    assert "clients_worst_upper_loss" not in history.header["about"]["maximise"]
    assert history.header["client_metrics"] == {"upper_loss": "min", "near": "max"}
    assert "Clients' upper loss: mean" in report.summary(history)
    assert "clients mean" not in report.summary(history)
