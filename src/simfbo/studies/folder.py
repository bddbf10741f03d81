"""What a study was asked to do, kept in its folder so that it can be resumed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from simfbo.config.run import RunConfig
from simfbo.errors import UserError
from simfbo.runs.files import Json, make_folder, write_atomic

STUDY = "study.json"
_NEEDED = {
    "compare": ("methods", "seeds", "targets", "metric"),
    "tune": ("config", "space", "budget", "trials", "metric"),
    "reproduce": ("names", "quick", "tune"),
}


def save_comparison(
    directory: Path,
    methods: Mapping[str, RunConfig],
    seeds: Sequence[int],
    targets: Sequence[float],
    metric: str | None,
) -> None:
    """Record a comparison in its folder."""
    plans = {name: config.model_dump(mode="json") for name, config in methods.items()}
    wanted = {"methods": plans, "seeds": list(seeds), "targets": list(targets), "metric": metric}
    save(directory, "compare", wanted)


def save_search(
    directory: Path,
    config: RunConfig,
    space: Mapping[str, tuple[float, float]] | None,
    budget: int,
    trials: int,
    metric: str | None,
) -> None:
    """Record a search for step sizes in its folder; raise if another one is there."""
    own = {
        "config": config.model_dump(mode="json"),
        "space": None if space is None else dict(space),
        "budget": budget,
        "trials": trials,
    }
    if (directory / STUDY).exists():
        begun = load(directory, "tune")
        if any(begun[key] != value for key, value in json.loads(json.dumps(own)).items()):
            raise UserError(
                f"{directory} holds a search with other settings: choose another folder."
            )
    save(directory, "tune", {**own, "metric": metric})


def save(directory: Path, study: str, wanted: Json) -> None:
    """Record in a folder what a study was asked to do."""
    make_folder(directory)
    write_atomic(directory / STUDY, json.dumps({"study": study, **wanted}, indent=1))


def load(directory: Path, study: str) -> Json:
    """Return what a study was asked to do."""
    try:
        found = json.loads((directory / STUDY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    needed = {"study", *_NEEDED[study]}
    if not isinstance(found, dict) or found.get("study") != study or not needed <= set(found):
        raise UserError(f"{directory} was not written by `simfbo {study}`: give another folder.")
    return found
