"""The runner: what it records, and how a run ends."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Changed, Functional

from simfbo import Point, SimulatedFederation
from simfbo.algorithms import simfbo
from simfbo.core.exchange import Reason, Refusal
from simfbo.core.gate import Gate
from simfbo.core.keys import keyed
from simfbo.core.local_work import uniform
from simfbo.core.sampling import drop_out, without_replacement
from simfbo.errors import ResumableError, UserError
from simfbo.runs.history import History
from simfbo.runs.runner import run
from simfbo.tasks._quadratic import quadratic

# The same shapes as in test_resume, so that the client step is compiled once for both.
TASK = quadratic(clients=6, dim_x=2, dim_y=3, samples=4, noise=0.3, batch_size=2, seed=4)
ALGORITHM = simfbo(TASK.problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
FEDERATION = SimulatedFederation(TASK.data, without_replacement(3), uniform(1, 3))


def go(rounds=5, **options) -> History:
    """Return a run's history; all runs share the compiled federation."""
    FEDERATION.ledger = type(FEDERATION.ledger)()
    options = {"evaluate": TASK.evaluate, **options}
    return run(ALGORITHM, FEDERATION, TASK.x0, TASK.y0, rounds=rounds, **options)


def lines(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]


def test_header(tmp_path):
    go(3, seed=9, directory=tmp_path, config={"task": {"name": "quadratic"}})
    header = lines(tmp_path)[0]
    assert header["kind"] == "header"
    assert (header["algorithm"], header["rounds"], header["seed"]) == ("SimFBO", 3, 9)
    assert header["config"] == {"task": {"name": "quadratic"}}
    assert header["versions"]["jax"] == jax.__version__


def test_records_are_the_ledger():
    history = go(4)
    for t, record in enumerate(history.records):
        # Three clients, 2 + 3 + 3 floats of eight bytes.
        assert (record["round"], record["communication_rounds"]) == (t, t)
        assert (record["floats_down"], record["floats_up"]) == (24 * t, 24 * t)
        assert (record["bytes_down"], record["bytes_up"]) == (192 * t, 192 * t)
        assert record["projected"] == 0
    total, last = FEDERATION.ledger.total, history.records[-1]
    names = "floats_down", "floats_up", "bytes_down", "bytes_up"
    assert [last[name] for name in names] == [getattr(total, name) for name in names]
    seconds = history.column("seconds")
    assert 0 <= seconds[0] < seconds[1]
    assert seconds == sorted(seconds)
    assert history.end == {"status": "finished"}


def test_metrics_are_those_of_the_state():
    history = go(4)
    expected = TASK.evaluate(history.state)
    assert {name: history.records[-1][name] for name in expected} == expected
    assert list(expected) == ["grad_norm_squared", "x_error", "y_error", "v_error"]


@pytest.mark.parametrize(
    ("every", "rounds"),
    [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (100, [0, 5])],
)
def test_every_includes_the_first_and_the_last(every, rounds):
    assert go(5, every=every).column("round") == rounds


def test_on_round_is_called_after_every_iteration():
    calls = []
    history = go(3, every=2, on_round=lambda t, record: calls.append((t, record)))
    first, second, last = history.records
    assert calls == [(0, first), (1, None), (2, second), (3, last)]


def test_the_same_seed_gives_the_same_numbers():
    first, again, other = (go(3, seed=seed) for seed in (1, 1, 2))
    assert first.column("x_error") == again.column("x_error")
    np.testing.assert_array_equal(first.state.x, again.state.x)
    assert first.column("x_error")[0] == other.column("x_error")[0]
    assert first.column("x_error")[1] != other.column("x_error")[1]


def test_evaluation_changes_nothing():
    often, never = go(4, every=1), go(4, evaluate=None)
    np.testing.assert_array_equal(often.state.x, never.state.x)
    assert "x_error" not in never.records[-1]


def test_rounds_are_keyed_by_seed_and_number():
    keys = []
    spy = Changed(ALGORITHM, lambda _, state, federation, key: keys.append(key) or state)
    one_by_one = SimulatedFederation(TASK.data, strategy="lanes")
    for seed, rounds in ((7, 3), (8, 1)):
        run(spy, one_by_one, TASK.x0, TASK.y0, rounds=rounds, seed=seed)
    data = [jax.random.key_data(key).tolist() for key in keys]
    expected = [
        jax.random.fold_in(jax.random.key(s), t) for s, t in ((7, 1), (7, 2), (7, 3), (8, 1))
    ]
    assert data == [jax.random.key_data(key).tolist() for key in expected]
    assert len(set(map(tuple, data))) == 4


@pytest.mark.parametrize(("rounds", "every"), [(0, 1), (1, 0), (-1, 1)])
def test_counts_below_one(rounds, every, tmp_path):
    with pytest.raises(UserError) as caught:
        go(rounds, every=every, directory=tmp_path / "new")
    name, got = ("every", every) if every < 1 else ("rounds", rounds)
    assert str(caught.value) == f"{name} must be a whole number of at least 1, got {got}."
    assert not (tmp_path / "new").exists()


def test_interrupted(tmp_path):
    def on_round(t, record):
        if t == 2:
            raise KeyboardInterrupt

    history = go(5, directory=tmp_path, on_round=on_round)
    assert history.end == {"status": "interrupted"}
    assert History.load(tmp_path).end == {"status": "interrupted"}
    assert History.load(tmp_path).column("round") == [0, 1, 2]
    np.testing.assert_array_equal(history.state.x, go(2).state.x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_diverged(tmp_path, bad):
    values = iter([1.0, 2.0, bad])
    history = go(9, directory=tmp_path, evaluate=lambda state: {"loss": next(values)})
    reason = "loss is not finite after iteration 2. Smaller step sizes often help"
    end = {"status": "diverged", "round": 2, "variable": "loss", "reason": reason}
    assert history.end == end
    assert history.column("round") == [0, 1, 2]
    loaded = History.load(tmp_path)
    assert loaded.end == end
    np.testing.assert_array_equal(loaded.column("loss"), [1.0, 2.0, np.nan])
    for line in (tmp_path / "history.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON knows no NaN


def test_an_error_leaves_a_history_without_an_end(tmp_path):
    def evaluate(state):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go(2, directory=tmp_path, evaluate=evaluate)
    loaded = History.load(tmp_path)
    assert loaded.end is None
    assert loaded.records == []


def test_metrics_may_be_jax_numbers_and_must_be_finite(tmp_path):
    def metrics(value):
        return lambda state: {"loss": jnp.asarray(value)}

    good = run(ALGORITHM, FEDERATION, TASK.x0, TASK.y0, rounds=2, evaluate=metrics(1.5),
               directory=tmp_path / "a")  # fmt: skip
    assert History.load(tmp_path / "a").records[-1]["loss"] == 1.5
    assert good.end == {"status": "finished"}
    bad = run(ALGORITHM, FEDERATION, TASK.x0, TASK.y0, rounds=2, evaluate=metrics(np.nan))
    assert bad.end["status"] == "diverged"


def test_divergence_is_detected_without_metrics():
    steps = Point(x=1e6, y=1e6, v=1e6)
    found = run(simfbo(TASK.problem, steps), FEDERATION, TASK.x0, TASK.y0, rounds=400, every=100)
    client = FEDERATION.latest.largest_sender
    norm = float(jnp.linalg.norm(found.state.x))
    first = run(simfbo(TASK.problem, steps), FEDERATION, TASK.x0, TASK.y0, rounds=1).state.x
    limit = 1e6 * 2**2 * float(jnp.linalg.norm(first))  # t^2 times the norm after the first round
    assert found.end == {
        "status": "diverged",
        "round": 2,
        "variable": "x",
        "client": client,
        "reason": f"the norm of x is {norm:.3g} after iteration 2, the limit {limit:.3g}; client "
        f"{client} sent the largest message. A smaller step size for x often helps",
    }
    assert [record["round"] for record in found.records] == [0, 2]


@pytest.mark.parametrize("name", ["x", "y", "v"])
def test_divergence_names_the_right_variable(name):
    local, server = Point(x=1e-3, y=1e-3, v=1e-3), {"x": 1e-3, "y": 1e-3, "v": 1e-3, name: 1e8}
    method = simfbo(TASK.problem, local, Point(**server))
    found = run(method, FEDERATION, TASK.x0, TASK.y0, rounds=3)
    assert found.end["variable"] == name


class Minimal:
    """A user's own federation, with nothing but what an algorithm needs."""

    def __init__(self):
        self.ledger, self.n = FEDERATION.ledger, FEDERATION.n
        self.cohort, self.sum, self.gather = FEDERATION.cohort, FEDERATION.sum, FEDERATION.gather
        self.mean_norm = FEDERATION.mean_norm


def test_a_users_federation_needs_no_gate():
    assert run(ALGORITHM, Minimal(), TASK.x0, TASK.y0, rounds=2).end == {"status": "finished"}


@pytest.mark.parametrize(("leaf", "kind"), [(0.5, "float"), (jax.random.key(0), "random key")])
def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path, leaf, kind):
    def init(x, y):
        return ALGORITHM.init(x, y)._replace(projected=leaf)

    with pytest.raises(UserError) as caught:
        run(Functional("SimFBO", init, ALGORITHM.round), FEDERATION, TASK.x0, TASK.y0, rounds=1,
            directory=tmp_path / "it")  # fmt: skip
    assert str(caught.value) == (
        f"The state of SimFBO holds a {kind}, which cannot be saved: use arrays (for a random key, "
        "its key_data)."
    )
    assert not (tmp_path / "it").exists()


def test_an_interrupted_run_records_where_it_stopped():
    def stop(t, record):
        if t == 3:
            raise KeyboardInterrupt

    cut = run(ALGORITHM, FEDERATION, TASK.x0, TASK.y0, rounds=100, every=50, on_round=stop)
    assert cut.end == {"status": "interrupted"}
    assert [record["round"] for record in cut.records] == [0, 3]


def test_refusals_are_recorded_with_their_reason(tmp_path):
    federation = SimulatedFederation(
        TASK.data, without_replacement(3), uniform(1, 3), absence=drop_out(0.3)
    )
    history = run(ALGORITHM, federation, TASK.x0, TASK.y0, rounds=8, directory=tmp_path, seed=1)
    assert history.refusals == History.load(tmp_path).refusals
    assert history.records[-1]["refused"] == len(history.refusals) > 0
    assert federation.refusals == []
    for line in history.refusals:
        assert list(line) == ["round", "exchange", "client_step", "client", "reason", "text"]
        assert line["round"] == line["exchange"]
        assert type(line["reason"]) is str
        assert (line["client_step"], line["reason"], line["text"]) == (
            "simfbo_step", "no-reply", "did not reply")  # fmt: skip


def test_refusals_before_the_run_are_not_its_own():
    federation = SimulatedFederation(TASK.data, without_replacement(3), uniform(1, 3))
    federation.refusals.append(Refusal(1, "other", 0, Reason.NO_REPLY, "did not reply"))
    assert run(ALGORITHM, federation, TASK.x0, TASK.y0, rounds=1).refusals == []


@pytest.mark.parametrize(
    ("rules", "status", "advice"),
    [
        (
            {"absence": keyed(lambda key, ids: ids >= 0)},
            "starved",
            "did not reply. Sample more clients, or lower min_replies",
        ),
        ({"gate": Gate(max_norm=1e-9)}, "diverged", "1e-09. Smaller step sizes often help"),
    ],
)
def test_a_run_without_usable_replies_ends_with_advice(rules, status, advice):
    federation = SimulatedFederation(TASK.data, without_replacement(3), uniform(1, 3), **rules)
    history = run(ALGORITHM, federation, TASK.x0, TASK.y0, rounds=3)
    client = history.refusals[0]["client"]
    reason = f"only 0 of 3 replies to 'simfbo_step' count: client {client} "
    assert history.end["reason"].startswith(reason)
    assert history.end["reason"].endswith(advice)
    assert (history.end["status"], history.end["round"]) == (status, 1)
    assert (history.end["client"], len(history.refusals)) == (client, 3)


def test_a_record_holds_counts_then_metrics():
    assert list(go(1).records[-1]) == [
        "round", "communication_rounds", "floats_down", "floats_up", "bytes_down", "bytes_up",
        "bytes_x", "bytes_y", "bytes_v",
        "refused", "seconds", "cpu_seconds", "projected", "grad_norm_squared", "x_error", "y_error",
        "v_error",
    ]  # fmt: skip


def test_a_run_is_never_overwritten(tmp_path):
    go(1, directory=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ResumableError, match="already holds a run"):
        go(1, directory=tmp_path, seed=4)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
