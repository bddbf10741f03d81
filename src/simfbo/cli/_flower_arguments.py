"""The arguments of the commands of `simfbo flower`."""

import argparse
import re
from pathlib import Path

from simfbo.cli.arguments import add_track, whole


def add_new(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `flower new`."""
    parser.add_argument("app", type=Path, metavar="NAME", help="folder to create")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--estimator",
        choices=("FederatedLogistic", "FederatedRidge"),
        default="FederatedLogistic",
        help="the model to train (default: FederatedLogistic)",
    )
    model.add_argument(
        "--losses",
        dest="estimator",
        action="store_const",
        const="losses",
        help="two losses to change, in place of an estimator",
    )


def add_certs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `flower certs`."""
    add = parser.add_argument
    add(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="name or address by which nodes reach the server; repeatable",
    )
    add("--nodes", type=_positive, default=3, metavar="K", help="number of node keys (default 3)")
    replace = parser.add_mutually_exclusive_group()
    replace.add_argument(
        "--renew",
        action="store_true",
        help="replace those that are used here, also while runs go on",
    )
    replace.add_argument("--new", action="store_true", help="replace all, and begin anew")


def add_up(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `flower up`."""
    add = parser.add_argument
    add("--nodes", type=_count, default=3, metavar="K", help="nodes on this machine (default 3)")
    add(
        "--parts",
        type=_positive,
        metavar="N",
        help="total number of nodes that share the clients (default: those here)",
    )
    add(
        "--port",
        type=_port,
        default=9300,
        metavar="P",
        help="port of the SuperLink; node k uses P + k (default 9300)",
    )
    add(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="also listen to other machines, which know this one by that name; repeatable",
    )
    add("--join", metavar="HOST:PORT", help="start one node only, for a SuperLink elsewhere")
    add("--node", type=_positive, metavar="K", help="the number of this node, with --join")
    add(
        "--node-config",
        default="",
        metavar="TEXT",
        help="settings passed to load_client, such as \"data='/srv/data'\"",
    )
    add(
        "--only-apps",
        type=_digests,
        default=[],
        metavar="DIGEST[,DIGEST]",
        help="the nodes here run these apps only (simfbo flower digest APP)",
    )
    add("--insecure", action="store_true", help="without TLS and node keys, on this machine only")
    add("--stock", action="store_true", help="use Flower's own, slower SuperNode and SuperExec")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `flower run`."""
    add = parser.add_argument
    add("app", type=Path, help="folder of the app, such as examples/flower_app")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the app's [tool.flwr.app.config]; repeatable",
    )
    add("--output", type=Path, metavar="DIR", help="folder of the run (default: under runs)")
    add("--resume", type=Path, metavar="DIR", help="resume the run in this folder")
    add(
        "--retries",
        type=_count,
        default=3,
        metavar="N",
        help="how often to resume if the server's process dies (default 3)",
    )
    add_track(parser)


def _digests(text: str) -> list[str]:
    """Parse comma-separated digests."""
    digests = text.lower().split(",")
    if not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests):
        raise argparse.ArgumentTypeError("write digests as 'simfbo flower digest APP' prints them")
    return digests


def _count(text: str) -> int:
    """Parse a whole number from 0 to 1,000."""
    return _between(text, 0, 1000)


def _positive(text: str) -> int:
    """Parse a whole number from 1 to 1,000."""
    return _between(text, 1, 1000)


def _port(text: str) -> int:
    """Parse a port that leaves room for the nodes' ports above it."""
    return _between(text, 1024, 64_000)


def _between(text: str, low: int, high: int) -> int:
    number = whole(text)
    if not low <= number <= high:
        raise argparse.ArgumentTypeError(f"'{text}' is not between {low} and {high}")
    return number
