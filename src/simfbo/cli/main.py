"""The entry point of the command line: `simfbo COMMAND ...`.

Heavy imports happen inside the commands, so that help and errors appear immediately.
"""

import argparse
import contextlib
import difflib
import importlib
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import NoReturn

import simfbo
from simfbo.cli import output
from simfbo.errors import ResumableError, UserError, missing, plain, unusable
from simfbo.runs.interrupts import SIGNALS, Interrupts, install

_COMMANDS = {
    "run": "train, and write a history, a figure and a summary",
    "compare": "run several methods and seeds on one task",
    "tune": "find step sizes within a budget",
    "reproduce": "run the paper's experiments",
    "cost": "count what an iteration sends, without running it",
    "check": "check that an algorithm obeys the laws",
    "data": "list the data sets, or fetch one",
    "report": "draw runs as figures and one page",
    "watch": "follow runs in a browser while they go",
    "flower": "run algorithms where the data is, on Flower",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 for success, 1 for failure, 2 for invalid input or an unusable file, 130 for an interruption,
    and 141 if the reader of the output has closed it, as in `simfbo data | head -1`.

    Args:
        arguments: those of the process by default, which then is about to end: later signals are
            ignored.
    """
    interrupts, restore = Interrupts(_end_at_once), None
    try:
        restore = _take_signals(interrupts)
        code = _call(sys.argv[1:] if arguments is None else list(arguments))
        interrupts.open = False
    except KeyboardInterrupt as stop:
        interrupts.open = False
        _say(str(stop) or "interrupted.")
        code = 130
    finally:
        interrupts.open = False
        if restore is not None and arguments is not None:
            restore()
    return code


def _take_signals(interrupts: Interrupts) -> Callable[[], None] | None:
    """Handle termination like Ctrl-C; return a function that restores the handlers.

    Ignored signals stay ignored: SIGINT in a background shell, SIGHUP under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return install(
        interrupts, *(number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN)
    )


def _end_at_once() -> NoReturn:
    """Exit immediately; files are written atomically, so none is damaged."""
    os.write(2, b"simfbo: ended at once. Resume from the last checkpoint with --resume.\n")
    os._exit(130)


def _call(words: Sequence[str]) -> int:
    """Run a command; print errors, and return the exit code."""
    _show_warnings_as_sentences()
    output.prepare()
    # A fixed pool size, so that results do not depend on the number of cores: as many as the
    # engine has lanes. XLA reads it when JAX is first used.
    os.environ.setdefault("PJRT_NPROC", "2")
    try:
        with output.complete():
            return _run(words)
    except ResumableError as error:  # its own text is for Python
        return _say(f"{error.advice} continue the run with --resume.")
    except UserError as error:
        return _say(str(error))
    except output.Gone:
        return 128 + signal.SIGPIPE
    except Exception as error:
        if os.environ.get("SIMFBO_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            return _say(unusable(error))
        text = " ".join(str(error).split())[:500]
        _say(f"failed: {type(error).__name__}: {text} (set SIMFBO_TRACEBACK=1 to see where).")
        return 1


def _run(words: Sequence[str]) -> int:
    """Parse the arguments, run the command, and return its exit code."""
    parser = build_parser(words[0] if words and words[0] in _COMMANDS else None)
    options = parser.parse_args(words)
    if getattr(options, "json", False):
        from simfbo.cli.console import json_only

        with json_only():
            return options.command(options)
    if hasattr(options, "command"):
        return options.command(options)
    parser.print_help()
    return 2


def _say(sentence: str) -> int:
    """Print a sentence to stderr if possible; return the exit code of invalid input."""
    with contextlib.suppress(OSError):
        print(f"simfbo: {sentence}", file=sys.stderr)
    return 2


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of one command, or one that only lists the commands."""
    description = "Federated bilevel optimisation: run, measure, compare."
    parser = _Parser(prog="simfbo", description=description)
    parser.add_argument("--version", action="version", version=f"simfbo {simfbo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == command:
            module = _module(name)
            subparser.epilog = getattr(module, "EPILOG", None)
            subparser.set_defaults(command=module.call)
            module.add_arguments(subparser)
    return parser


def _module(name: str) -> ModuleType:
    """Import the module of a command."""
    try:
        return importlib.import_module(f"simfbo.cli.{name}")
    except ModuleNotFoundError as error:  # pydantic, rich or tomli_w
        raise UserError(missing(str(error.name), "cli")) from None


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as a `UserError`."""
        kind, _, words = message.partition("unrecognized arguments: ")
        if words and not kind:
            raise UserError(self._unknown_flag(words))
        if match := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            choices = re.findall(r"[\w-]+", match[2])
            hint = _closest(match[1], choices) or f"Use {', '.join(choices)}."
            flag = re.match(r"argument (--[\w-]+)", message)
            noun = f"value of {flag[1]}" if flag else "command"
            raise UserError(f"Unknown {noun} '{plain(match[1])}'. {hint}")
        raise UserError(f"{plain(message.removeprefix('argument '), 250)}.")

    def _unknown_flag(self, words: str) -> str:
        """Return the message for an unknown flag or argument."""
        name = words.split("=")[0].split()[0]
        if not name.startswith("-"):
            return f"'{plain(words)}' is one argument too many. See {self.prog} COMMAND --help."
        flags = [flag for parser in _parsers(self) for flag in parser._option_string_actions]
        hint = _closest(f"--{name.lstrip('-')}", flags) or f"See {self.prog} COMMAND --help."
        return f"Unknown flag '{plain(name)}'. {hint}"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands."""
    yield parser
    for action in parser._actions:
        choices = action.choices if isinstance(action.choices, dict) else {}
        for inner in choices.values():
            yield from _parsers(inner)


def _closest(word: str, known: Iterable[str]) -> str:
    """Suggest a similar known word, if there is one."""
    close = difflib.get_close_matches(word[:80].lower(), list(known), 1)
    return f"Did you mean '{close[0]}'?" if close else ""


def _show_warnings_as_sentences() -> None:
    """Print warnings in the style of the command line."""

    def show(message: object, *rest: object) -> None:
        _say(str(message))

    warnings.showwarning = show


if __name__ == "__main__":
    sys.exit(main())
