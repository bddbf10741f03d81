"""What `simfbo compare` and `simfbo tune` do, once their arguments are checked."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from simfbo.cli.commands import OUT, fresh, progress_bar
from simfbo.config.run import RunConfig, as_toml, checked
from simfbo.errors import UserError
from simfbo.runs import report
from simfbo.runs.checkpoint import put
from simfbo.runs.history import make_folder
from simfbo.studies import comparison
from simfbo.studies import figures as bands
from simfbo.studies.sweep import refuse_other_settings, sweep

STUDY = "study.json"
_NEEDED = {
    "compare": ("methods", "seeds", "targets", "metric"),
    "tune": ("config", "space", "budget", "trials", "metric"),
    "reproduce": ("names", "quick", "tune"),
}


def compare(
    methods: Mapping[str, RunConfig],
    seeds: Sequence[int],
    targets: Sequence[float],
    options: argparse.Namespace,
) -> int:
    """Run all methods with all seeds; write and print table and figures."""
    directory = options.output or fresh("compare", next(iter(methods.values())))
    make_folder(directory)
    plans = {name: config.model_dump(mode="json") for name, config in methods.items()}
    asked = {"methods": plans, "seeds": list(seeds), "targets": list(targets)}
    jobs = comparison.jobs(methods, seeds, directory)
    refuse_other_settings(jobs)
    write_down(directory, {"study": "compare", **asked, "metric": options.metric})
    OUT.print(f"{len(methods)} methods x {len(seeds)} seeds into {directory}", markup=False)
    with progress_bar(options.quiet) as progress:
        bar = progress.add_task(f"{len(jobs)} runs, iterations", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        try:
            histories = sweep(jobs, workers(options), options.data_dir, show)
        except KeyboardInterrupt:
            raise interrupted(directory, "compare") from None
    groups = {name: histories[i :: len(methods)] for i, name in enumerate(methods)}
    metric = options.metric or report.metrics(histories[0])[0]
    for history in histories:
        history.column(metric)  # a metric that is not there is refused here
    rows = comparison.rows(groups, metric, targets)
    bands.save(groups, metric, rows, directory)
    print_table(rows, f"{metric.replace('_', ' ')}, mean ± standard deviation over seeds")
    OUT.print(f"Table, figures and page are in {directory}", markup=False)
    return 0


def tune(config: RunConfig, space: Mapping[str, Any] | None, options: argparse.Namespace) -> int:
    """Find step sizes; print the winner as TOML."""
    from simfbo.studies import tuning

    directory = options.output or fresh("tune", config, config.algorithm.name)
    make_folder(directory)
    asked = {name: getattr(options, name) for name in ("budget", "trials", "metric")}
    own = {
        "config": config.model_dump(mode="json"),
        "space": None if space is None else dict(space),
    }
    _require_same(directory, {**own, "budget": options.budget, "trials": options.trials})
    write_down(directory, {"study": "tune", **own, **asked})
    OUT.print(f"{options.trials} trials into {directory}", markup=False)
    with progress_bar(options.quiet) as progress:
        bar = progress.add_task("", total=None)

        def show(stage: int, stages: int, done: int, total: int) -> None:
            text = f"stage {stage + 1} of {stages}, iterations"
            progress.update(bar, description=text, completed=done, total=total)

        try:
            tuned = tuning.tune(
                config, directory, budget=options.budget, trials=options.trials, space=space,
                metric=options.metric, workers=workers(options), data_dir=options.data_dir,
                on_progress=show,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise interrupted(directory, "tune") from None
    print_table(_trials(tuned.results), f"Trials, judged by {tuned.metric.replace('_', ' ')}")
    OUT.print(f"# The best of them, also in {directory / 'best.toml'}\n", markup=False)
    OUT.print(as_toml(tuned.best), markup=False)
    return 0


def resume_compare(options: argparse.Namespace) -> int:
    """Go on with a comparison."""
    asked = asked_for(options.resume, "compare")
    options.output, options.metric = options.resume, asked["metric"]
    methods = {name: _config(tree) for name, tree in asked["methods"].items()}
    return compare(methods, asked["seeds"], asked["targets"], options)


def resume_tune(options: argparse.Namespace) -> int:
    """Go on with a search for step sizes."""
    asked = asked_for(options.resume, "tune")
    options.output = options.resume
    for name in ("budget", "trials", "metric"):
        setattr(options, name, asked[name])
    space = asked["space"] and {key: tuple(span) for key, span in asked["space"].items()}
    return tune(_config(asked["config"]), space, options)


def _config(tree: Any) -> RunConfig:
    return checked(tree, {})


def write_down(directory: Path, asked: Mapping[str, Any]) -> None:
    """Write what was asked for into the folder, so that `--resume` finds it."""
    put(directory / STUDY, json.dumps(asked, indent=1).encode())


def _require_same(directory: Path, asked: Mapping[str, Any]) -> None:
    """Raise if a search with other settings was begun in the folder."""
    if (directory / STUDY).exists():
        begun = asked_for(directory, "tune")
        if any(begun[key] != value for key, value in json.loads(json.dumps(asked)).items()):
            raise UserError(
                f"{directory} holds a search with other settings: choose another folder."
            )


def asked_for(directory: Path, study: str) -> dict[str, Any]:
    """Return what was asked for in a folder."""
    try:
        asked = json.loads((directory / STUDY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        asked = {}
    needed = {"study", *_NEEDED[study]}
    if not isinstance(asked, dict) or asked.get("study") != study or not needed <= set(asked):
        raise UserError(f"{directory} is no folder that `simfbo {study}` wrote: give one.")
    return asked


def interrupted(directory: Path, study: str) -> KeyboardInterrupt:
    """Return Ctrl-C with a sentence that says how to go on."""
    return KeyboardInterrupt(f"interrupted; to go on: simfbo {study} --resume {directory}")


def workers(options: argparse.Namespace) -> int:
    """Return how many runs go side by side; a run keeps about two cores busy."""
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {options.jobs}.")
    return options.jobs or max(1, (os.cpu_count() or 1) // 2)


def _trials(results: Sequence) -> list[dict[str, str]]:
    """Return the results of all trials as a table, the best of each stage first."""
    return [
        {
            "stage": str(result.stage + 1),
            "trial": str(result.trial),
            **{key: f"{value:g}" for key, value in result.settings.items()},
            "iterations": f"{result.iterations:,}",
            "result": result.status if result.score is None else f"{result.score:.4g}",
        }
        for result in results
    ]


def print_table(rows: Sequence[Mapping[str, str]], title: str) -> None:
    """Print a table to the terminal."""
    table = Table(title=title)
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row.values())
    OUT.print(table)
