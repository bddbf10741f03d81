"""`simfbo report`: draw runs as figures and one page."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    add("--metric", help="what to draw (default: the main metric)")
    add(
        "--output",
        type=Path,
        default=Path("report"),
        metavar="DIR",
        help="where to write figure.png, figure.svg and report.html",
    )


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    return report(options.runs, options.metric, options.output)


def report(runs: Sequence[Path], metric: str | None, output: Path) -> int:
    """Write the figures and the page, and print their paths."""
    from simfbo.runs import report
    from simfbo.runs.history import History

    paths = report.save([History.load(run) for run in runs], output, metric)
    print("\n".join(map(str, paths)))
    return 0
