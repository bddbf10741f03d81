"""The runs of an experiment: those that are missing are run, their histories kept side by side."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from simfbo.config.run import RunConfig, checked
from simfbo.errors import UserError
from simfbo.experiments.experiment import Part
from simfbo.runs.files import folder_names, make_folder
from simfbo.runs.history import FILE, History
from simfbo.runs.trackers.tracking import STATE, Tracking
from simfbo.studies.sweep import ENDED, Job, refuse_other_settings, sweep

Groups = dict[str, list[History]]


class Resources(NamedTuple):
    """With what an experiment is run.

    Attributes:
        workers: runs side by side.
        data_dir: folder of the data sets.
        tune: whether step sizes are searched anew.
        on_progress: called with what is done and what there is to do.
        tracking: the trackers of the reproduction.
    """

    workers: int = 1
    data_dir: Path | None = None
    tune: bool = False
    on_progress: Callable[[int, int], None] | None = None
    tracking: Tracking | None = None


def run_part(part: Part, folder: Path, resources: Resources) -> Groups:
    """Run what `results/` does not hold yet, and return the histories of a part by method.

    A run that has ended moves from runs/ to results/METHOD-seedS.jsonl; one that was interrupted
    continues from its last checkpoint.
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
    """Remove a run's folder; what trackers wrote into it moves to tracked/."""
    for file in directory.rglob("checkpoint-*.npz"):
        file.unlink()
    if any(directory.rglob(STATE)):
        make_folder(folder / "tracked")
        kept = folder / "tracked" / directory.name
        shutil.rmtree(kept, ignore_errors=True)  # of an earlier run of the same
        directory.replace(kept)
    else:
        shutil.rmtree(directory)


def missing(part: Part, folder: Path) -> list[Job]:
    """Return the runs that `results/` does not hold; raise where runs with other settings are."""
    jobs = [job for job in _jobs(part, folder) if not _is_kept(job, folder)]
    refuse_other_settings(jobs)
    return jobs


def loaded(part: Part, name: str, folder: Path) -> list[History]:
    """Return the kept histories of a method."""
    return [History.load(place(folder, part, name, seed)) for seed in part.seeds]


def _jobs(part: Part, folder: Path) -> list[Job]:
    """Return all runs of a part, all methods of a seed together."""
    return [
        Job(
            method.config.model_copy(update={"seed": seed}),
            folder / "runs" / place(folder, part, name, seed).stem,
        )
        for seed in part.seeds
        for name, method in part.methods.items()
    ]


def place(folder: Path, part: Part, name: str, seed: int) -> Path:
    """Return where the history of a run is kept."""
    (named,) = folder_names([f"{part.name}-{name}" if part.name else name])
    return folder / "results" / f"{named}-seed{seed}.jsonl"


def _result(job: Job, folder: Path) -> Path:
    return folder / "results" / f"{job.directory.name}.jsonl"


def _is_kept(job: Job, folder: Path) -> bool:
    """Return whether a run is in results/; raise if it is another one, or incomplete."""
    path = _result(job, folder)
    if not path.exists():
        return False
    history = History.load(path)
    if "config" not in history.header or _normal(history) != job.config:
        raise UserError(f"{path} holds a run with other settings: choose another output folder.")
    if not history.records or (history.end or {}).get("status") not in ENDED:
        raise UserError(f"{path} is incomplete: delete it to run it again.")
    shutil.rmtree(job.directory, ignore_errors=True)  # what a crash left behind
    return True


def _normal(history: History) -> RunConfig:
    """Return a history's settings, those added since it was written at their defaults."""
    return checked(history.header["config"], {})
