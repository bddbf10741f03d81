"""`simfbo flower`: a federation of processes or machines, and runs on it."""

import argparse
import importlib
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from simfbo.cli import _flower_arguments
from simfbo.cli._flower_lines import Lines, RunBar
from simfbo.cli.arguments import add_json
from simfbo.cli.console import OUT, interrupted, print_json, progress_bar
from simfbo.errors import MissingExtra, UserError, missing, plain
from simfbo.runs.files import Json
from simfbo.runs.trackers.tracking import Tracking, used_before

EPILOG = """examples:
  simfbo flower new demo                         an app to change, in the folder demo
  simfbo flower up --nodes 3                     a federation on this machine
  simfbo flower run demo                         train on it
  simfbo flower down

  simfbo flower certs --host server.example.org --nodes 2     for several machines
  simfbo flower up --host server.example.org --nodes 0        on the server
  simfbo flower up --join server.example.org:9300 --node 1 --parts 2     on the first node

docs/how-to-deploy.md explains it step by step.
"""
_NODE_CONFIG = re.compile(r"""\s*([\w-]+=('[^']*'|"[^"]*"|[^\s'"]+)\s*)*""")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `flower`."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _flower_arguments.add_new(
        _command(commands, "new", "create an app that can be run at once", _new)
    )
    _flower_arguments.add_certs(
        _command(commands, "certs", "create or renew certificates and keys", _certs)
    )
    _flower_arguments.add_up(
        _command(commands, "up", "start a SuperLink and nodes on this machine", _up)
    )
    _flower_arguments.add_run(
        _command(commands, "run", "train with an app on a running federation", _run)
    )
    admit = _command(commands, "admit", "admit a node by its public key", _admit)
    admit.add_argument(
        "key",
        type=Path,
        help="its public key, such as node-4.pub; a key of the same name is replaced",
    )
    manage = _command(
        commands, "operators", "add, list and revoke those who may start runs", _operators
    )
    manage.add_argument("action", choices=("add", "list", "revoke"))
    manage.add_argument(
        "name",
        nargs="?",
        metavar="NAME|KEY.pub",
        help="the operator; add creates a key, or takes a public one",
    )
    digest = _command(commands, "digest", "print the digest of an app, for --only-apps", _digest)
    digest.add_argument("app", type=Path, help="folder of the app")
    add_json(_command(commands, "status", "show processes, nodes, runs and open ports", _status))
    _command(commands, "down", "stop all processes", _down)


def call(options: argparse.Namespace) -> int:
    """Raise, since a subcommand is required."""
    names = "new, certs, up, admit, operators, digest, run, status or down"
    raise UserError(f"Name a command: {names} (simfbo flower --help).")


def _command(
    commands: Any, name: str, text: str, function: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add the parser of one command."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(command=partial(_with_home, function))
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("federation"),
        metavar="DIR",
        help="folder of the federation (default: federation)",
    )
    return parser


def _with_home(function: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command; without a home folder, Flower's files go to the federation's folder."""
    if not Path(os.path.expanduser("~")).is_absolute():
        os.environ.setdefault("FLWR_HOME", str(options.folder.absolute() / "flwr"))
    return function(options)


def _new(options: argparse.Namespace) -> int:
    """Create an app."""
    app = options.app
    files = _ops("new_app").create(app, options.estimator)
    OUT.print(
        f"Created {app}: {', '.join(file for file in files if '/' not in file)} and synthetic "
        f"rows in data. Next: 'simfbo flower up --nodes 3', then 'simfbo flower run {app}'; "
        f"{app / 'README.md'} says what to change."
    )
    return 0


def _certs(options: argparse.Namespace) -> int:
    """Create or renew certificates and keys."""
    credentials = _ops("credentials")
    if options.renew:
        return _renew(options)
    created = credentials.create_certificates(
        options.folder, options.host, options.nodes, options.new
    )
    OUT.print(f"Created {', '.join(created)}." if created else "Nothing was missing.")
    OUT.print(
        f"Everything is in {options.folder.resolve()}. A node's machine needs certificates/ca.crt "
        "and its own keys/node-K; ca.key, server.key and operators must stay here."
    )
    _warn(options.folder)
    return 0


def _renew(options: argparse.Namespace) -> int:
    """Replace certificates and keys."""
    renewed = _ops("credentials").renew(options.folder)
    OUT.print(f"Renewed {', '.join(renewed)}.")
    layout = _ops("folder").Layout(options.folder.resolve())
    if layout.setup.exists() and not layout.read_setup().link:
        OUT.print(
            "Send the new keys/node-K.pub to the server, where an operator admits it with "
            "'simfbo flower admit'. The node then uses its new key."
        )
    _warn(options.folder)
    return 0


def _up(options: argparse.Namespace) -> int:
    """Start processes."""
    control, setup = _ops("control"), _setup(options)
    with progress_bar(quiet=not OUT.is_terminal) as progress:
        bar = progress.add_task("", total=len(setup.nodes) + setup.link)

        def show(done: int, waiting_for: str) -> None:
            progress.update(bar, completed=done, description=f"Starting {waiting_for}")

        control.up(options.folder, setup, options.host, show)
    address = f"SuperLink at {setup.address}" if setup.link else f"joined {setup.address}"
    security = "without TLS" if setup.insecure else "with TLS and node keys"
    nodes_text = f"{len(setup.nodes)} node{'' if len(setup.nodes) == 1 else 's'} here"
    OUT.print(
        f"Up: {address}, {nodes_text}, {security}. Logs are in {options.folder.resolve() / 'logs'}."
    )
    layout = _ops("folder").Layout(options.folder.resolve())
    _print_listening(control.listening(layout, setup))
    _warn(options.folder)
    return 0


def _warn(folder: Path) -> None:
    """Print a warning for every certificate that expires soon."""
    tools = _ops("folder")
    layout = tools.Layout(folder.resolve())
    link = not layout.setup.exists() or layout.read_setup().link
    for sentence in layout.expiring(link):
        OUT.print(f"Warning: {sentence}")


def _admit(options: argparse.Namespace) -> int:
    """Admit a node."""
    OUT.print(f"Admitted {_ops('credentials').admit(options.folder, options.key)}.")
    return 0


def _operators(options: argparse.Namespace) -> int:
    """Add, list or revoke operators."""
    operators, folder = _ops("operators"), options.folder.resolve() / "operators"
    if options.action == "list":
        _print_table(
            "operators", ("operator", "fingerprint", "private key"), operators.listed(folder)
        )
        return 0
    if options.name is None:
        raise UserError(f"Name the operator: simfbo flower operators {options.action} NAME.")
    if options.action == "add":
        _ops("credentials").create_folder(_ops("folder").Layout(folder.parent))
        name = operators.add(folder, options.name)
        OUT.print(f"Operator {name} may start, stop and watch runs. Keys are in {folder}.")
    else:
        operators.revoke(folder, options.name)
        OUT.print(f"Revoked {options.name}, also for a SuperLink that is running.")
    return 0


def _digest(options: argparse.Namespace) -> int:
    """Print an app's digest."""
    OUT.print(_ops("control_api").digest(options.app), soft_wrap=True)
    return 0


def _down(options: argparse.Namespace) -> int:
    """Stop all processes."""
    stopped = _ops("control").down(options.folder)
    OUT.print("Down." if stopped else f"Nothing is running in {options.folder.resolve()}.")
    return 0


def _status(options: argparse.Namespace) -> int:
    """Show processes, nodes and runs."""
    status = _ops("control").status(options.folder)
    if options.json:
        print_json({"up": status is not None, **({} if status is None else status._asdict())})
        return 0 if status else 1
    if status is None:
        OUT.print(f"Down: nothing is running in {options.folder.resolve()}.")
        return 1
    rows = [
        {"process": name, "pid": process["pid"] or "restarting", "starts": process["starts"]}
        for name, process in status.processes.items()
    ]
    _print_table("processes", ("process", "pid", "starts"), rows)
    if status.nodes is not None:  # only on the server
        _print_table("nodes", ("node-id", "key", "status", "online-elapsed"), status.nodes)
        _print_table("runs", ("run-id", "status", "elapsed", "app"), status.runs)
    _print_listening(status.listening)
    for sentence in status.expiring:
        OUT.print(f"Warning: {sentence}")
    return 0


def _run(options: argparse.Namespace) -> int:
    """Train with an app."""
    follow, settings = _ops("follow"), dict(map(_assignment, options.set))
    run = follow.prepare(options.folder, options.app, settings, options.output, options.resume)
    if run.end is not None and run.end["status"] == "finished":
        OUT.print(f"The run in {run.folder} is already finished.")
        return 0
    _warn(options.folder)
    track = options.track or used_before(run.folder)
    try:
        with Tracking(track, run.folder) as tracking, RunBar() as bar:
            lines = Lines(run.folder, tracking, bar)
            end = follow.train(run, options.retries, lines.show, OUT.print)
            tracking.artefact(run.history)
            tracking.finish((end or {"status": "failed"})["status"])
    except KeyboardInterrupt:
        raise interrupted(run.folder, f"flower run {options.app}") from None
    return _print_end(run.folder, end)


def _print_end(folder: Path, end: Json | None) -> int:
    """Print how a run ended, and return the exit code."""
    if count := (end or {}).get("warnings"):
        OUT.print(f"{count} warning{'s' * (count > 1)} of clients whose messages stand out, above.")
    if end is not None and end["status"] == "finished":
        OUT.print(f"Finished. History and checkpoints are in {folder}; simfbo report draws them.")
        return 0
    outcome = "was cut off" if end is None else f"ended as {end['status']}: {end.get('reason', '')}"
    OUT.print(f"The run {outcome.rstrip('.: ')}. Resume it with --resume {folder}.")
    return 1


def _print_listening(rows: Sequence[Json]) -> None:
    """Print the addresses that are listened on, and the required credentials."""
    _print_table("ports", ("listening on", "with", "for", "who must have"), rows)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Json]) -> None:
    """Print some columns of a table."""
    table = Table(*columns, box=None, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    OUT.print(table if rows else f"no {title}")


def _setup(options: argparse.Namespace) -> Any:
    """Build the setup from the flags of `up`."""
    if not _NODE_CONFIG.fullmatch(options.node_config):
        raise UserError("Write --node-config as \"data='/srv/data' site=3\": names and values.")
    folder = _ops("folder")
    nodes = list(range(1, options.nodes + 1)) if options.join is None else [options.node]
    parts = options.parts or max(1, len(nodes))
    if options.join is not None:
        folder.local_port(options.join)
        if options.node is None or options.parts is None or options.node > parts:
            raise UserError(
                "--join needs the number of this node and of all nodes, such as --node 2 --parts 3."
            )
    elif parts < len(nodes):
        raise UserError(f"{len(nodes)} nodes cannot share {parts} parts: raise --parts.")
    _require_safe(options)
    return folder.Setup(
        link=options.join is None,
        address=options.join or f"127.0.0.1:{options.port}",
        host="0.0.0.0" if options.host else "127.0.0.1",
        nodes=nodes,
        parts=parts,
        node_config=options.node_config,
        base_port=options.port,
        insecure=options.insecure,
        stock=options.stock,
        only_apps=options.only_apps,
    )


def _require_safe(options: argparse.Namespace) -> None:
    """Raise if flags contradict each other in security."""
    local = options.join is None or re.match(r"(127\.|localhost:|\[::1\]:)", options.join)
    if options.insecure and (options.host or not local):
        raise UserError("--insecure works on this machine only: omit it, or --host and --join.")
    if options.stock and options.only_apps:
        raise UserError("Flower's own nodes have no list of apps: omit --stock or --only-apps.")


def _assignment(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set takes KEY=VALUE, got '{plain(text)}'.")
    return key, value


def _ops(name: str) -> Any:
    """Import a module of `simfbo.flower.ops`, which needs the extra `flower`."""
    try:
        return importlib.import_module(f"simfbo.flower.ops.{name}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("simfbo"):
            raise
        raise MissingExtra(missing("flwr", "flower")) from None
