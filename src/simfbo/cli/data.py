"""`simfbo data`: list the data sets, or fetch one."""

import argparse
from pathlib import Path

from rich.table import Table

from simfbo.cli import arguments
from simfbo.cli.console import OUT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `data`."""
    parser.add_argument("name", nargs="?", help="data set to fetch")
    arguments.add_data_dir(parser)


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    if options.name is None:
        return show_all(options.data_dir)
    return fetch(options.name, options.data_dir)


def fetch(name: str, data_dir: Path | None) -> int:
    """Fetch a data set and print its size."""
    from simfbo import datasets

    if name in datasets.TABLES:
        table = datasets.load_table(name, data_dir)
        rows, columns = table.features.shape
        held = "no clients" if table.clients is None else f"{table.clients.max() + 1} clients"
        OUT.print(f"{name}: {rows:,} rows of {columns} features, {held}.")
        return 0
    images = datasets.load(name, data_dir)
    train_shape, test_count = images.train_images.shape, len(images.test_labels)
    size = " x ".join(map(str, train_shape[1:]))
    OUT.print(f"{name}: {train_shape[0]:,} training and {test_count:,} test images of {size}.")
    return 0


def show_all(data_dir: Path | None) -> int:
    """Print which data sets there are, and where."""
    from simfbo import datasets

    table = Table()
    for column in ("data set", "here", "where", "licence", "source"):
        table.add_column(column)
    for row in datasets.status(data_dir):
        ready = "yes" if row.ready else f"no: simfbo data {row.name}"
        table.add_row(row.name, ready, str(row.where), row.licence, row.package)
    OUT.print(table)
    return 0
