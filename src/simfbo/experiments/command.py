"""What `simfbo reproduce` does, once its arguments are checked."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from simfbo.cli.commands import OUT, progress_bar
from simfbo.engines.compile_cache import keep_compilations
from simfbo.errors import UserError
from simfbo.experiments import retune as search
from simfbo.experiments import summary, tables, theory, theory_figures
from simfbo.experiments.experiment import NAMES, Experiment, Part, load, parts
from simfbo.experiments.grid import Cell, kept
from simfbo.experiments.results import Groups, Resources, missing, run_part
from simfbo.runs.history import make_folder
from simfbo.studies.comparison import markdown
from simfbo.studies.folder import STUDY, asked_for, interrupted, print_table, workers, write_down

CELLS = Path("results", "cells.jsonl")
_SHOWN = 6  # columns of a table that the terminal shows


def show_list() -> int:
    """Print the experiments."""
    table = Table()
    for column in ("experiment", "what it shows", "minutes", "quick"):
        table.add_column(column, justify="right" if column in ("minutes", "quick") else "left")
    for name in NAMES:
        full, quick = load(name), load(name, quick=True)
        table.add_row(name, full.claim, f"{full.minutes:g}", f"{quick.minutes:g}")
    OUT.print(table)
    OUT.print("simfbo reproduce NAME runs one, simfbo reproduce all every one; --quick is short.")
    return 0


def reproduce(names: Sequence[str], options: argparse.Namespace) -> int:
    """Run experiments, and write and print their tables and figures."""
    keep_compilations()
    side_by_side = workers(options)
    folder = options.output or Path("runs", "reproduce-quick" if options.quick else "reproduce")
    make_folder(folder)
    experiments = [load(name, options.quick) for name in names]
    asked = _asked(names, folder, options)
    for experiment in experiments if not options.tune else ():
        _refuse_other_results(experiment, folder / experiment.name)
    write_down(folder, asked)
    OUT.print(f"Into {folder}", markup=False)
    try:
        for i, experiment in enumerate(experiments):
            minutes = sum(later.minutes for later in experiments[i:])
            place = f"{i + 1} of {len(names)}"
            OUT.print(f"\n{experiment.title} ({place}): {experiment.claim}", markup=False)
            OUT.print(f"From here on it takes about {minutes:.0f} minutes on 2 cores.")
            _reproduce(experiment, folder, place, side_by_side, options)
    except KeyboardInterrupt:
        raise interrupted(folder, "reproduce") from None
    if summary.write(folder, options.quick):
        OUT.print(f"All of it in one table: {folder / 'summary.md'}", markup=False)
    return 0


def resume(options: argparse.Namespace) -> int:
    """Go on with what was begun in a folder."""
    asked = _begun(options.resume)
    options.output, options.quick, options.tune = options.resume, asked["quick"], asked["tune"]
    return reproduce(asked["names"], options)


def _begun(folder: Path) -> dict[str, Any]:
    """Return what was asked for in a folder."""
    asked = asked_for(folder, "reproduce")
    names = asked["names"]
    if not isinstance(names, list) or not names or not all(name in NAMES for name in names):
        raise UserError(f"{folder / STUDY} names no experiments: delete it.")
    if not all(isinstance(asked[key], bool) for key in ("quick", "tune")):
        raise UserError(f"{folder / STUDY} must say true or false for quick and tune: delete it.")
    return asked


def _asked(names: Sequence[str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what is asked for, with what was before; raise where that was of another form."""
    form = {"quick": options.quick, "tune": options.tune}
    begun = _begun(folder) if (folder / STUDY).exists() else {**form, "names": []}
    for key, value in form.items():
        if begun[key] != value:
            how = "with" if begun[key] else "without"
            raise UserError(f"{folder} was begun {how} --{key}: choose another output folder.")
    both = [name for name in NAMES if name in {*names, *begun["names"]}]
    return {"study": "reproduce", "names": both, **form}


def _refuse_other_results(experiment: Experiment, folder: Path) -> None:
    """Raise where a folder holds results of other settings, before anything is run."""
    if experiment.name in _THEORY:
        kept(_cells(experiment), folder / CELLS)
        return
    for part in parts(experiment):
        missing(part, folder)


def _reproduce(
    experiment: Experiment,
    folder: Path,
    place: str,
    side_by_side: int,
    options: argparse.Namespace,
) -> None:
    """Run one experiment under a bar that says how long it will take."""
    if options.tune and "tuning" not in experiment.tree:
        OUT.print("Nothing is tuned here: its settings are given.")
    with progress_bar(options.quiet) as progress:
        bar = progress.add_task(f"{place}, {experiment.name}", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        side_by_side = experiment.tree.get("workers", side_by_side)
        resources = Resources(side_by_side, options.data_dir, options.tune, show)
        run = _THEORY.get(experiment.name, _accuracies)
        run(experiment, folder / experiment.name, resources)
    OUT.print(f"Tables, figures and histories are in {folder / experiment.name}", markup=False)


def _accuracies(experiment: Experiment, folder: Path, resources: Resources) -> None:
    """Run methods with several seeds and compare their accuracies."""
    found: dict[str, Any] = {}
    for part in parts(experiment):
        if resources.tune and "tuning" in experiment.tree:
            part = search.tuned(part, experiment.tree["tuning"], folder, resources)
        groups = run_part(part, folder, resources)
        found |= _tables(part, groups, experiment.tree)
        name = f"figure-{part.name}.png" if part.name else "figure.png"
        _draw(tables.draw(part, groups, experiment.tree), folder / name)
    _write(found, folder)


def _tables(part: Part, groups: Groups, tree: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return the tables of a part, by title."""
    about = f"{part.title} " if part.title else ""
    found = {part.title: tables.accuracy(part, groups, tree)}
    if "pairs" in tree and len(part.seeds) > 1:
        found[f"{about}Seed by seed:"] = tables.differences(part, groups, tree["pairs"])
    if tree.get("reach") in part.methods:
        title = f"{about}To the final accuracy of {part.methods[tree['reach']].label}:"
        found[title] = tables.ratios(part, groups, tree["reach"])
    return found


def _speedup(experiment: Experiment, folder: Path, resources: Resources) -> None:
    """Measure Theorem 1's rate."""
    cells = theory.measured(_cells(experiment), theory.speedup, folder / CELLS, resources)
    title = "Mean of |∇Φ|² over the rounds, ± standard deviation over seeds."
    exponents = theory_figures.exponent_table(cells)
    _write({title: theory_figures.speedup_table(cells), "Exponents, fitted.": exponents}, folder)
    _draw(theory_figures.draw_speedup(cells), folder / "figure.png")


def _mismatch(experiment: Experiment, folder: Path, resources: Resources) -> None:
    """Measure where SimFBO and ShroFBO end under unequal local work."""
    cells = theory.measured(_cells(experiment), theory.mismatch, folder / CELLS, resources)
    title = "Distance from x at the end, per cent of the distance between the two points."
    _write({title: theory_figures.mismatch_table(cells)}, folder)
    _draw(theory_figures.draw_mismatch(cells), folder / "figure.png")


_THEORY = {"speedup": _speedup, "objective-mismatch": _mismatch}


def _cells(experiment: Experiment) -> list[Cell]:
    """Return the grid of an experiment on a theorem."""
    grid = theory.speedup_cells if experiment.name == "speedup" else theory.mismatch_cells
    return grid(experiment.tree)


def _draw(figure: Figure, file: Path) -> None:
    figure.savefig(file, dpi=110)


def _write(found: Mapping[str, list[dict[str, str]]], folder: Path) -> None:
    """Write the tables that have rows to table.md, and print their first columns."""
    full = {title: rows for title, rows in found.items() if rows}
    text = "\n\n".join(f"{title}\n\n{markdown(rows)}".strip() for title, rows in full.items())
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    for title, rows in full.items():
        print_table([dict(list(row.items())[:_SHOWN]) for row in rows], title)
