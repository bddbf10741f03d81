"""`simfbo reproduce`: the SimFBO paper's experiments, and two that measure its theorems."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simfbo.cli import arguments
from simfbo.cli.console import OUT, fetch_first, print_table, progress_bar, resumable, workers
from simfbo.errors import UserError
from simfbo.experiments.experiment import NAMES, Experiment, Part, chosen, load
from simfbo.runs.files import Json
from simfbo.runs.trackers.tracking import Tracking, used_before

if TYPE_CHECKING:
    from simfbo.experiments.grid import Cell
    from simfbo.experiments.results import Groups, Resources

CELLS = Path("results", "cells.jsonl")
_SHOWN = 6  # columns of a table in the terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `reproduce`."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="an experiment, or all")
    add("--list", action="store_true", help="list the experiments")
    add("--quick", action="store_true", help="the short form: all of them in 5 minutes")
    add("--tune", action="store_true", help="search the tuned step sizes again first")
    arguments.add_data_dir(parser)
    arguments.add_many_runs(parser)


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    run_options: Json = {
        "jobs": options.jobs,
        "quiet": options.quiet,
        "data_dir": options.data_dir,
    }
    if options.resume:
        arguments.require_alone(options, add_arguments)
        return resume(options.resume, options.track or used_before(options.resume), **run_options)
    if options.list:
        return show_list()
    if options.name is None:
        raise UserError("Name an experiment, or all. simfbo reproduce --list lists them.")
    form = {"quick": options.quick, "tune": options.tune}
    track = options.track or []
    return reproduce(chosen(options.name), options.output, track=track, **form, **run_options)


def show_list() -> int:
    """Print the experiments with their claims and our verdicts."""
    for name in NAMES:
        full, quick = load(name), load(name, quick=True)
        OUT.print(f"{name}, {full.minutes:g} minutes, with --quick {quick.minutes:g}")
        _print_claims(full)
    OUT.print("simfbo reproduce NAME runs one, simfbo reproduce all runs all; --quick is short.")
    return 0


def _print_claims(experiment: Experiment) -> None:
    """Print the tested claims, of the paper or our own, each with our verdict."""
    for claim, verdict in experiment.claims:
        OUT.print(f"  {claim}: {verdict}", markup=False)


def reproduce(
    names: Sequence[str],
    output: Path | None,
    *,
    quick: bool,
    tune: bool,
    jobs: int | None,
    quiet: bool,
    data_dir: Path | None,
    track: Sequence[str],
) -> int:
    """Run experiments; write and print their tables and figures."""
    from simfbo.experiments import summary
    from simfbo.experiments.results import Resources
    from simfbo.runs.files import keep_compilations
    from simfbo.studies import folder as study

    keep_compilations()
    folder = output or Path("runs", "reproduce-quick" if quick else "reproduce")
    experiments = [load(name, quick) for name in names]
    settings = _merged_study(names, folder, quick, tune)
    for experiment in experiments if not tune else ():
        _refuse_other_results(experiment, folder / experiment.name)
    with resumable(folder / study.STUDY, "reproduce"), Tracking(track, folder) as tracking:
        study.save(folder, "reproduce", settings)
        resources = Resources(workers(jobs), data_dir, tune, tracking=tracking)
        tracking.begin(folder.resolve().name, settings, {"study": "reproduce"})
        OUT.print(f"Into {folder}", markup=False)
        for i, experiment in enumerate(experiments):
            minutes = sum(later.minutes for later in experiments[i:])
            place = f"{i + 1} of {len(names)}"
            OUT.print(f"\n{experiment.title} ({place})", markup=False)
            _print_claims(experiment)
            OUT.print(f"About {minutes:.0f} minutes left on 2 cores.")
            _reproduce(experiment, folder, place, resources, quiet)
            place = folder / experiment.name
            tracking.artefact(place / "table.md", *sorted(place.glob("figure*.svg")))
        tracking.finish("finished")
        if summary.write(folder, quick):
            OUT.print(f"Summary table: {folder / 'summary.md'}", markup=False)
    return 0


def resume(folder: Path, track: Sequence[str], **run_options: Any) -> int:
    """Continue the experiments in a folder."""
    study = _study_in(folder)
    form = {"quick": study["quick"], "tune": study["tune"]}
    return reproduce(study["names"], folder, track=track, **form, **run_options)


def _study_in(folder: Path) -> Json:
    """Load the settings of the study in a folder."""
    from simfbo.studies import folder as study

    settings = study.load(folder, "reproduce")
    if not all(name in NAMES for name in settings["names"]):
        raise UserError(f"{folder / study.STUDY} names no experiments: delete it.")
    return settings


def _merged_study(names: Sequence[str], folder: Path, quick: bool, tune: bool) -> Json:
    """Merge the settings with those in the folder; raise if the form differs."""
    from simfbo.studies import folder as study

    form: Json = {"quick": quick, "tune": tune}
    earlier = _study_in(folder) if (folder / study.STUDY).exists() else {**form, "names": []}
    for key, value in form.items():
        if earlier[key] != value:
            preposition = "with" if earlier[key] else "without"
            raise UserError(
                f"{folder} was started {preposition} --{key}: choose another output folder."
            )
    return {"names": [name for name in NAMES if name in {*names, *earlier["names"]}], **form}


def _refuse_other_results(experiment: Experiment, folder: Path) -> None:
    """Raise if a folder holds results of other settings, before anything is run."""
    from simfbo.experiments.grid import kept
    from simfbo.experiments.results import missing

    if experiment.name in _THEORY:
        kept(_cells(experiment), folder / CELLS)
    for part in experiment.parts:
        missing(part, folder)


def _reproduce(
    experiment: Experiment, folder: Path, place: str, resources: "Resources", quiet: bool
) -> None:
    """Run one experiment with a progress bar."""
    if resources.tune and "tuning" not in experiment.tree:
        OUT.print("Nothing to tune here: the settings are given.")
    methods = [method for part in experiment.parts for method in part.methods.values()]
    fetch_first((method.config for method in methods), resources.data_dir, quiet)
    with progress_bar(quiet) as progress:
        bar = progress.add_task(f"{place}, {experiment.name}", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        workers = experiment.tree.get("workers", resources.workers)
        run = _THEORY.get(experiment.name, _accuracies)
        resources_of_run = resources._replace(workers=workers, on_progress=show)
        run(experiment, folder / experiment.name, resources_of_run)
    OUT.print(f"Tables, figures and histories are in {folder / experiment.name}", markup=False)


def _accuracies(experiment: Experiment, folder: Path, resources: "Resources") -> None:
    """Run methods with several seeds and compare their accuracies."""
    from simfbo.experiments import retune, tables
    from simfbo.experiments.results import run_part
    from simfbo.runs.style import save_svg

    all_tables: Json = {}
    for part in experiment.parts:
        if resources.tune and "tuning" in experiment.tree:
            part = retune.tuned(part, experiment.tree["tuning"], folder, resources)
        groups = run_part(part, folder, resources)
        all_tables |= _tables(part, groups)
        name = f"figure-{part.name}.svg" if part.name else "figure.svg"
        save_svg(tables.draw(part, groups, part.tree), folder / name)
    _write(all_tables, folder)


def _tables(part: Part, groups: "Groups") -> dict[str, list[dict[str, str]]]:
    """Return the tables of a part, by title."""
    from simfbo.experiments import tables

    tree = part.tree
    about = f"{part.title} " if part.title else ""
    by_title = {part.title: tables.accuracy(part, groups, tree)}
    if "pairs" in tree and len(part.seeds) > 1:
        by_title[f"{about}Seed by seed:"] = tables.differences(part, groups, tree["pairs"])
    if tree.get("reach") in part.methods:
        title = f"{about}To the final accuracy of {part.methods[tree['reach']].label}:"
        by_title[title] = tables.ratios(part, groups, tree["reach"])
    return by_title


def _speedup(experiment: Experiment, folder: Path, resources: "Resources") -> None:
    """Measure Theorem 1's rate."""
    from simfbo.experiments import theory, theory_figures
    from simfbo.runs.style import save_svg

    cells = theory.measured(_cells(experiment), theory.speedup, folder / CELLS, resources)
    title = "Mean of |∇Φ|² over the iterations, ± standard deviation over seeds."
    exponents = theory_figures.exponent_table(cells)
    _write({title: theory_figures.speedup_table(cells), "Exponents, fitted.": exponents}, folder)
    save_svg(theory_figures.draw_speedup(cells), folder / "figure.svg")


def _mismatch(experiment: Experiment, folder: Path, resources: "Resources") -> None:
    """Measure the final points under unequal local work, case by case."""
    from simfbo.experiments import theory, theory_figures
    from simfbo.runs.style import save_svg

    cells = theory.measured(_cells(experiment), theory.mismatch, folder / CELLS, resources)
    title = "distance from x at the end, per cent of the distance between the two points."
    tables = {}
    for case in experiment.tree["cases"].values():
        cells_of_case = theory_figures.where(cells, **theory.local_work(case))
        tables[f"{case['about']}: {title}"] = theory_figures.mismatch_table(cells_of_case)
        save_svg(theory_figures.draw_mismatch(cells_of_case), folder / case["figure"])
    _write(tables, folder)


_THEORY = {"speedup": _speedup, "objective-mismatch": _mismatch}


def _cells(experiment: Experiment) -> "list[Cell]":
    """Return the grid of an experiment on a theorem."""
    from simfbo.experiments import theory

    grid = theory.speedup_cells if experiment.name == "speedup" else theory.mismatch_cells
    return grid(experiment.tree)


def _write(tables: Mapping[str, list[dict[str, str]]], folder: Path) -> None:
    """Write the tables that have rows to table.md, and print their first columns."""
    from simfbo.runs.files import write_atomic
    from simfbo.studies.tables import markdown

    nonempty = {title: rows for title, rows in tables.items() if rows}
    text = "\n\n".join(f"{title}\n\n{markdown(rows)}".strip() for title, rows in nonempty.items())
    write_atomic(folder / "table.md", text + "\n")
    for title, rows in nonempty.items():
        print_table([dict(list(row.items())[:_SHOWN]) for row in rows], title)
