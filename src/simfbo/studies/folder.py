"""The settings of a study, saved in its folder so that it can be resumed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from simfbo.config.fields import Strict
from simfbo.config.run import RunConfig
from simfbo.errors import UserError
from simfbo.runs.files import Json, make_folder, require_no_way_out, write_atomic

STUDY = "study.json"


class _Comparison(Strict):
    study: Literal["compare"]
    methods: dict[str, Json] = Field(min_length=1)
    seeds: list[int]
    targets: list[FiniteFloat]
    metric: str | None


class _Search(Strict):
    study: Literal["tune"]
    config: Json
    space: dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] | None
    budget: int
    budget_bytes: int | None = None
    trials: Annotated[int, Field(le=1_000_000)]
    metric: str | None


class _Reproduction(Strict):
    study: Literal["reproduce"]
    names: list[str] = Field(min_length=1)
    quick: bool
    tune: bool


_FORMS = {"compare": _Comparison, "tune": _Search, "reproduce": _Reproduction}


def save_comparison(
    directory: Path,
    methods: Mapping[str, RunConfig],
    seeds: Sequence[int],
    targets: Sequence[float],
    metric: str | None,
) -> None:
    """Record a comparison in its folder."""
    plans = {name: config.model_dump(mode="json") for name, config in methods.items()}
    settings = {"methods": plans, "seeds": list(seeds), "targets": list(targets), "metric": metric}
    save(directory, "compare", settings)


def save_search(
    directory: Path,
    config: RunConfig,
    space: Mapping[str, tuple[float, float]] | None,
    budget: int,
    trials: int,
    metric: str | None,
    budget_bytes: int | None = None,
) -> None:
    """Record a search for step sizes in its folder; raise if it holds another one."""
    settings = {
        "config": config.model_dump(mode="json"),
        "space": None if space is None else dict(space),
        "budget": budget,
        "budget_bytes": budget_bytes,
        "trials": trials,
    }
    if (directory / STUDY).exists():
        recorded = load(directory, "tune")
        if any(recorded[key] != value for key, value in json.loads(json.dumps(settings)).items()):
            raise UserError(
                f"{directory} holds a search with other settings: choose another folder."
            )
    save(directory, "tune", {**settings, "metric": metric})


def save(directory: Path, study: str, settings: Json) -> None:
    """Record the settings of a study in its folder, creating it."""
    make_folder(directory)
    require_no_way_out(directory)
    write_atomic(directory / STUDY, json.dumps({"study": study, **settings}, indent=1))


def load(directory: Path, study: str) -> Json:
    """Read the settings of a study; the file is not trusted."""
    try:
        settings = json.loads((directory / STUDY).read_text(encoding="utf-8"))
        return _FORMS[study].model_validate(settings).model_dump()
    except (OSError, ValueError, RecursionError):
        raise UserError(
            f"{directory} was not written by `simfbo {study}`: give another folder."
        ) from None
