"""Sweeps: what is kept, what is run, and what jobs share; workers are in cli/test_workers.py."""

import json

import pytest

from simfbo.config import build_task
from simfbo.config.run import load
from simfbo.errors import UserError
from simfbo.runs.history import FILE, History
from simfbo.studies import sweep
from simfbo.studies.sweep import Job

BASE = {"task.name": "quadratic", "task.clients": 2, "rounds": 4, "every": 2}


def job(folder, **settings):
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return Job(load(None, BASE | named), folder)


def test_what_has_ended_is_kept_and_the_rest_is_run(tmp_path, in_process):
    jobs = [job(tmp_path / "a"), job(tmp_path / "b", seed=1)]
    reports = []
    first = sweep.sweep(jobs, on_progress=lambda *now: reports.append(now))
    assert [history.header["seed"] for history in first] == [0, 1]
    assert reports == [(4, 8), (8, 8), (8, 8)]
    file = tmp_path / "b" / FILE
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))  # killed just before its end
    kept = (tmp_path / "a" / FILE).stat().st_mtime_ns
    again = sweep.sweep(jobs)
    assert (tmp_path / "a" / FILE).stat().st_mtime_ns == kept
    assert [h.column("x_error") for h in again] == [h.column("x_error") for h in first]


def test_progress_of_runs_that_have_not_ended(tmp_path, in_process):
    jobs = [job(tmp_path / "a"), job(tmp_path / "b", seed=1), job(tmp_path / "c", seed=2)]
    sweep.sweep(jobs[:2])
    file = tmp_path / "b" / FILE
    lines = file.read_text().splitlines(keepends=True)
    assert [json.loads(line)["kind"] for line in lines[-3:]] == ["record", "verdict", "end"]
    file.write_text("".join(lines[:-3]))
    reports = []
    sweep._report(jobs, lambda *now: reports.append(now))
    assert reports == [(4 + 2 + 0, 12)]


def test_a_run_with_other_settings_is_left_alone(tmp_path, in_process):
    sweep.sweep([job(tmp_path / "a")])
    for call in (sweep.refuse_other_settings, sweep.sweep):
        with pytest.raises(UserError, match=r"a holds a run with other settings: choose another"):
            call([job(tmp_path / "a", rounds=5)])
    assert History.load(tmp_path / "a").records[-1]["round"] == 4


def test_jobs_of_a_seed_share_their_task(tmp_path, monkeypatch):
    built = []
    real = build_task.build_task

    def counted(config, data_dir):
        built.append((config.task.clients, config.seed))
        return real(config, data_dir)

    monkeypatch.setattr(build_task, "build_task", counted)
    monkeypatch.setattr(sweep, "_CACHE", {})
    jobs = [
        job(tmp_path / "a"), job(tmp_path / "b", algorithm__name="shrofbo"),
        job(tmp_path / "c", seed=1), job(tmp_path / "d", seed=1, task__clients=3),
    ]  # fmt: skip
    for one in jobs:
        sweep.run_job(one)
    assert built == [(2, 0), (2, 1), (3, 1)]
