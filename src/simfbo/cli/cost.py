"""`simfbo cost`: what an iteration sends, without running it."""

import argparse
from pathlib import Path

from simfbo.cli import arguments
from simfbo.cli.console import OUT
from simfbo.cli.run import EPILOG as EPILOG
from simfbo.config.run import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cost`."""
    arguments.add_settings(parser)


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    return cost(arguments.configuration(options), options.data_dir)


def cost(config: RunConfig, data_dir: Path | None) -> int:
    """Print the ledger of one iteration."""
    from rich.table import Table

    from simfbo import engines
    from simfbo.algorithms._auto_steps import most_probes
    from simfbo.config.build import build_algorithm, build_federation, smoothed
    from simfbo.config.build_task import build_task
    from simfbo.runs.report import size

    task = build_task(config, data_dir)
    method = build_algorithm(config.algorithm, task.problem, config.rounds)
    algorithm = smoothed(method, config)
    federation = build_federation(config, task.data)
    ledger = engines.cost(algorithm, federation, task.x0, task.y0)
    table = Table(title=f"One iteration of {algorithm.name} on {config.task.name}")
    for name in ("client step", "rounds", "floats down", "floats up", "down", "up"):
        table.add_column(name, justify="left" if name == "client step" else "right")
    for name, sent in [*ledger.by_step.items(), ("total", ledger.total)]:
        floats = f"{sent.floats_down:,}", f"{sent.floats_up:,}"
        table.add_row(name, str(sent.rounds), *floats, size(sent.bytes_down), size(sent.bytes_up))
    OUT.print(table)
    federation.remember(algorithm, task.x0, task.y0)
    if federation.memory_bytes:
        kept = size(federation.memory_bytes)
        OUT.print(f"Every client keeps {kept} from one exchange to the next, which are not sent.")
    if ledger.total.estimated:
        OUT.print("Bytes of entropy codes are those of normally distributed messages; a run counts "
                  "its own.")  # fmt: skip
    if config.steps == "auto":
        most = most_probes(config.rounds)
        OUT.print(
            f"Automatic step sizes add up to {most} exchanges before the first, and some later."
        )
    if varies := algorithm.known_violations.get("ledger is cost"):
        OUT.print(f"This is one draw of an iteration. {varies}")
    return 0
