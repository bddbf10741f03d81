"""The runner, its history on disk, and the variables beside it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest

from simfbo import SimulatedFederation, Steps, simfbo
from simfbo.core.sampling import without_replacement
from simfbo.errors import UserError
from simfbo.runs.history import History
from simfbo.runs.runner import run
from simfbo.runs.variables import load_variables, save_variables
from simfbo.tasks._quadratic import quadratic
from simfbo.tasks.models import Linear

TASK = quadratic(clients=4, dim_x=2, dim_y=3, samples=3, noise=0.5, batch_size=1)
ALGORITHM = simfbo(TASK.problem, Steps(y=0.2, v=0.1, x=0.05), radius=10.0)
FEDERATION = SimulatedFederation(TASK.data, without_replacement(2))


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
    packages = {"simfbo", "jax", "jaxlib", "optax", "numpy"}
    assert set(header["versions"]) == {"python", "threads", *packages}
    assert "not installed" not in header["versions"].values()


def test_records_are_the_ledger():
    history = go(4)
    for t, record in enumerate(history.records):
        # Two clients, 2 + 3 + 3 floats of eight bytes.
        assert (record["round"], record["communication_rounds"]) == (t, t)
        assert (record["floats_down"], record["floats_up"]) == (16 * t, 16 * t)
        assert (record["bytes_down"], record["bytes_up"]) == (128 * t, 128 * t)
        assert record["projected"] == 0
    total = FEDERATION.ledger.total._asdict()
    last = history.records[-1]
    assert {name: last[name] for name in total if name != "rounds"} == {
        name: value for name, value in total.items() if name != "rounds"
    }
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
    spy = ALGORITHM._replace(round=lambda state, federation, key: keys.append(key) or state)
    for seed, rounds in ((7, 3), (8, 1)):
        run(spy, FEDERATION, TASK.x0, TASK.y0, rounds=rounds, seed=seed)
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
    assert str(caught.value) == (f"rounds and every must be at least 1, got {rounds} and {every}.")
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
    reason = "loss is not finite after round 2. Smaller steps often help"
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


def test_a_run_is_never_overwritten(tmp_path):
    go(1, directory=tmp_path)
    before = (tmp_path / "history.jsonl").read_bytes()
    with pytest.raises(UserError) as caught:
        go(1, directory=tmp_path, seed=4)
    assert str(caught.value) == (
        f"{tmp_path} already holds a run: choose another output folder, or go on with it: "
        f"simfbo run --resume {tmp_path}."
    )
    assert (tmp_path / "history.jsonl").read_bytes() == before


# The history on disk


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return go(3, directory=directory, config={"rounds": 3}), directory


@pytest.mark.parametrize("name", ["", "history.jsonl"])
def test_load_gives_back_what_was_measured(stored, name):
    history, directory = stored
    loaded = History.load(directory / name)
    assert loaded.header == history.header
    assert loaded.records == history.records
    assert loaded.end == {"status": "finished"}
    assert loaded.state is None
    assert History.load(str(directory)).records == history.records


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_is_left_out(stored, tmp_path, cut):
    history, directory = stored
    *whole, last, _ = (directory / "history.jsonl").read_text().splitlines()
    file = tmp_path / "history.jsonl"
    file.write_text("\n".join([*whole, last[:cut]]))
    loaded = History.load(tmp_path)
    assert loaded.records == history.records[:-1]
    assert loaded.end is None


def test_a_line_torn_inside_a_letter_is_left_out(stored, tmp_path):
    history, directory = stored
    (tmp_path / "history.jsonl").write_bytes(
        (directory / "history.jsonl").read_bytes() + '{"kind": "é'.encode()[:-1]
    )
    assert History.load(tmp_path).records == history.records


@pytest.mark.parametrize("name", ["nothing", "", "folder"])
def test_a_path_without_a_run(tmp_path, name):
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(UserError) as caught:
        History.load(path)
    assert str(caught.value) == f"No run is at {path}: give a folder that `simfbo run` wrote."


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"[1, 2]\n", b'{"kind": "record"}\n', b"{}\n", b"\x93NUMPY\xff\n"]
)
def test_a_file_that_is_no_history(tmp_path, content):
    file = tmp_path / "other.txt"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        History.load(file)
    assert str(caught.value) == (f"{file} is not a history of simfbo: its first line is no header.")


def test_frame(stored):
    history, _ = stored
    frame = history.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == [
        "round", "communication_rounds", "floats_down", "floats_up", "bytes_down", "bytes_up",
        "refused", "seconds", "cpu_seconds", "projected", "grad_norm_squared", "x_error", "y_error",
        "v_error",
    ]  # fmt: skip
    assert frame["round"].tolist() == [0, 1, 2, 3]
    assert frame["x_error"].tolist() == history.column("x_error")


def test_column_of_an_unknown_name(stored):
    with pytest.raises(UserError, match=r"^The history holds no 'x'; it holds round, communi"):
        stored[0].column("x")
    with pytest.raises(UserError, match=r"^The history holds no 'x'; it holds nothing yet\.$"):
        History({}).column("x")


# Variables on disk

NESTED = (
    {"deep": [Linear(np.arange(6.0).reshape(2, 3), np.ones(3, np.float32)), np.int32(4)]},
    (np.array([1, 2], np.int8), {"a": np.array(2.5), "b.c": np.zeros((0, 2))}),
)


def test_variables_come_back_as_they_were(tmp_path):
    file = tmp_path / "variables.npz"
    save_variables(file, *NESTED)
    like = jax.tree.map(np.zeros_like, NESTED)
    found = load_variables(file, *like)
    assert jax.tree.structure(found) == jax.tree.structure(NESTED)
    for saved, loaded in zip(*map(jax.tree.leaves, (NESTED, found)), strict=True):
        np.testing.assert_array_equal(saved, loaded)
        assert saved.dtype == loaded.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["variables.npz"]


def test_variables_of_a_run(tmp_path):
    state = go(2).state
    save_variables(tmp_path / "v.npz", state.x, state.y)
    x, y = load_variables(str(tmp_path / "v.npz"), TASK.x0, TASK.y0)
    np.testing.assert_array_equal(x, state.x)
    np.testing.assert_array_equal(y, state.y)


@pytest.mark.parametrize("other", [(np.zeros(1), np.zeros(1)), (NESTED[1], NESTED[0])])
def test_variables_of_another_task(tmp_path, other):
    file = tmp_path / "variables.npz"
    save_variables(file, *NESTED)
    with pytest.raises(UserError) as caught:
        load_variables(file, *other)
    assert str(caught.value) == (
        f"{file} holds other variables than asked for: is it another task's?"
    )


def test_saving_replaces_in_one_step(tmp_path):
    file = tmp_path / "variables.npz"
    save_variables(file, np.zeros(1), np.zeros(1))
    save_variables(file, np.ones(1), np.ones(1))
    assert load_variables(file, np.zeros(1), np.zeros(1)) == (1.0, 1.0)


def test_metrics_may_be_jax_numbers_and_must_be_finite(tmp_path):
    def metrics(value):
        return lambda state: {"loss": jnp.asarray(value)}

    good = run(ALGORITHM, FEDERATION, TASK.x0, TASK.y0, rounds=2, evaluate=metrics(1.5),
               directory=tmp_path / "a")  # fmt: skip
    assert History.load(tmp_path / "a").records[-1]["loss"] == 1.5
    assert good.end == {"status": "finished"}
    bad = run(ALGORITHM, FEDERATION, TASK.x0, TASK.y0, rounds=2, evaluate=metrics(np.nan))
    assert bad.end["status"] == "diverged"


def test_divergence_is_seen_without_metrics():
    steps = Steps(y=1e6, v=1e6, x=1e6)
    wild = run(simfbo(TASK.problem, steps), FEDERATION, TASK.x0, TASK.y0, rounds=400, every=100)
    reason = wild.end.pop("reason")
    assert wild.end == {"status": "diverged", "round": 1, "variable": "x", "client": 2}
    norm = float(jnp.linalg.norm(wild.state.x))
    assert reason.startswith(f"the norm of x is {norm:.3g} after round 1, the limit 1e+06; client ")
    assert [record["round"] for record in wild.records] == [0, 1]


@pytest.mark.parametrize("name", ["x", "y", "v"])
def test_divergence_names_the_right_variable(name):
    steps = {"x": 1e-3, "y": 1e-3, "v": 1e-3, name: 1e9}
    wild = run(simfbo(TASK.problem, Steps(**steps)), FEDERATION, TASK.x0, TASK.y0, rounds=1)
    assert wild.end["variable"] == name


class Own:
    """A federation of a user's own, with nothing but what an algorithm needs."""

    def __init__(self):
        self.ledger, self.n = FEDERATION.ledger, FEDERATION.n
        self.cohort, self.aggregate = FEDERATION.cohort, FEDERATION.aggregate
        self.mean_norm = FEDERATION.mean_norm


def test_a_federation_of_ones_own_needs_no_gate():
    assert run(ALGORITHM, Own(), TASK.x0, TASK.y0, rounds=2).end == {"status": "finished"}


@pytest.mark.parametrize(("leaf", "kind"), [(0.5, "float"), (jax.random.key(0), "random key")])
def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path, leaf, kind):
    def init(x, y):
        return ALGORITHM.init(x, y)._replace(projected=leaf)

    with pytest.raises(UserError) as caught:
        run(ALGORITHM._replace(init=init), FEDERATION, TASK.x0, TASK.y0, rounds=1,
            directory=tmp_path / "it")  # fmt: skip
    assert str(caught.value) == (
        f"The state of SimFBO holds a {kind}: keep arrays in it (of a key, its key_data), so that "
        "it can be saved."
    )
    assert not (tmp_path / "it").exists()


def test_an_interrupted_run_records_where_it_stopped():
    def stop(t, record):
        if t == 3:
            raise KeyboardInterrupt

    cut = run(ALGORITHM, FEDERATION, TASK.x0, TASK.y0, rounds=100, every=50, on_round=stop)
    assert cut.end == {"status": "interrupted"}
    assert [record["round"] for record in cut.records] == [0, 3]
