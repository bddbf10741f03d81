"""`--track` on the commands, in TOML, and resumed."""

import csv
import json
from pathlib import Path

import pytest

from simfbo.runs.history import History

RUN = ("run", "quadratic", "--clients", "3", "--rounds", "4", "--every", "1", "--quiet")


def rows(file):
    return list(csv.DictReader(Path(file).read_text().splitlines()))


def matches(file, history):
    return [float(row["x_error"]) for row in rows(file)] == history.column("x_error")


def test_run_and_toml(simfbo):
    assert simfbo(*RUN, "--output", "a", "--track", "csv")[0] == 0
    assert matches("a/metrics.csv", History.load("a"))
    assert "track" not in History.load("a").header["config"]
    Path("run.toml").write_text('track = "csv:all"\nrounds = 2\n[task]\nname = "quadratic"\n')
    assert simfbo("run", "--config", "run.toml", "--output", "b", "--quiet")[0] == 0
    assert matches("all/b.csv", History.load("b"))


@pytest.mark.parametrize("text", ['"mflow"', '["csv", "mflow:x"]'])
def test_an_unknown_tracker(simfbo, text):
    Path("run.toml").write_text(f'track = {text}\n[task]\nname = "quadratic"\n')
    sentence = "Unknown tracker 'mflow'. Use csv, tensorboard, mlflow or wandb"
    code, out, err = simfbo("run", "--config", "run.toml")
    assert (code, out) == (2, "")
    assert sentence in err
    code, out, err = simfbo(*RUN, "--track", "mflow")
    assert (code, out) == (2, "")
    assert sentence in err
    assert not Path("runs").exists()


def test_a_resumed_run_keeps_its_trackers(simfbo):
    assert simfbo(*RUN, "--output", "a", "--track", "csv")[0] == 0
    whole = Path("a/metrics.csv").read_text()
    file = Path("a/history.jsonl")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))  # not ended
    assert simfbo("run", "--resume", "a", "--quiet")[0] == 0
    assert Path("a/metrics.csv").read_text() == whole
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert simfbo("run", "--resume", "a", "--quiet", "--track", "csv:other")[0] == 0
    assert matches("other/a.csv", History.load("a"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_comparison_nests_its_runs(simfbo, in_process):
    mlflow = pytest.importorskip("mlflow")
    given = ("--methods", "simfbo,fednest", "--seeds", "0,1", "--rounds", "2", "--output", "out")
    arguments = (
        "compare",
        "quadratic",
        "--clients",
        "3",
        *given,
        "--track",
        "mlflow:sqlite:///a.db",
    )
    assert simfbo(*arguments)[0] == 0
    client = mlflow.MlflowClient(tracking_uri="sqlite:///a.db")
    found = client.search_runs([client.get_experiment_by_name("simfbo").experiment_id])
    parents = [one for one in found if "mlflow.parentRunId" not in one.data.tags]
    (parent,) = parents
    assert (parent.info.run_name, parent.info.status) == ("out", "FINISHED")
    assert {one.path for one in client.list_artifacts(parent.info.run_id)} == {
        "table.md", "figure.png", "figure.svg", "report.html",
    }  # fmt: skip
    children = {one.info.run_name: one for one in found if one not in parents}
    assert sorted(children) == ["fednest-seed0", "fednest-seed1", "simfbo-seed0", "simfbo-seed1"]
    assert {one.data.tags["mlflow.parentRunId"] for one in children.values()} == {
        parent.info.run_id
    }
    one = children["fednest-seed1"]
    assert one.data.params["algorithm.name"] == "fednest"
    assert one.data.metrics["x_error"] == History.load("out/fednest-seed1").records[-1]["x_error"]


def test_a_search_tracks_its_trials(simfbo, in_process):
    code, _, err = simfbo(
        "tune", "quadratic", "--algorithm", "memfbo", "--clients", "3", "--cohort", "3",
        "--budget", "60", "--trials", "4", "--output", "out", "--quiet", "--track", "csv:all",
    )  # fmt: skip
    assert (code, err) == (0, "")
    names = sorted(path.stem for path in Path("all/out").glob("*.csv"))
    assert names == sorted(
        f"stage{stage}-trial{trial.name[5:]}"
        for stage in (0, 1)
        for trial in Path(f"out/stage{stage}").iterdir()
    )


def test_flower_runs_are_tracked_from_their_history(tmp_path):
    from simfbo.cli._flower_lines import Lines, RunBar
    from simfbo.runs.history import Writer
    from simfbo.runs.trackers import Tracking

    header = {"algorithm": "SimFBO", "seed": 0, "rounds": 2, "every": 1, "config": {"rate": 0.5},
              "versions": {"simfbo": "0"}}  # fmt: skip
    records = [{"round": t, "seconds": 1.0 * t, "loss": 1 / (1 + t)} for t in range(3)]
    writer = Writer(tmp_path)
    writer.write("header", header)
    writer.write("record", records[0])
    with Tracking("csv", tmp_path) as tracking, RunBar() as bar:
        lines = Lines(tmp_path, tracking, bar)
        for line in [{"kind": "app", "digest": "d"}, {"kind": "header", **header},
                     *({"kind": "record", **record} for record in records)]:  # fmt: skip
            lines.show(line)
        lines.show({"kind": "header", **header})  # its server died and was started again
        tracking.finish("finished")
    writer.close()
    assert [float(row["loss"]) for row in rows(tmp_path / "metrics.csv")] == [1, 1 / 2, 1 / 3]
    assert json.loads((tmp_path / "trackers.json").read_text())["track"] == ["csv"]
