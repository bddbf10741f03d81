"""The entry point of the command line: `simfbo COMMAND ...`.

Heavy imports happen inside the commands, so that help and mistakes answer at once.
"""

import argparse
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from simfbo.errors import ResumableError, UserError, missing, plain

_COMMANDS = ("run", "compare", "tune", "reproduce", "cost", "check", "data", "report", "flower")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    _show_warnings_as_sentences()
    # One pool size on every machine, so that results do not depend on its cores: as many as the
    # engine has lanes. Read by XLA when JAX is first used.
    os.environ.setdefault("PJRT_NPROC", "2")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a terminated run saves too
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        # A command's own module is enough for it; help needs all of them.
        parser = build_parser([name for name in words[:1] if name in _COMMANDS] or _COMMANDS)
        options = parser.parse_args(words)
        if hasattr(options, "command"):
            return options.command(options)
        parser.print_help()
        return 2
    except ResumableError as error:  # its own text speaks Python
        print(f"simfbo: {error.advice} continue the run with --resume.", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"simfbo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"simfbo: {str(stop) or 'interrupted.'}", file=sys.stderr)
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


def build_parser(names: Sequence[str] = _COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of some commands, all by default."""
    description = "Federated bilevel optimisation: run, measure, compare."
    parser = _Parser(prog="simfbo", description=description)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in names:
        module = _module(name)
        own = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.set_defaults(command=module.call)
        module.add_arguments(own)
    return parser


def _module(name: str) -> ModuleType:
    """Import the module of a command."""
    try:
        return importlib.import_module(f"simfbo.cli.{name}")
    except ModuleNotFoundError as error:  # pydantic, rich or tomli_w
        raise UserError(missing(str(error.name), "cli")) from None


class _Parser(argparse.ArgumentParser):
    """Answers a wrong flag like any other wrong input: in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found."""
        kind, _, flags = message.partition("unrecognized arguments: ")
        if flags and not kind:
            raise UserError(f"Unknown flag '{plain(flags)}'. See {self.prog} COMMAND --help.")
        raise UserError(f"{plain(message.removeprefix('argument '), 250)}.")


def _show_warnings_as_sentences() -> None:
    """Print warnings as the command line prints everything."""

    def show(message: object, *rest: object) -> None:
        print(f"simfbo: {message}", file=sys.stderr)

    warnings.showwarning = show


if __name__ == "__main__":
    sys.exit(main())
