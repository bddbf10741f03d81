"""One table over experiments, in the form of the paper's: method x data x final accuracy."""

from pathlib import Path

from simfbo.experiments import tables
from simfbo.experiments.experiment import Experiment, Part, load
from simfbo.experiments.results import loaded, place
from simfbo.runs.files import write_atomic
from simfbo.studies.tables import markdown, to_target

# The columns: an experiment and one of its parts.
_COLUMNS = {
    ("mnist-iid", ""): "MNIST iid",
    ("mnist-noniid", ""): "MNIST non-iid",
    ("cifar-iid", "halves"): "CIFAR-10, halves",
    ("cifar-iid", "upper80"): "CIFAR-10, 20/80",
}


def write(folder: Path, quick: bool) -> bool:
    """Write summary.md from the results in a folder; return False if there are no results.

    A cell is the test accuracy in per cent ± standard deviation over seeds, in brackets the
    paper's; to a goal, exchanges / megabytes / processor seconds.
    """
    rows: dict[str, dict[str, str]] = {}
    for (name, part_name), column in _COLUMNS.items():
        if not (folder / name).exists():
            continue
        experiment = load(name, quick)
        for part in experiment.parts:
            if part.name == part_name:
                for label, cells in _cells(part, experiment, column, folder / name).items():
                    rows.setdefault(label, {"method": label}).update(cells)
    columns = dict.fromkeys(key for row in rows.values() for key in row)
    table = [{column: row.get(column, "") for column in columns} for row in rows.values()]
    if table:
        write_atomic(folder / "summary.md", markdown(table) + "\n")
    return bool(table)


def _cells(
    part: Part, experiment: Experiment, column: str, folder: Path
) -> dict[str, dict[str, str]]:
    """Return the cells of one part, for each method whose runs are complete."""
    goal, cells = experiment.tree["goal"], {}
    for key, method in part.methods.items():
        if not all(place(folder, part, key, seed).exists() for seed in part.seeds):
            continue
        histories = loaded(part, key, folder)
        paper = f" ({100 * method.paper:.4g})" if method.paper is not None else ""
        cells[method.label] = {
            "exchanges an iteration": tables.exchanges_an_iteration(
                [h.records[-1] for h in histories]
            ),
            f"{column}, %": tables.ended(histories, tables.METRIC) + paper,
            f"{column}, to {100 * goal:g} %: exchanges / MB / CPU s": to_target(
                histories, tables.METRIC, goal
            ),
        }
    return cells
