"""The command line: `simfbo run`, `cost`, `check`, `data` and `report`.

Heavy imports happen inside the commands, so that help and mistakes answer at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simfbo import config as settings
from simfbo.errors import UserError

_SHORTCUTS = {
    "task": "task.name",
    "dataset": "task.dataset",
    "partition": "task.partition",
    "clients": "task.clients",
    "algorithm": "algorithm.name",
    "cohort": "sampling.size",
    "rounds": "rounds",
    "every": "every",
    "seed": "seed",
    "engine": "engine",
}

_RUN_EXAMPLES = """examples:
  simfbo run hyper-representation                      digits, 20 clients, a few seconds
  simfbo run hyper-representation --dataset mnist --rounds 2000
  simfbo run hyper-representation --dataset mnist --partition shards --algorithm shrofbo --tau 1..10
  simfbo run quadratic --set task.heterogeneity=3 --set algorithm.local.x=0.02
  simfbo run --config my.toml --seed 3                 flags win over the file

Every setting has a dotted key for --set; the same keys make up the TOML file. They are listed in
docs/reference-configuration.md.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "command"):
        parser.print_help()
        return 2
    try:
        return options.command(options)
    except UserError as error:
        print(f"simfbo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("simfbo: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("SIMFBO_TRACEBACK"):
            raise
        print(
            f"simfbo: failed: {type(error).__name__}: {' '.join(str(error).split())[:500]} "
            "(set SIMFBO_TRACEBACK=1 to see where).",
            file=sys.stderr,
        )
        return 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="simfbo", description="Federated bilevel optimisation: run, measure, compare."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    run = _command(commands, "run", "train, and write a history, a figure and a summary", _run)
    _add_settings(run)
    run.add_argument("--output", type=Path, metavar="DIR", help="folder of the run")
    run.add_argument("--or-digits", action="store_true", help="where the data set cannot be "
                     "fetched, run on scikit-learn's digits instead")  # fmt: skip
    run.add_argument("--quiet", action="store_true", help="print the summary only")
    _add_settings(_command(commands, "cost", "what an iteration sends, without running it", _cost))
    _add_check(_command(commands, "check", "try the laws on an algorithm of yours", _check))
    data = _command(commands, "data", "list the data sets, or fetch one", _data)
    data.add_argument("name", nargs="?", help="data set to fetch")
    data.add_argument("--data-dir", type=Path, help="folder of the data (or SIMFBO_DATA_DIR)")
    _add_report(_command(commands, "report", "draw runs as figures and one page", _report))
    return parser


def _command(commands: Any, name: str, text: str, function: Any) -> argparse.ArgumentParser:
    """Return the parser of one command."""
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_RUN_EXAMPLES if name in ("run", "cost") else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=function)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make up a configuration."""
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help=" or ".join(settings.TASKS))
    add("--config", type=Path, metavar="FILE", help="TOML file; flags win over it")
    add("--dataset", help="digits (default), mnist, fashion-mnist or cifar10")
    add("--partition", help="iid (default), shards or dirichlet")
    add("--clients", type=int, metavar="N", help="number of clients")
    add("--algorithm", help=" or ".join(settings.ALGORITHMS))
    add("--cohort", type=int, metavar="P", help="clients that take part in a round (default 10)")
    add("--tau", metavar="T", help="local steps: a number, LOW..HIGH for a draw per client, or a "
        "list 1,2,3")  # fmt: skip
    add("--rounds", type=int, metavar="T", help="iterations (default 500)")
    add("--every", type=int, metavar="K", help="evaluate every K iterations (default: 20 times)")
    add("--seed", type=int, help="of every random draw (default 0)")
    add("--engine", help="simulated (default, fast) or debug")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; repeatable")
    add("--data-dir", type=Path, metavar="DIR", help="folder of the data (or SIMFBO_DATA_DIR)")


def _add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="as simfbo:shrofbo; called with "
                        "(problem, local, server)")  # fmt: skip
    parser.add_argument("--single-loop", action="store_true", help="also the laws of SimFBO's "
                        "family (SOBA, eta, sampling, drift)")  # fmt: skip


def _add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--metric", help="what to draw (default: the main metric)")
    parser.add_argument("--output", type=Path, default=Path("report"), metavar="DIR",
                        help="where to write figure.png, figure.svg and report.html")  # fmt: skip


def _configuration(options: argparse.Namespace) -> settings.RunConfig:
    """Return the configuration that file and flags make up."""
    overrides = {
        key: getattr(options, flag)
        for flag, key in _SHORTCUTS.items()
        if getattr(options, flag) is not None
    }
    overrides |= _local_steps(options.tau) if options.tau is not None else {}
    overrides |= dict(map(settings.parse_override, options.set))
    if not options.config and "task.name" not in overrides:
        raise UserError(f"Name a task: {' or '.join(settings.TASKS)}; or give --config FILE.")
    return settings.load(options.config, overrides)


def _local_steps(text: str) -> dict[str, Any]:
    """Return the settings that `--tau` stands for.

    Example:
        >>> _local_steps("1..10")
        {'local_work.low': 1, 'local_work.high': 10}
    """
    try:
        if ".." in text:
            low, high = map(int, text.split(".."))
            return {"local_work.low": low, "local_work.high": high}
        taus = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--tau takes 5, 1..10 or 1,2,3; got '{text}'.") from None
    tau = taus if len(taus) > 1 else taus[0]
    return {"local_work.tau": tau, "local_work.low": None, "local_work.high": None}


def _run(options: argparse.Namespace) -> int:
    """Train as configured."""
    config = _configuration(options)
    from simfbo.commands import train

    return train(config, options)


def _cost(options: argparse.Namespace) -> int:
    """Print what one iteration sends."""
    config = _configuration(options)
    from simfbo.commands import show_cost

    return show_cost(config, options.data_dir)


def _check(options: argparse.Namespace) -> int:
    """Try the laws."""
    from simfbo.commands import check

    return check(options.factory, options.single_loop)


def _data(options: argparse.Namespace) -> int:
    """List or fetch data sets."""
    from simfbo.commands import show_data

    return show_data(options.name, options.data_dir)


def _report(options: argparse.Namespace) -> int:
    """Draw runs."""
    from simfbo import report
    from simfbo.history import History

    paths = report.save([History.load(run) for run in options.runs], options.output, options.metric)
    print("\n".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
