"""Flower's own command line, `flwr`, on a federation: register nodes, list, start and stop runs."""

import json
import re
import subprocess
import time
from pathlib import Path

from simfbo.errors import UserError
from simfbo.flower.ops.folder import CONNECTION, Layout, environment
from simfbo.runs.files import Json

_RECOVERY = 120.0  # seconds for a SuperLink to come back


def register(layout: Layout, key: Path) -> None:
    """Register a node's public key unless it is registered."""
    answer = _flwr(layout, "supernode", "register", str(key), CONNECTION)
    text = answer.stdout + answer.stderr
    if answer.returncode and "already" not in text:
        raise UserError(f"{key} could not be registered: {_shortened(text)}")


def list_nodes(layout: Layout) -> list[Json]:
    """Return the nodes that the SuperLink knows."""
    return _read_json(layout, "supernode", "list", CONNECTION).get("nodes", [])


def list_runs(layout: Layout) -> list[Json]:
    """Return the runs that the SuperLink knows."""
    return _read_json(layout, "list", CONNECTION).get("runs", [])


def start_run(layout: Layout, app: Path, config: Path) -> str:
    """Start a run of an app with a TOML file of settings; return its number."""
    words = ["run", str(app), CONNECTION, "--format", "json", "--run-config", str(config)]
    answer = _flwr(layout, *words)
    try:
        return str(json.loads(answer.stdout[answer.stdout.index("{") :])["run-id"])
    except (ValueError, KeyError):
        text = re.sub(r"[╭╮╰╯│─]", " ", answer.stdout + answer.stderr)
        raise UserError(f"Flower rejected the run: {_shortened(text)}") from None


def stop_run(layout: Layout, run: str) -> None:
    """Stop a run."""
    _flwr(layout, "stop", run, CONNECTION)


def is_over(layout: Layout, run: str) -> bool:
    """Return whether a run is over, as soon as the SuperLink can be reached."""
    deadline = time.monotonic() + _RECOVERY
    while time.monotonic() < deadline:
        answer = _flwr(layout, "list", CONNECTION, "--run-id", run, "--format", "json")
        try:
            return str(json.loads(answer.stdout)["runs"][0]["status"]).startswith("finished")
        except (ValueError, KeyError, IndexError):
            time.sleep(1)
    raise UserError("The SuperLink no longer responds: see 'simfbo flower status'.")


def stream_log(layout: Layout, run: str) -> subprocess.Popen[str]:
    """Start to print the log of a run's server, from its beginning."""
    return subprocess.Popen(
        ["flwr", "log", run, CONNECTION, "--stream"],
        env=environment(layout),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _flwr(layout: Layout, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of Flower's commands; Ctrl-C in the terminal does not reach it."""
    return subprocess.run(
        ["flwr", *words],
        env=environment(layout),
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


def _read_json(layout: Layout, *words: str) -> Json:
    """Return what one of Flower's commands prints as JSON."""
    answer = _flwr(layout, *words, "--format", "json")
    try:
        return json.loads(answer.stdout)
    except ValueError:
        text = _shortened(answer.stdout + answer.stderr)
        raise UserError(f"'flwr {' '.join(words)}' failed: {text}") from None


def _shortened(text: str) -> str:
    """Return the end of a command's output, on one line."""
    return " ".join(text.split())[-400:]
