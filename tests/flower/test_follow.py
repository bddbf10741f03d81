"""Runs on a federation: settings, and following them to their end, without starting Flower."""

import json
import re
import time
import tomllib

import pytest

from simfbo import UserError
from simfbo.cli.main import main
from simfbo.flower.ops import follow, supervisor
from simfbo.flower.ops.folder import Layout, Setup


def setup(**changes):
    usual = {"address": "127.0.0.1:9300", "nodes": [1, 2], "parts": 2, "base_port": 9300}
    return Setup(**usual | changes)


def said(capsys, *words):
    """Return the exit code and the error of a command."""
    code = main(["flower", *map(str, words)])
    return code, capsys.readouterr().err


@pytest.fixture
def federation(tmp_path, monkeypatch):
    """Return the folder of a federation that seems to be running, and of an app."""
    folder, app = tmp_path / "federation \N{SUNFLOWER}", tmp_path / "app"
    folder.mkdir()
    Layout(folder).setup.write_text(setup().model_dump_json())
    app.mkdir()
    config = '[tool.flwr.app.config]\nrounds = 3\nname = ""\nfolder = ""\n'
    (app / "pyproject.toml").write_text(config)
    monkeypatch.setattr(supervisor, "running", lambda layout: {"processes": {}})
    return folder, app


def test_a_growing_history_is_read_line_by_line(tmp_path):
    run = follow.Run(Layout(tmp_path), tmp_path, tmp_path)
    reader = follow.HistoryReader(run.history)
    assert reader.new_lines() == []
    run.history.write_text('{"kind": "header", "rounds": 3}\n{"kind": "rec')
    assert [line["kind"] for line in reader.new_lines()] == ["header"]
    with open(run.history, "a") as out:
        out.write('ord", "round": 0}\n{"kind": "end", "status": "finished"}\n')
    assert [line["kind"] for line in reader.new_lines()] == ["record", "end"]
    assert run.end == {"kind": "end", "status": "finished"}
    assert follow.HistoryReader(run.history).header == {"kind": "header", "rounds": 3}
    run.history.write_text('{"kind": "header", "rounds": 3}\n')  # resumed: cut, and longer again
    assert reader.new_lines() == []
    lines = '{"kind": "header", "rounds": 3}\n' + '{"kind": "record", "round": 1}\n' * 9
    run.history.write_text(lines)
    assert all(line["kind"] == "record" for line in reader.new_lines())
    assert run.end is None


@pytest.mark.parametrize("text", ["", "[tool]\n", "[tool.flwr.app.config]\nrounds = 3\n"])
def test_an_app_must_be_one(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match=r"is not a Flower app|must have folder"):
        follow.read_config(tmp_path)


@pytest.mark.parametrize(
    ("texts", "settings"),
    [
        ({"rounds": "7", "rate": "1", "name": "it's", "fast": "true"},
         {"rounds": 7, "rate": 1.0, "name": "it's", "fast": True}),
        ({"name": '"a b"', "rate": "1e-3"}, {"name": "a b", "rate": 1e-3}),
        ({"name": "3"}, {"name": "3"}),
        ({"round": "7"}, "Unknown setting 'round'. The app has fast, name, rate, rounds."),
        ({"folder": "x"}, "Unknown setting 'folder'."),
        ({"rounds": "many"}, "Setting 'rounds' must be a value like 3, got 'many'."),
        ({"rounds": "1.5"}, "Setting 'rounds' must be a value like 3, got '1.5'."),
        ({"fast": "1"}, "Setting 'fast' must be a value like False, got '1'."),
    ],
)  # fmt: skip
def test_settings_of_a_run(texts, settings):
    config = {"rounds": 3, "rate": 0.5, "name": "n", "fast": False, "folder": ""}
    if isinstance(settings, str):
        with pytest.raises(UserError, match=re.escape(settings)):
            follow.changed_settings(texts, config)
    else:
        assert follow.changed_settings(texts, config) == settings


def test_a_resumed_run_has_the_settings_it_was_started_with(tmp_path):
    header = {"kind": "header", "config": {"rounds": 9, "gone": 1}}
    (tmp_path / "history.jsonl").write_text(json.dumps(header) + "\n")
    config = {"rounds": 3, "rate": 0.5, "folder": ""}
    found = follow.changed_settings({"rate": "2"}, config, tmp_path / "history.jsonl")
    assert found == {"rounds": 9, "rate": 2.0}


def test_settings_keep_any_path_and_text(federation):
    folder, app = federation
    run = follow.prepare(folder, app, {"name": '\N{SUNFLOWER} "1"'}, folder / "run")
    found = tomllib.loads(run.settings.read_text())
    assert found == {"name": '\N{SUNFLOWER} "1"', "folder": str(folder / "run")}


def test_a_run_is_followed_to_its_end(federation, capsys, monkeypatch):
    """The server dies once; the run is resumed, and every line of its history is shown."""
    folder, app = federation
    ends = [None, {"kind": "end", "status": "finished"}]
    lines = [
        {"kind": "header", "rounds": 3},
        {"kind": "record", "round": 1, "loss": 0.25, "seconds": 9.0},
        {"kind": "refusal", "round": 2, "client": 4, "reason": "timed-out", "text": "is late"},
    ]

    def one_attempt(run, watch):
        for line in lines:
            watch(line)
        return ends.pop(0)

    monkeypatch.setattr(follow, "_follow", one_attempt)
    words = ["run", "--folder", str(folder), str(app), "--output", str(folder / "run")]
    assert main(["flower", *words]) == 0
    out = capsys.readouterr().out
    assert "The server's process died. Resuming from the last checkpoint." in out
    assert out.count("iteration 2: client 4 is late") == 2
    assert "loss 0.25" in out
    assert "9" not in out.partition("loss")[2].partition("\n")[0]  # seconds are not a metric
    assert f"Finished. History and checkpoints are in {folder / 'run'}" in out
    ends[:] = [None, {"kind": "end", "status": "diverged", "reason": "x is not finite"}]
    assert main(["flower", *words, "--retries", "0"]) == 1
    assert main(["flower", *words, "--retries", "0"]) == 1
    out = capsys.readouterr().out
    assert f"The run was cut off. Resume it with --resume {folder / 'run'}." in out
    assert "The run ended as diverged: x is not finite. Resume it" in out


def test_an_interrupted_run_says_how_to_resume(federation, capsys, monkeypatch):
    folder, app = federation

    def interrupted(run, watch):
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "_follow", interrupted)
    words = ["run", "--folder", str(folder), str(app), "--output", str(folder / "run")]
    assert main(["flower", *words]) == 130
    wanted = f"interrupted. Resume with: simfbo flower run {app} --resume {folder / 'run'}"
    assert wanted in capsys.readouterr().err


def test_runs_are_started_where_the_superlink_is(tmp_path, capsys):
    Layout(tmp_path).setup.write_text(setup(link=False).model_dump_json())
    code, text = said(capsys, "run", "--folder", tmp_path, tmp_path)
    assert code == 2
    assert "The SuperLink runs on another machine: start runs there." in text


def test_the_log_of_a_run_is_kept_and_its_last_error_found(tmp_path, monkeypatch):
    def parts(layout, number):
        yield "round 1\nValueError: first\n"
        yield "simfbo.errors.User"
        yield "Error: client 3 is gone.\nround 2\n"
        raise UserError("The SuperLink does not respond.")

    monkeypatch.setattr(follow.control_api, "stream_log", parts)
    run = follow.Run(Layout(tmp_path), tmp_path, tmp_path)
    log = follow._Log(run, "7")
    while not log.done:
        time.sleep(0.01)
    assert log.reason == "client 3 is gone"
    assert run.log.read_text().splitlines()[-1] == "round 2"
