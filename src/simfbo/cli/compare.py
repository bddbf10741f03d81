"""`simfbo compare`: several methods and seeds on one task."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simfbo.cli import arguments
from simfbo.cli.console import (
    OUT,
    fetch_first,
    fetching,
    new_folder,
    print_json,
    print_table,
    progress_bar,
    resumable,
    workers,
)
from simfbo.cli.run import add_or_digits, or_digits
from simfbo.config.catalogue import METHODS
from simfbo.config.files import read
from simfbo.config.run import RunConfig, checked
from simfbo.errors import UserError
from simfbo.runs.files import Json
from simfbo.runs.trackers.tracking import Tracking, used_before

if TYPE_CHECKING:
    from simfbo.runs.history import History
    from simfbo.studies.sweep import Job

_ARTEFACTS = ("table.md", "figure.png", "figure.svg", "report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    arguments.add_settings(parser, several=True)
    add = parser.add_argument
    add(
        "--methods",
        metavar="A,B",
        help="which of the file's methods; without a file, algorithms "
        f"(default: all for a shared lower level; of {', '.join(METHODS.names())})",
    )
    add(
        "--seeds",
        metavar="S",
        help="3 for the seeds 0, 1, 2; or 0..2, or 0,5,7 (default: the file's, or 3)",
    )
    add("--targets", metavar="T", help="such as 0.9,0.95: the cost of reaching each")
    add(
        "--equal",
        choices=("exchanges", "bytes", "iterations"),
        default="exchanges",
        help="what methods without `rounds` of their own get the same of (default: exchanges); as "
        "much as --rounds iterations of the cheapest one take",
    )
    add("--metric", help="what to compare (default: the task's own)")
    add_or_digits(parser)
    arguments.add_json(parser)
    arguments.add_many_runs(parser)


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    run_options: Json = {
        "jobs": options.jobs,
        "quiet": options.quiet,
        "data_dir": options.data_dir,
        "as_json": options.json,
    }
    if options.resume:
        arguments.require_alone(options, add_arguments)
        return resume(options.resume, options.track or used_before(options.resume), **run_options)
    methods, seeds, unset = plan(options)
    if options.or_digits:
        task = or_digits(next(iter(methods.values())).task, options.data_dir)
        methods = {
            name: config.model_copy(update={"task": task}) for name, config in methods.items()
        }
    if options.equal != "iterations" and len(unset) > 1:
        shared = {name: methods[name] for name in unset}
        methods |= _at_equal(options.equal, shared, options.data_dir, options.quiet)
    targets = arguments.numbers(options.targets, "--targets") if options.targets else []
    track = next(iter(methods.values())).track
    return compare(
        methods, seeds, targets, options.metric, options.output, track=track, **run_options
    )


def plan(options: argparse.Namespace) -> tuple[dict[str, RunConfig], list[int], list[str]]:
    """Return methods and seeds, and the names of the methods without iterations of their own."""
    from simfbo.studies import comparison

    overrides = arguments.overrides(options)
    tree = read(options.config) if options.config else {}
    if "seed" in tree or "seed" in overrides:
        raise UserError("Write 'seeds', how many or a list, in place of 'seed'.")
    seeds = tree.pop("seeds", [0, 1, 2])
    if options.seeds is not None:
        seeds = arguments.seeds(options.seeds)
    seeds = comparison.checked_seeds(seeds)
    names = options.methods.split(",") if options.methods else None
    methods = comparison.plan(tree, {**overrides, "seed": seeds[0]}, names)
    return methods, seeds, comparison.without_rounds(tree, overrides, methods)


def _at_equal(
    unit: str, methods: dict[str, RunConfig], data_dir: Path | None, quiet: bool
) -> dict[str, RunConfig]:
    """Set iterations such that all methods have the same exchanges or bytes; print them."""
    from simfbo.config.build_task import build_task
    from simfbo.runs.report import size
    from simfbo.studies import comparison

    first = next(iter(methods.values()))
    with fetching(quiet):
        task = build_task(first, data_dir)
    iteration_costs = {
        name: comparison.iteration_cost(config, task) for name, config in methods.items()
    }
    costs = {name: getattr(cost, unit) for name, cost in iteration_costs.items()}
    methods = comparison.equal(methods, costs)
    total = first.rounds * min(costs.values())
    amount = size(int(total)) if unit == "bytes" else f"{total:,.0f} exchanges"
    each = ", ".join(f"{name} {config.rounds:,}" for name, config in methods.items())
    OUT.print(f"{amount} for each method; iterations: {each}", markup=False)
    return methods


def compare(
    methods: Mapping[str, RunConfig],
    seeds: Sequence[int],
    targets: Sequence[float],
    metric: str | None,
    output: Path | None,
    *,
    jobs: int | None,
    quiet: bool,
    data_dir: Path | None,
    as_json: bool,
    track: Sequence[str],
) -> int:
    """Run all methods with all seeds; write and print table and figures."""
    from simfbo.studies import comparison, folder
    from simfbo.studies.sweep import refuse_other_settings

    directory = output or new_folder("compare", next(iter(methods.values())))
    runs = comparison.jobs(methods, seeds, directory)
    refuse_other_settings(runs)
    with resumable(directory / folder.STUDY, "compare"), Tracking(track, directory) as tracking:
        folder.save_comparison(directory, methods, seeds, targets, metric)
        settings = {"methods": ", ".join(methods), "seeds": ", ".join(map(str, seeds))}
        tracking.begin(directory.resolve().name, settings, {"study": "compare"})
        plural = "s" if len(seeds) > 1 else ""
        count = f"{len(methods)} methods x {len(seeds)} seed{plural}"
        OUT.print(f"{count} into {directory}", markup=False)
        fetch_first(methods.values(), data_dir, quiet)
        histories = _run_jobs(runs, workers(jobs), data_dir, quiet, tracking)
        groups = {name: histories[i :: len(methods)] for i, name in enumerate(methods)}
        rows = _show(groups, methods, targets, metric, directory)
        tracking.artefact(*(directory / name for name in _ARTEFACTS))
        tracking.finish("finished")
        if as_json:
            print_json(_result(groups, rows, directory))
    return 0


def _result(
    groups: "Mapping[str, list[History]]", rows: Sequence[Mapping[str, str]], directory: Path
) -> Json:
    """Return the outcome of a comparison for programs."""
    return {
        "directory": directory,
        "table": list(rows),
        "runs": [
            {
                "method": name,
                "seed": history.header["seed"],
                **(history.end or {}),
                "last": history.records[-1],
            }
            for name, group in groups.items()
            for history in group
        ],
    }


def _run_jobs(
    runs: "Sequence[Job]",
    workers: int,
    data_dir: Path | None,
    quiet: bool,
    tracking: Tracking,
) -> "list[History]":
    """Run the jobs with a progress bar."""
    from simfbo.studies.sweep import sweep

    with progress_bar(quiet) as progress:
        bar = progress.add_task(f"{len(runs)} runs, iterations", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        return sweep(runs, workers, data_dir, show, tracking)


def _show(
    groups: "Mapping[str, list[History]]",
    methods: Mapping[str, RunConfig],
    targets: Sequence[float],
    metric: str | None,
    directory: Path,
) -> list[dict[str, str]]:
    """Write and print table and figures; return the table."""
    from simfbo.runs.report import metrics
    from simfbo.studies import comparison, figures, tables

    histories = [history for group in groups.values() for history in group]
    metric = metric or metrics(histories[0])[0]
    for history in histories:
        history.column(metric)  # raises if there is no such metric
    rows = tables.rows(groups, metric, targets)
    looks = figures.looks_of({name: config.algorithm.name for name, config in methods.items()})
    note = comparison.caveat(methods)
    figures.save(groups, metric, rows, directory, looks, note)
    several_seeds = len(histories) > len(groups)
    spread = ", mean ± standard deviation over seeds" if several_seeds else ", one seed"
    print_table(rows, metric.replace("_", " ") + spread)
    if note:
        OUT.print(note, markup=False)
    for name, group in groups.items():
        for history in group:
            for line in history.warnings:
                source = f"{name}, seed {history.header['seed']}, iteration {line['round']}"
                OUT.print(f"{source}: {line['text']}", markup=False)
    OUT.print(f"Table, figures and page are in {directory}", markup=False)
    return rows


def resume(directory: Path, track: Sequence[str], **run_options: Any) -> int:
    """Continue a comparison."""
    from simfbo.studies import folder

    study = folder.load(directory, "compare")
    methods = {name: checked(tree, {}) for name, tree in study["methods"].items()}
    return compare(
        methods,
        study["seeds"],
        study["targets"],
        study["metric"],
        directory,
        track=track,
        **run_options,
    )
