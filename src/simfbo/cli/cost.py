"""`simfbo cost`: the communication of an iteration, without running it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from simfbo.cli import arguments
from simfbo.cli.console import OUT, fetching, print_json
from simfbo.cli.run import EPILOG as EPILOG
from simfbo.config.run import RunConfig

if TYPE_CHECKING:
    from simfbo.core.ledger import Ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cost`."""
    arguments.add_settings(parser)
    arguments.add_json(parser)


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    return cost(arguments.configuration(options), options.data_dir, options.json)


def cost(config: RunConfig, data_dir: Path | None, as_json: bool) -> int:
    """Print the ledger of one iteration."""
    from simfbo import engines
    from simfbo.algorithms.steps.auto import most_probes
    from simfbo.config.build import build_algorithm, build_federation, smoothed
    from simfbo.config.build_task import build_task
    from simfbo.runs.report import size

    with fetching():
        task = build_task(config, data_dir)
    method = build_algorithm(config.algorithm, task.problem, config.rounds)
    algorithm = smoothed(method, config.aggregation.momenta)
    federation = build_federation(config, task.data)
    ledger = engines.cost(algorithm, federation, task.x0, task.y0)
    federation.remember(algorithm, task.x0, task.y0)
    notes = []
    if memory_bytes := federation.memory_bytes:
        notes.append(
            f"Every client keeps {size(memory_bytes)} from one exchange to the next, which are "
            "not sent."
        )
    if ledger.total.estimated:
        notes.append(
            "Bytes of entropy codes are those of normally distributed messages; a run counts its "
            "own."
        )
    if config.steps == "auto":
        most = most_probes(config.rounds)
        notes.append(
            f"Automatic step sizes add up to {most} exchanges before the first, and some later."
        )
    if reason := algorithm.known_violations.get("ledger is cost"):
        notes.append(f"This is one draw of an iteration. {reason}")
    if as_json:
        print_json(
            {
                "algorithm": algorithm.name,
                "task": config.task.name,
                "steps": {name: traffic._asdict() for name, traffic in ledger.by_step.items()},
                "total": ledger.total._asdict(),
                "bytes_by_channel": ledger.by_channel,
                "memory_bytes": memory_bytes,
                "notes": notes,
            }
        )
        return 0
    _print(ledger, f"One iteration of {algorithm.name} on {config.task.name}")
    for note in notes:
        OUT.print(note)
    return 0


def _print(ledger: "Ledger", title: str) -> None:
    """Print a ledger as a table."""
    from simfbo.runs.report import size

    table = Table(title=title)
    for name in ("client step", "exchanges", "floats down", "floats up", "down", "up"):
        table.add_column(name, justify="left" if name == "client step" else "right")
    for name, traffic in [*ledger.by_step.items(), ("total", ledger.total)]:
        floats = f"{traffic.floats_down:,}", f"{traffic.floats_up:,}"
        table.add_row(
            name, str(traffic.rounds), *floats, size(traffic.bytes_down), size(traffic.bytes_up)
        )
    OUT.print(table)
