"""Engines that watch messages: what they see, what runs say of it, and the automatic limit."""

import contextlib
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Functional

from simfbo import DebugFederation, Gate, Point, SimulatedFederation, run
from simfbo.core.data import from_clients
from simfbo.core.exchange import Reason
from simfbo.core.keys import keyed
from simfbo.core.sampling import Cohort
from simfbo.errors import ClientWarning
from simfbo.runs.checkpoint import files, load
from simfbo.runs.history import History
from simfbo.runs.report import page, summary

ENGINES = [SimulatedFederation, DebugFederation]
KEY = jax.random.key(0)
CLIENTS, SIZE = 10, 80


def sent(factors=None):
    """Return the messages of all clients, a row each."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=SIZE) + rng.normal(size=(CLIENTS, SIZE))
    return rows if factors is None else rows * np.reshape(factors, (-1, 1))


def held(rows):
    """Return the data of clients whose only sample is the message they send."""
    return from_clients([row[None] for row in rows], [np.zeros((1, 1))] * CLIENTS)


def step(payload, client):
    """Send one's sample times the payload."""
    return Point(y=payload * client.data.lower_batch(client.key)[0], v=jnp.ones(1))


def one_round(state, federation, key):
    found = federation.sum(step, state.x, federation.cohort(key), key)
    return Point(state.x, state.y + 1e-3 * found.y, state.v)


PLAIN = Functional("plain", lambda x, y: Point(x, y, y), one_round, (step,))
START = jnp.ones(()), jnp.zeros(SIZE)
LOUD = np.where(np.isin(np.arange(CLIENTS), [3, 8]), 100.0, 1.0)
EVERYONE = Cohort(np.arange(CLIENTS, dtype=np.int32), np.full(CLIENTS, 0.1))


def go(federation, rounds=12, **options):
    return run(PLAIN, federation, *START, rounds=rounds, **options)


def watched(rows, engine=SimulatedFederation, **options):
    return engine(held(rows), detect_anomalies=True, **options)


def told(*arguments, **options):
    """Return a run's history and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ClientWarning)
        history = go(*arguments, **options)
    return history, [str(one.message) for one in caught]


@pytest.mark.parametrize("factors", [None, LOUD, -LOUD])
def test_engines_see_the_same(factors):
    seen = []
    for engine in ENGINES:
        federation = watched(sent(factors), engine, gate=Gate(max_norm=500.0))
        for _ in range(10):
            federation.sum(step, jnp.ones(()), EVERYONE, KEY)
        seen.append(federation)
    simulated, debug = (federation.latest.probed for federation in seen)
    assert simulated.widths == debug.widths == (SIZE, 1)
    np.testing.assert_allclose(simulated.rows, debug.rows, rtol=1e-14)
    rows = sent(factors)
    passed = np.linalg.norm(rows, axis=1) <= 500  # of the large ones
    np.testing.assert_allclose(simulated.rows[:, :SIZE], rows * passed[:, None], rtol=1e-14)
    assert seen[0].observed == seen[1].observed
    assert seen[0].suspicions == seen[1].suspicions


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_with_loud_clients_says_so_once(engine, tmp_path):
    history, texts = told(watched(sent(LOUD), engine), rounds=40, every=40, directory=tmp_path)
    (line,) = history.warnings
    assert (line["round"], line["clients"], line["about"]) == (8, [3, 8], "few")
    assert line["share"] == pytest.approx(0.96, abs=0.01)
    assert texts == [f"Iteration 8: {line['text']}."]
    assert history.end == {"status": "finished", "warnings": 1}
    stored = History.load(tmp_path)
    assert stored.warnings == history.warnings
    assert json.loads((tmp_path / "history.jsonl").read_text().splitlines()[2])["kind"] == "warning"
    assert summary(stored).splitlines()[-1] == f"Warning in iteration 8: {line['text']}."
    assert json.dumps(line["text"]) in page([stored])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_with_nan_in_its_data_is_named_in_the_first_round(engine):
    rows = sent()
    rows[4, 7] = np.nan
    history, (text,) = told(engine(held(rows)))
    assert text.startswith(
        "Iteration 1: client 4 sent a message that is not finite and not counted"
    )
    assert [(one["about"], one["clients"]) for one in history.warnings] == [("not-finite", [4])]
    assert history.end == {"status": "finished", "warnings": 1}
    assert {(one["client"], one["reason"]) for one in history.refusals} == {(4, "not-finite")}


def test_where_all_data_is_nan_the_end_says_where_to_look():
    history = go(SimulatedFederation(held(sent() * np.nan)))
    assert history.end["status"] == "diverged"
    assert history.end["reason"].endswith("Look for NaN in the clients' data, x0 and y0")


def test_honest_runs_say_nothing():
    """Warnings are errors in these tests."""
    history = go(watched(sent()), rounds=40)
    assert (history.warnings, history.end) == ([], {"status": "finished"})
    assert '"kind": "warning"' not in page([history])


@pytest.mark.parametrize("engine", ENGINES)
def test_simulations_compare_messages_only_where_that_is_asked_for(engine):
    federation = engine(held(sent(LOUD)))
    history, texts = told(federation, rounds=40)
    assert (history.warnings, texts, federation.observed) == ([], [], {})
    federation.sum(step, jnp.ones(()), EVERYONE, KEY)
    assert federation.latest.probed is None
    np.testing.assert_allclose(history.state.y, told(watched(sent(LOUD), engine), 40)[0].state.y)


def test_a_second_run_on_a_federation_starts_afresh():
    federation = watched(sent(LOUD))
    first, second = told(federation), told(federation)
    assert first[1] == second[1] != []


# The automatic limit


def auto(factors=None, engine=SimulatedFederation):
    return engine(held(sent(factors)), gate=Gate(max_norm="auto"))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_automatic_limit_refuses_the_loud_from_the_first_exchange_on(engine):
    """The first exchange shows that a limit is needed, and is repeated with one."""
    history = go(auto(LOUD, engine), rounds=3)
    assert history.records[-1]["communication_rounds"] == 4
    assert {(one["client"], one["reason"]) for one in history.refusals} == {
        (3, Reason.TOO_LARGE), (8, Reason.TOO_LARGE)
    }  # fmt: skip
    assert len(history.refusals) == 6
    quiet = go(engine(held(sent()), absence=keyed(lambda key, ids: np.isin(ids, [3, 8]))), rounds=3)
    np.testing.assert_allclose(history.state.y, quiet.state.y, rtol=1e-12)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 4.0, 1e3, 1e-30])
def test_it_follows_honest_messages_that_grow_and_shrink(factor):
    federation = auto()
    payload = 1.0
    for _ in range(6):
        federation.sum(step, jnp.asarray(payload), EVERYONE, KEY)
        assert federation.latest.admitted.all()
        payload *= factor
    assert not federation.refusals


def test_it_is_five_times_the_largest_recent_median():
    federation = auto()
    payloads = [3.0, 9.0, 8.0, 2.0, 1.0, 1.0, 1.0]
    norms = np.linalg.norm(sent(), axis=1)
    medians = []
    for payload in payloads:
        federation.sum(step, jnp.asarray(payload), EVERYONE, KEY)
        medians.append(np.median(np.sqrt(payload**2 * norms**2 + 1)))
        assert federation.rules("step").max_norm == pytest.approx(5 * max(medians[-5:]))
    assert federation.rules("another").max_norm is None


def test_messages_that_are_all_zero_set_no_limit():
    def nothing(payload, client):
        return Point(y=payload * client.data.lower_batch(client.key)[0])

    federation = auto()
    federation.sum(nothing, jnp.zeros(()), EVERYONE, KEY)
    assert federation.rules("nothing").max_norm is None
    federation.sum(nothing, jnp.ones(()), EVERYONE, KEY)
    assert federation.latest.admitted.all()


def test_another_limit_is_no_other_program():
    """All limits, given or automatic, are inputs of one program."""
    federation, other = auto(), SimulatedFederation(held(sent()), gate=Gate(max_norm=1e9))
    a = federation.sum(step, jnp.ones(()), EVERYONE, KEY)
    b = other.sum(step, jnp.ones(()), EVERYONE, KEY)
    np.testing.assert_array_equal(a.y, b.y)


# Resuming


class Stop(BaseException):
    """What a kill looks like from within."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("kill", [1, 6, 9])
def test_resumed_runs_warn_and_refuse_as_if_nothing_had_happened(tmp_path, kill, error):
    """Client 3 is refused by the automatic limit; 5 and 6 send the same: both are said once."""
    rows = sent(np.where(np.arange(CLIENTS) == 3, 100.0, 1.0))
    rows[6] = rows[5]

    def federation():
        return watched(rows, gate=Gate(max_norm="auto"))

    def stop(t, record):
        if t == kill:
            raise error

    options = {"rounds": 12, "every": 4, "checkpoint_seconds": 0.0}
    whole, _ = told(federation(), directory=tmp_path / "whole", **options)
    with contextlib.suppress(Stop):
        told(federation(), directory=tmp_path / "cut", on_round=stop, **options)
    again, _ = told(federation(), directory=tmp_path / "cut", resume=True, **options)
    np.testing.assert_array_equal(again.state.y, whole.state.y)
    assert again.refusals == whole.refusals
    assert again.warnings == whole.warnings
    said = [(line["about"], line["clients"]) for line in whole.warnings]
    assert sorted(said) == [("refused", [3]), ("same", [5, 6])]
    assert {line["client"] for line in whole.refusals} == {3}
    ends = [load(files(tmp_path / name)[-1]).manifest["observed"] for name in ("whole", "cut")]
    assert ends[0] == ends[1]
