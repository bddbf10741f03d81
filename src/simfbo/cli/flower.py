"""The arguments of `simfbo flower`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simfbo.cli import arguments as flags
from simfbo.errors import UserError

_EXAMPLES = """examples:
  simfbo flower up --nodes 3                     a whole federation on this machine
  simfbo flower run examples/flower_app          train on it
  simfbo flower down

  simfbo flower certs --host server.example.org --nodes 2     for several machines
  simfbo flower up --host server.example.org --nodes 0        on the server
  simfbo flower up --join server.example.org:9300 --node 1 --parts 2     on the first node

docs/how-to-deploy.md goes through it step by step.
"""


def add_flower(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `flower`."""
    parser.epilog = _EXAMPLES
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_certs(_command(commands, "certs", "make certificates and node keys"))
    _add_up(_command(commands, "up", "start a SuperLink and nodes on this machine, supervised"))
    _add_run(_command(commands, "run", "train with an app on the federation that is up"))
    admit = _command(commands, "admit", "let a node join, by its public key")
    admit.add_argument("key", type=Path, help="its public key, as node-4.pub")
    _command(commands, "status", "show processes, nodes and runs")
    _command(commands, "down", "end all of it")


def ask_which(options: argparse.Namespace) -> int:
    """Raise, since no command was named."""
    raise UserError("Say what to do: certs, up, admit, run, status or down (simfbo flower --help).")


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Return the parser of one command."""
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=_call(name))
    parser.add_argument("--folder", type=Path, default=Path("federation"), metavar="DIR",
                        help="the federation's folder (default: federation)")  # fmt: skip
    return parser


def _add_certs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", action="append", default=[], metavar="NAME",
        help="name or address by which nodes reach the server; repeatable")  # fmt: skip
    add("--nodes", type=_positive, default=3, metavar="K", help="how many keys (default 3)")
    add("--new", action="store_true", help="replace those there are")


def _add_up(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=_count, default=3, metavar="K", help="nodes on this machine (default 3)")
    add("--parts", type=_positive, metavar="N",
        help="how many nodes share the clients in all (default: those here)")  # fmt: skip
    add("--port", type=_port, default=9300, metavar="P",
        help="of the SuperLink; node k takes P + k (default 9300)")  # fmt: skip
    add("--host", action="append", default=[], metavar="NAME", help="listen to other machines too, "
        "which know this one by that name; repeatable")  # fmt: skip
    add("--join", metavar="HOST:PORT", help="start one node only, for a SuperLink elsewhere")
    add("--node", type=_positive, metavar="K", help="which node this is, with --join")
    add("--node-config", default="", metavar="TEXT",
        help="told to load_client, as \"data='/srv/data'\"")  # fmt: skip
    add("--insecure", action="store_true", help="without TLS and node keys, for a first try")
    add("--stock", action="store_true", help="Flower's own, slower SuperNode and SuperExec")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("app", type=Path, help="folder of the app, as examples/flower_app")
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of the app's [tool.flwr.app.config]; repeatable")  # fmt: skip
    add("--output", type=Path, metavar="DIR", help="folder of the run (default: under runs)")
    add("--resume", type=Path, metavar="DIR", help="go on with the run in this folder")
    add("--retries", type=_count, default=3, metavar="N",
        help="how often to go on by itself if the server's process dies (default 3)")  # fmt: skip


def _call(name: str) -> Callable[[argparse.Namespace], int]:
    """Return a command that is imported when it is called."""

    def call(options: argparse.Namespace) -> int:
        try:
            from simfbo.flower.ops import control as command
            from simfbo.flower.ops import training
        except ImportError:
            raise UserError("Flower is not installed: pip install 'simfbo[flower]'.") from None
        return getattr(training if name == "run" else command, name)(options)

    return call


def _count(text: str) -> int:
    """Return a whole number from 0 to 1,000."""
    return _between(text, 0, 1000)


def _positive(text: str) -> int:
    """Return a whole number from 1 to 1,000."""
    return _between(text, 1, 1000)


def _port(text: str) -> int:
    """Return a port that leaves room for the nodes' above it."""
    return _between(text, 1024, 64_000)


def _between(text: str, low: int, high: int) -> int:
    number = flags.whole(text)
    if not low <= number <= high:
        raise argparse.ArgumentTypeError(f"'{text}' is not between {low} and {high}")
    return number
