"""The entry point of the command line: `simfbo COMMAND ...`.

Heavy imports happen inside the commands, so that help and mistakes answer at once.
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

    That is 0 done, 1 failed, 2 wrong input or a file that cannot be used, 130 interrupted, 141
    when whoever reads the output has left, as in `simfbo data | head -1`.

    Args:
        arguments: those of the process by default, which then is about to end: signals that come
            later are ignored.
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
    """Let a terminated command end as one does after Ctrl-C; return what undoes it.

    Signals that are ignored stay so: SIGINT in a background shell, SIGHUP under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return install(interrupts, *(one for one in SIGNALS if signal.getsignal(one) != signal.SIG_IGN))


def _end_at_once() -> NoReturn:
    """End the process; files are written so that this can harm none."""
    os.write(2, b"simfbo: ended at once. Resume from the last checkpoint with --resume.\n")
    os._exit(130)


def _call(words: Sequence[str]) -> int:
    """Run a command; print what went wrong, and return the exit code."""
    _show_warnings_as_sentences()
    output.prepare()
    # One pool size on every machine, so that results do not depend on its cores: as many as the
    # engine has lanes. Read by XLA when JAX is first used.
    os.environ.setdefault("PJRT_NPROC", "2")
    try:
        with output.complete():
            return _run(words)
    except ResumableError as error:  # its own text speaks Python
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
    """Run a command, and return its exit code."""
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
    """Print a sentence to standard error, if there is one; return the exit code of wrong input."""
    with contextlib.suppress(OSError):
        print(f"simfbo: {sentence}", file=sys.stderr)
    return 2


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of one command, or one that only knows what commands there are."""
    description = "Federated bilevel optimisation: run, measure, compare."
    parser = _Parser(prog="simfbo", description=description)
    parser.add_argument("--version", action="version", version=f"simfbo {simfbo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in _COMMANDS.items():
        own = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == command:
            module = _module(name)
            own.epilog = getattr(module, "EPILOG", None)
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
        kind, _, words = message.partition("unrecognized arguments: ")
        if words and not kind:
            raise UserError(self._unknown_flag(words))
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            known = re.findall(r"[\w-]+", found[2])
            hint = _closest(found[1], known) or f"Use {', '.join(known)}."
            flag = re.match(r"argument (--[\w-]+)", message)
            what = f"value of {flag[1]}" if flag else "command"
            raise UserError(f"Unknown {what} '{plain(found[1])}'. {hint}")
        raise UserError(f"{plain(message.removeprefix('argument '), 250)}.")

    def _unknown_flag(self, words: str) -> str:
        """Return what to say of words that no argument of the command takes."""
        name = words.split("=")[0].split()[0]
        if not name.startswith("-"):
            return f"'{plain(words)}' is one argument too many. See {self.prog} COMMAND --help."
        known = [flag for one in _parsers(self) for flag in one._option_string_actions]
        hint = _closest(f"--{name.lstrip('-')}", known) or f"See {self.prog} COMMAND --help."
        return f"Unknown flag '{plain(name)}'. {hint}"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands."""
    yield parser
    for action in parser._actions:
        choices = action.choices if isinstance(action.choices, dict) else {}
        for inner in choices.values():
            yield from _parsers(inner)


def _closest(word: str, known: Iterable[str]) -> str:
    """Return 'Did you mean ...?' if a known word is close to one; else nothing."""
    close = difflib.get_close_matches(word[:80].lower(), list(known), 1)
    return f"Did you mean '{close[0]}'?" if close else ""


def _show_warnings_as_sentences() -> None:
    """Print warnings as the command line prints everything."""

    def show(message: object, *rest: object) -> None:
        _say(str(message))

    warnings.showwarning = show


if __name__ == "__main__":
    sys.exit(main())
