"""The runs of an experiment: missing ones are run, and histories are collected."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from simfbo.config.run import checked
from simfbo.errors import UserError
from simfbo.experiments.experiment import Part
from simfbo.runs.files import folder_names, make_folder
from simfbo.runs.history import FILE, History
from simfbo.runs.trackers.tracking import STATE, Tracking
from simfbo.studies.sweep import ENDED, Job, refuse_other_settings, sweep

Groups = dict[str, list[History]]


class Resources(NamedTuple):
    """The resources for an experiment.

    Attributes:
        workers: parallel runs.
        data_dir: folder of the data sets.
        tune: search step sizes again.
        on_progress: called with the completed and the total amount.
        tracking: the trackers of the reproduction.
    """

    workers: int = 1
    data_dir: Path | None = None
    tune: bool = False
    on_progress: Callable[[int, int], None] | None = None
    tracking: Tracking | None = None


def run_part(part: Part, folder: Path, resources: Resources) -> Groups:
    """Run the jobs that are missing in `results/`, and return the histories of a part by method.

    A completed run moves from runs/ to results/METHOD-seedS.jsonl; an interrupted one continues
    from its last checkpoint.
    """
    make_folder(folder / "results")
    jobs = missing(part, folder)
    if jobs:
        sweep(jobs, *resources[:2], resources.on_progress, resources.tracking)
    for job in jobs:
        (job.directory / FILE).replace(_result(job, folder))
        put_away(job.directory, folder)
    return {name: loaded(part, name, folder) for name in part.methods}


def put_away(directory: Path, folder: Path) -> None:
    """Remove a run's folder; files of trackers move to tracked/."""
    for file in directory.rglob("checkpoint-*.npz"):
        file.unlink()
    if any(directory.rglob(STATE)):
        make_folder(folder / "tracked")
        target = folder / "tracked" / directory.name
        shutil.rmtree(target, ignore_errors=True)  # from an earlier run
        directory.replace(target)
    else:
        shutil.rmtree(directory)


def missing(part: Part, folder: Path) -> list[Job]:
    """Return the runs missing in `results/`; raise if there are runs with other settings."""
    jobs = [job for job in _jobs(part, folder) if not _is_kept(job, folder)]
    refuse_other_settings(jobs)
    return jobs


def loaded(part: Part, name: str, folder: Path) -> list[History]:
    """Load the histories of a method."""
    return [History.load(place(folder, part, name, seed)) for seed in part.seeds]


def _jobs(part: Part, folder: Path) -> list[Job]:
    """Return all runs of a part, grouped by seed."""
    return [
        Job(
            method.config.model_copy(update={"seed": seed}),
            folder / "runs" / place(folder, part, name, seed).stem,
        )
        for seed in part.seeds
        for name, method in part.methods.items()
    ]


def place(folder: Path, part: Part, name: str, seed: int) -> Path:
    """Return the path of a run's history."""
    (folder_name,) = folder_names([f"{part.name}-{name}" if part.name else name])
    return folder / "results" / f"{folder_name}-seed{seed}.jsonl"


def _result(job: Job, folder: Path) -> Path:
    return folder / "results" / f"{job.directory.name}.jsonl"


def _is_kept(job: Job, folder: Path) -> bool:
    """Check whether results/ holds a run; raise if it holds another one, or an incomplete one."""
    path = _result(job, folder)
    if not path.exists():
        return False
    history = History.load(path)
    # Settings added since the history was written have their defaults.
    if "config" not in history.header or checked(history.header["config"], {}) != job.config:
        raise UserError(f"{path} holds a run with other settings: choose another output folder.")
    if not history.records or (history.end or {}).get("status") not in ENDED:
        raise UserError(f"{path} is incomplete: delete it to run it again.")
    shutil.rmtree(job.directory, ignore_errors=True)  # left by a crash
    return True
