"""The command line: `simfbo run`, `compare`, `tune`, `reproduce`, `cost`, `check` and so on.

Heavy imports happen inside the commands, so that help and mistakes answer at once.
"""

import argparse
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from simfbo.cli import arguments as flags
from simfbo.cli.flower import add_flower, ask_which
from simfbo.config import run as settings
from simfbo.config.algorithms import ALGORITHMS
from simfbo.config.messages import plain
from simfbo.config.tasks import TASKS
from simfbo.errors import UserError

_RUN_EXAMPLES = """examples:
  simfbo run hyper-representation                      digits, 20 clients, a few seconds
  simfbo run hyper-representation --dataset mnist --rounds 2000
  simfbo run hyper-representation --dataset mnist --partition shards --algorithm shrofbo --tau 1..10
  simfbo run label-cleaning                            half of the labels are wrong
  simfbo run regularisation --dataset schools          an L2 weight per feature, 160 schools
  simfbo run long-tail --dataset optdigits
  simfbo run fair
  simfbo run quadratic --set task.heterogeneity=3 --set algorithm.local.x=0.02
  simfbo run --config my.toml --seed 3                 flags win over the file

Every setting has a dotted key for --set; the same keys make up the TOML file. They are listed in
docs/reference-configuration.md.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    parser = _parser()
    _show_warnings_as_sentences()
    # One pool size on every machine, so that results do not depend on its cores: as many as the
    # engine has lanes. Read by XLA when JAX is first used.
    os.environ.setdefault("PJRT_NPROC", "2")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked to end, a run saves too
    try:
        options = parser.parse_args(arguments)
        if hasattr(options, "command"):
            return options.command(options)
        parser.print_help()
        return 2
    except UserError as error:
        print(f"simfbo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"simfbo: {str(stop) or 'interrupted'}.", file=sys.stderr)
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


def _show_warnings_as_sentences() -> None:
    """Print warnings as the command line prints everything."""

    def show(message: Any, *rest: Any) -> None:
        print(f"simfbo: {message}", file=sys.stderr)

    warnings.showwarning = show


class _Parser(argparse.ArgumentParser):
    """Answers a wrong flag as any other wrong input: in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found."""
        kind, _, flags = message.partition("unrecognized arguments: ")
        if flags and not kind:
            raise UserError(f"'{plain(flags)}' is no flag: see {self.prog} COMMAND --help.")
        raise UserError(f"{plain(message.removeprefix('argument '), 250)}.")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="simfbo", description="Federated bilevel optimisation: run, measure, compare."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    run = _command(commands, "run", "train, and write a history, a figure and a summary", _run)
    flags.add_settings(run)
    run.add_argument("--output", type=Path, metavar="DIR", help="folder of the run")
    run.add_argument("--or-digits", action="store_true", help="where the data set cannot be "
                     "fetched, run on scikit-learn's digits instead")  # fmt: skip
    run.add_argument("--no-baselines", action="store_true", help="do not train the "
                     "baselines")  # fmt: skip
    run.add_argument("--quiet", action="store_true", help="print the summary only")
    run.add_argument("--checkpoint-seconds", type=flags.seconds_of, default=5.0, metavar="S",
                     help="how much time may pass between checkpoints (default 5)")  # fmt: skip
    _add_resume(run)
    _add_compare(
        _command(commands, "compare", "run several methods and seeds on one task", _compare)
    )
    _add_tune(_command(commands, "tune", "find step sizes within a budget", _tune))
    _add_reproduce(_command(commands, "reproduce", "run the paper's experiments", _reproduce))
    flags.add_settings(
        _command(commands, "cost", "what an iteration sends, without running it", _cost)
    )
    _add_check(_command(commands, "check", "try the laws on an algorithm of yours", _check))
    data = _command(commands, "data", "list the data sets, or fetch one", _data)
    data.add_argument("name", nargs="?", help="data set to fetch")
    data.add_argument("--data-dir", type=Path, help="folder of the data (or SIMFBO_DATA_DIR)")
    _add_report(_command(commands, "report", "draw runs as figures and one page", _report))
    add_flower(_command(commands, "flower", "the same algorithms, where the data is", ask_which))
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


def _add_resume(parser: argparse.ArgumentParser) -> None:
    """Add `--resume`."""
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with what was begun in "
                        "this folder, with its settings")  # fmt: skip


def _add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    flags.add_settings(parser, several=True)
    add = parser.add_argument
    add("--methods", metavar="A,B", help="which of the file's methods; without a file, algorithms "
        f"(default: all of {', '.join(ALGORITHMS)})")  # fmt: skip
    add("--seeds", metavar="S", help="as 0..2 or 0,5,7 (default: the file's, or 0..2)")
    add("--targets", metavar="T", help="as 0.9,0.95: what it took to reach each")
    _add_study(parser)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    flags.add_settings(parser)
    add = parser.add_argument
    add("--budget", type=flags.whole, default=20_000, metavar="B",
        help="communication rounds for all trials together (default 20,000)")  # fmt: skip
    add(
        "--trials",
        type=flags.whole,
        default=27,
        metavar="N",
        help="how many to begin with (default 27)",
    )
    add("--range", action="append", default=[], metavar="KEY=LOW..HIGH", help="what to tune; "
        "repeatable (default: the step sizes)")  # fmt: skip
    _add_study(parser)


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `reproduce`."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="an experiment, or all")
    add("--list", action="store_true", help="say which there are")
    add("--quick", action="store_true", help="the short form: all of them in 5 minutes")
    add("--tune", action="store_true", help="search the tuned step sizes anew first")
    add("--data-dir", type=Path, metavar="DIR", help="folder of the data (or SIMFBO_DATA_DIR)")
    _add_running(parser)


def _add_study(parser: argparse.ArgumentParser) -> None:
    """Add what `compare` and `tune` share."""
    add = parser.add_argument
    add("--metric", help="what to judge by (default: the task's own)")
    _add_running(parser)


def _add_running(parser: argparse.ArgumentParser) -> None:
    """Add how many runs go side by side, where to, and whether to go on."""
    add = parser.add_argument
    add(
        "--jobs",
        type=flags.whole,
        metavar="J",
        help="runs side by side (default: a run per two cores)",
    )
    add("--output", type=Path, metavar="DIR", help="folder of the runs")
    add("--quiet", action="store_true", help="show no progress")
    _add_resume(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="called with (problem, local, "
                        "server); or the name of one of ours, as fednest")  # fmt: skip
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
    return settings.load(options.config, _overrides(options))


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags set, by dotted key."""
    overrides = {
        key: getattr(options, flag)
        for flag, key in flags.SHORTCUTS.items()
        if getattr(options, flag, None) is not None
    }
    overrides |= flags.local_steps(options.tau) if options.tau is not None else {}
    overrides |= dict(map(settings.parse_override, options.set))
    if not options.config and "task.name" not in overrides:
        raise UserError(f"Name a task: {', '.join(TASKS)}; or give --config FILE.")
    return overrides


def _run(options: argparse.Namespace) -> int:
    """Train as configured."""
    if options.resume:
        _require_alone(options)
    config = None if options.resume else _configuration(options)
    from simfbo.cli.commands import train

    return train(config, options)


# What may stand beside --resume: it changes nothing of the result.
_HARMLESS = ("resume", "command", "data_dir", "quiet", "jobs", "checkpoint_seconds",
             "no_baselines")  # fmt: skip


def _require_alone(options: argparse.Namespace) -> None:
    """Raise where settings stand beside `--resume`, which takes them from the folder."""
    defaults = _parser().parse_args([options.command.__name__.removeprefix("_")])
    for name, value in vars(options).items():
        if name not in _HARMLESS and value != getattr(defaults, name):
            flag = name.upper() if name in ("task", "name") else f"--{name.replace('_', '-')}"
            raise UserError(f"--resume goes on with the settings in the folder: leave {flag} out.")


def _compare(options: argparse.Namespace) -> int:
    """Run several methods and seeds."""
    if options.resume:
        _require_alone(options)
        from simfbo.studies import folder as studies

        return studies.resume_compare(options)
    methods, seeds = _comparison(options)
    targets = flags.numbers(options.targets, "--targets") if options.targets else []
    from simfbo.studies import folder as studies

    return studies.compare(methods, seeds, targets, options)


def _comparison(options: argparse.Namespace) -> tuple[dict[str, settings.RunConfig], list[int]]:
    """Return the methods and the seeds that file and flags make up."""
    from simfbo.studies import comparison

    overrides = _overrides(options)
    tree = settings.read(options.config) if options.config else {}
    if "seed" in tree or "seed" in overrides:
        raise UserError("Say 'seeds' in place of 'seed': a comparison takes a list of them.")
    seeds = tree.pop("seeds", [0, 1, 2])
    if options.seeds is not None:
        seeds = flags.whole_numbers(options.seeds, "--seeds")
    seeds = comparison.checked_seeds(seeds)
    names = options.methods.split(",") if options.methods else None
    return comparison.plan(tree, {**overrides, "seed": seeds[0]}, names), seeds


def _tune(options: argparse.Namespace) -> int:
    """Find step sizes."""
    if options.resume:
        _require_alone(options)
        from simfbo.studies import folder as studies

        return studies.resume_tune(options)
    config = _configuration(options)
    space = dict(map(flags.span, options.range)) or None
    from simfbo.studies import folder as studies

    return studies.tune(config, space, options)


def _reproduce(options: argparse.Namespace) -> int:
    """Run the paper's experiments."""
    from simfbo.experiments.experiment import chosen

    if options.resume:
        _require_alone(options)
    elif not options.list and options.name is None:
        raise UserError("Name an experiment, or all: simfbo reproduce --list says which there are.")
    names = [] if options.name is None else chosen(options.name)
    from simfbo.experiments import command

    if options.list:
        return command.show_list()
    return command.resume(options) if options.resume else command.reproduce(names, options)


def _cost(options: argparse.Namespace) -> int:
    """Print what one iteration sends."""
    config = _configuration(options)
    from simfbo.cli.commands import show_cost

    return show_cost(config, options.data_dir)


def _check(options: argparse.Namespace) -> int:
    """Try the laws."""
    from simfbo.cli.commands import check

    return check(options.factory, options.single_loop)


def _data(options: argparse.Namespace) -> int:
    """List or fetch data sets."""
    from simfbo.cli.commands import show_data

    return show_data(options.name, options.data_dir)


def _report(options: argparse.Namespace) -> int:
    """Draw runs."""
    from simfbo.runs import report
    from simfbo.runs.history import History

    paths = report.save([History.load(run) for run in options.runs], options.output, options.metric)
    print("\n".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
