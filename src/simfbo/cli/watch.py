"""`simfbo watch`: follow runs in a browser while they go."""

import argparse
import contextlib
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from simfbo.cli.arguments import whole
from simfbo.runs.watch import HOST, PORT, Watcher, is_local

EPILOG = """examples:
  simfbo watch runs                 all runs below runs/, new ones too
  simfbo watch runs/a runs/b        two runs in one figure"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `watch`."""
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or folders above them")
    add("--port", type=whole, default=PORT, help="port to listen on (default: %(default)s)")
    add(
        "--host",
        default=HOST,
        metavar="ADDRESS",
        help="address to listen on (default: %(default)s, this machine only)",
    )
    add("--open", action="store_true", help="open the page in a browser")


def call(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments."""
    return watch(options.runs, options.host, options.port, options.open)


def watch(runs: Sequence[Path], host: str, port: int, show: bool) -> int:
    """Serve the page until Ctrl-C."""
    with Watcher(runs, host, port) as server, contextlib.suppress(KeyboardInterrupt):
        if not is_local(host):
            print(
                f"simfbo: anyone who can reach port {server.server_port} of {host} can see "
                "these runs, their settings and logs.",
                file=sys.stderr,
            )
        print(f"Watching {', '.join(map(str, runs))} at {server.url} (Ctrl-C ends).", flush=True)
        if show:
            webbrowser.open(server.url)
        server.serve_forever()
    return 0
