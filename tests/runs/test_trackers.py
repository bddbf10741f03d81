"""Trackers against the real packages, and the laws that all of them obey."""

import csv
import json
import math
import struct
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from simfbo import Point, SimulatedFederation, run
from simfbo.algorithms import simfbo
from simfbo.errors import MissingExtra, UserError
from simfbo.runs.trackers import CSV, MLflow, TensorBoard, Tracking, WandB
from simfbo.runs.trackers.tracking import Study, tracker, used_before
from simfbo.tasks import quadratic

HEADER = {
    "algorithm": "simfbo",
    "rounds": 6,
    "every": 1,
    "seed": 3,
    "config": {"task": {"name": "quadratic", "clients": 4}, "radius": None, "on": True},
    "versions": {"simfbo": "0"},
}
KILLED = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # nobody closes it
HOSTILE = "<b>$loss$ 1/2"
RECORDS = [
    {"round": t, "seconds": t / 8, "bytes_up": 40 * t, "test_loss": 1 / (1 + t), HOSTILE: -t}
    for t in range(7)
]


@dataclass(frozen=True)
class Remembering:
    """Keeps what it is given, as a server elsewhere would."""

    store: dict = field(default_factory=dict, repr=False)
    fails_in: str = ""
    name = "remembering"

    def begin(self, run):
        number = run.id or f"run{len(self.store)}"
        one = self.store.setdefault(number, Remembered(number, self.fails_in))
        one.begun.append(run)
        one.call("begin")
        return one


class Remembered:
    def __init__(self, number, fails_in):
        self.id, self.fails_in = number, fails_in
        self.begun, self.records, self.files, self.status = [], [], [], None

    def call(self, name):
        if name == self.fails_in:
            raise ConnectionError("no\nserver")

    def record(self, round, values):
        self.call("record")
        self.records.append((round, dict(values)))

    def artefact(self, file):
        self.call("artefact")
        self.files.append(file.name)

    def end(self, status):
        self.call("end")
        self.status = status


TASK = quadratic(clients=2, dim_x=1, dim_y=1, samples=2)
METHOD = simfbo(TASK.problem, Point(x=0.05, y=0.1, v=0.1))


def go(track, **more):
    federation = SimulatedFederation(TASK.data)
    given = {"rounds": 6, "evaluate": TASK.evaluate, "track": track, **more}
    return run(METHOD, federation, TASK.x0, TASK.y0, **given)


def test_a_run_is_tracked_as_its_history_has_it(tmp_path):
    found = Remembering()
    history = go(found, directory=tmp_path / "mine", config={"a": {"b": 1}}, seed=5)
    (one,) = found.store.values()
    (begun,) = one.begun
    assert (begun.name, begun.config, begun.id, begun.last) == ("mine", {"a.b": 1}, None, -1)
    assert (begun.tags["algorithm"], begun.tags["seed"]) == ("SimFBO", "5")
    assert [t for t, _ in one.records] == history.column("round") == list(range(7))
    for (_, values), record in zip(one.records, history.records, strict=True):
        assert values == {key: value for key, value in record.items() if key != "round"}
    assert one.status == "finished"


class Stop(BaseException):
    """What a kill looks like from within."""


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e9])
def test_a_resumed_run_goes_on_in_the_same_place(tmp_path, checkpoint_seconds):
    """Every round arrives; those after the last checkpoint may arrive twice, with equal values."""
    found = Remembering()

    def stop(t, record):
        if t == 4:
            raise Stop

    where = {"directory": tmp_path, "checkpoint_seconds": checkpoint_seconds}
    with pytest.raises(Stop):
        go(found, on_round=stop, **where)
    history = go(found, resume=True, **where)
    (one,) = found.store.values()
    assert [begun.id for begun in one.begun] == [None, "run0"]
    by_round = {}
    for t, values in one.records:
        by_round.setdefault(t, []).append(values["x_error"])
    assert {t: set(values) for t, values in by_round.items()} == {
        record["round"]: {record["x_error"]} for record in history.records
    }
    assert one.status == "finished"


def test_a_tracker_that_is_added_later_gets_all_records(tmp_path):
    go(None, directory=tmp_path, rounds=6, until=lambda records: len(records) > 3)
    assert not (tmp_path / "trackers.json").exists()
    one = Tracking(late := Remembering(), tmp_path)
    one.begin_run(HEADER, RECORDS[:4])
    one.record(RECORDS[3])
    one.record(RECORDS[4])
    assert [t for t, _ in late.store["run0"].records] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("where", ["begin", "record", "end"])
def test_a_failing_tracker_costs_one_warning(where):
    good, bad = Remembering(), Remembering(fails_in=where)
    with pytest.warns(UserWarning, match="remembering failed .*no server.*the run goes on") as seen:
        history = go([bad, good])
    assert len(seen) == 1
    assert history.end == {"status": "finished"}
    assert len(next(iter(good.store.values())).records) == 7


def test_files_are_tracked_before_the_end(tmp_path):
    found = Remembering()
    (tmp_path / "table.md").write_text("x")
    with Tracking(found, tmp_path) as tracking:
        go(tracking, directory=tmp_path)
        assert found.store["run0"].status is None
        tracking.artefact(tmp_path / "table.md", tmp_path / "missing.png")
    assert (found.store["run0"].files, found.store["run0"].status) == (["table.md"], "finished")


def test_what_fails_or_is_interrupted_ends_so():
    found = Remembering()

    def fail_with(error):
        with Tracking(found) as tracking:
            tracking.begin_run(HEADER)
            raise error

    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error):
            fail_with(error)
    assert [one.status for one in found.store.values()] == ["failed", "interrupted"]


def test_texts():
    assert tracker("csv:here") == CSV("here")
    assert tracker("mlflow:sqlite:///all.db") == MLflow("sqlite:///all.db")
    assert tracker("wandb") == WandB()
    assert tracker("tensorboard") == TensorBoard()
    with pytest.raises(UserError, match=r"^Unknown tracker 'mflow'"):
        tracker("mflow")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_PASSWORD"):
        tracker("mlflow:https://token@example.org")
    with pytest.raises(UserError, match="needs a folder"):
        go("csv")


def test_a_missing_package_is_named_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("simfbo.runs.trackers._tracker.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'simfbo\[mlflow\]'"):
        go("mlflow", directory=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_state_begins_anew(tmp_path):
    for text in ("", "[]", '{"begun": 3}', '{"begun": {"a": 1}}', '{"begun": {"a": [1]}}'):
        (tmp_path / "trackers.json").write_text(text)
        assert used_before(tmp_path) == []
        Tracking(Remembering(), tmp_path).begin_run(HEADER)


def walk(track, folder, study=None, kill=lambda: None):
    """Track a run that is killed after round 4, of which round 2 was saved, and resumed."""
    first = Tracking(track, folder, study)
    first.begin_run(HEADER)
    for record in RECORDS[:3]:
        first.record(record)
    first.save()
    for record in RECORDS[3:5]:
        first.record(record)
    kill()
    with Tracking(track, folder, study) as second:
        second.begin_run(HEADER, RECORDS[:3])
        for record in RECORDS[3:]:
            second.record(record)
        (folder / "table.md").write_text("| a |")
        second.artefact(folder / "table.md")
        second.finish("finished")
    assert used_before(folder) == [track]


def test_csv(tmp_path):
    walk("csv", tmp_path)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [{key: float(row[key]) for key in row} for row in rows] == RECORDS


def test_csv_with_columns_that_come_later(tmp_path):
    one = CSV(str(tmp_path)).begin(_begun("a/b"))
    one.record(0, {"loss": 2.0})
    one.record(1, {"loss": 1.0, "epsilon": math.inf})
    one.record(2, {"loss": 0.5})
    assert (tmp_path / "a-b.csv").read_text() == "round,loss,epsilon\n0,2.0,\n1,1.0,inf\n2,0.5,\n"


def test_runs_of_one_name_do_not_share_a_file(tmp_path):
    for _ in range(2):
        go(f"csv:{tmp_path}")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "SimFBO-seed0-2.csv", "SimFBO-seed0.csv",
    ]  # fmt: skip


@KILLED
@pytest.mark.parametrize("track", ["csv", "tensorboard"])
def test_a_run_can_be_resumed_from_elsewhere_and_moved(tmp_path, monkeypatch, track):
    pytest.importorskip("tensorboardX")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    first = Tracking(track, "runs/a")
    first.begin_run(HEADER)
    first.record(RECORDS[0])
    first.save()
    Path("runs").rename("moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Tracking(track, "../moved/a") as second:
        second.begin_run(HEADER, RECORDS[:1])
        second.record(RECORDS[1])
    assert not list(Path().iterdir())
    if track == "csv":
        assert (tmp_path / "moved" / "a" / "metrics.csv").read_text().count("\n") == 3


def test_what_is_no_tracker_and_a_second_run():
    with pytest.raises(UserError, match="got 5"):
        go(5)
    tracking = Tracking(found := Remembering())
    with tracking:
        go(tracking)
        with pytest.raises(UserError, match="use another one for each run"):
            go(tracking)
    assert next(iter(found.store.values())).status == "finished"
    twins = Remembering(), Remembering()
    go(twins)
    assert [len(one.store) for one in twins] == [1, 1]


def test_a_record_that_resuming_drops_is_not_tracked(tmp_path):
    found = Remembering()

    def stop(t, record):
        if t == 8:
            raise KeyboardInterrupt

    where = {"directory": tmp_path, "rounds": 20, "every": 5}
    assert go(found, on_round=stop, **where).records[-1]["round"] == 8
    history = go(found, resume=True, **where)
    assert [t for t, _ in found.store["run0"].records] == history.column("round")


def _begun(name):
    from simfbo.runs.trackers import TrackedRun

    return TrackedRun(name, {}, {})


def events(folder):
    """Return the events in TensorBoard's files, oldest first."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.glob("events*")):  # named by the time of their start
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length


@KILLED
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")

    def kill():
        """What was recorded is on disk: nothing of a killed process writes it later."""
        steps = {event.step for event in events(tmp_path) if event.summary.value}
        assert steps == {0, 1, 2, 3, 4}

    walk("tensorboard", tmp_path, kill=kill)
    found, purged = {}, False
    for event in events(tmp_path):
        if event.session_log.status == 1:  # START: what came later is dropped
            purged = True
            found = {key: value for key, value in found.items() if key[1] < event.step}
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                assert (value.tag, event.step) not in found
                found[value.tag, event.step] = value.simple_value
    assert purged
    losses = [found["metrics/test_loss", t] for t in range(7)]
    assert losses == pytest.approx([record["test_loss"] for record in RECORDS])
    found = events(tmp_path)
    tags = {value.tag for event in found for value in event.summary.value}
    assert {"_hparams_/experiment", "settings/text_summary", "table.md/text_summary"} <= tags


def mlflow_client(store):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path}/all.db"
    client = mlflow_client(store)
    study = Tracking(f"mlflow:{store}", tmp_path)
    with study:
        study.begin("three of them", {"seeds": "0, 1"}, {"study": "compare"})
        folder = tmp_path / "fednest-seed3"
        folder.mkdir()
        walk(f"mlflow:{store}", folder, study.nested.study)
        study.finish("finished")
    found = client.search_runs([client.get_experiment_by_name("simfbo").experiment_id])
    child, parent = sorted(found, key=lambda one: "mlflow.parentRunId" not in one.data.tags)
    assert (parent.info.run_name, parent.info.status) == ("three of them", "FINISHED")
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (child.info.run_name, child.info.status) == ("fednest-seed3", "FINISHED")
    assert child.data.params["task.name"] == "quadratic"
    assert child.data.tags["seed"] == "3"
    for name, key in (("test_loss", "test_loss"), (HOSTILE, "_b__loss_ 1/2")):
        steps = client.get_metric_history(child.info.run_id, key)
        assert [(one.step, one.value) for one in steps] == [
            (record["round"], record[name]) for record in RECORDS
        ]
    assert [one.path for one in client.list_artifacts(child.info.run_id)] == ["table.md"]


def wandb_records(file):
    """Return the records of an offline run: protocol buffers in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a header does not cross blocks
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<xxxxHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield Record.FromString(part)
            part = b""


@pytest.mark.slow
def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    study = Study("compare-quadratic", tmp_path, {})

    def kill():
        wandb.teardown()
        time.sleep(1.1)  # its folders are named by the second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        walk("wandb:mine", tmp_path, study, kill)
        wandb.teardown()  # until then its process may not have written everything
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime_ns)
    records = [record for file in files for record in wandb_records(file)]
    begun = [record.run for record in records if record.HasField("run")]
    assert {(one.project, one.run_group) for one in begun} == {("mine", "compare-quadratic")}
    assert len({one.run_id for one in begun}) == 1
    losses = {}
    for record in records:
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "test_loss" in items:
            losses.setdefault(int(items["_step"]), set()).add(json.loads(items["test_loss"]))
    assert losses == {record["round"]: {record["test_loss"]} for record in RECORDS}
    assert list(Path(tmp_path).glob("wandb/offline-run-*/files/table.md"))
