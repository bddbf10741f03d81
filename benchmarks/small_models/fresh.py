"""What a new process costs: the first fit in one, an import, an answer of the command line."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "peers"))
from turns import REST, ask, launch, start, summary

Times = dict[str, Any]
COMMANDS = {"import": ["-c", "import simfbo"], "help": ["-m", "simfbo.cli.main", "--help"]}


def first_fit(case: Times, folders: dict[str, Path], turns: int, script: Path) -> Times:
    """Return the times of the first fit in a process: alone, and of the process with its imports.

    Args:
        case: to be started as a worker.
        folders: the checkout of each implementation.
        turns: processes of each implementation.
        script: the worker's file.
    """

    def once(name: str, folder: Path) -> dict[str, Times]:
        alone: Times = {}

        def process() -> subprocess.Popen:
            worker = start(case, name, 1, script, folder)
            alone.update(ask(worker, 1))
            return worker

        return {"fit-first": alone, "fit-first-with-imports": _whole(process)}

    return _interleaved(once, folders, turns)


def startup(folders: dict[str, Path], turns: int) -> Times:
    """Return the times of processes that import simfbo or print its help."""

    def once(name: str, folder: Path) -> dict[str, Times]:
        return {
            f"startup-{what}": _whole(partial(launch, command, 1, 1, folder))
            for what, command in COMMANDS.items()
        }

    return _interleaved(once, folders, turns)


def _interleaved(
    once: Callable[[str, Path], dict[str, Times]], folders: dict[str, Path], turns: int
) -> Times:
    """Return medians by what was measured and by implementation; the first turn does not count."""
    answers: dict[str, dict[str, list[Times]]] = {}
    for turn in range(turns + 1):  # the first one finds no bytecode and cold files
        for name, folder in folders.items():
            time.sleep(REST)
            for what, times in once(name, folder).items():
                kept = answers.setdefault(what, {}).setdefault(name, [])
                kept += [times] if turn else []
    return {
        what: {name: summary(times, 1) for name, times in found.items()}
        for what, found in answers.items()
    }


def _whole(begin: Callable[[], subprocess.Popen]) -> Times:
    """Return the times of a process from its start to its end."""
    wall, cpu = time.perf_counter(), _children()
    process = begin()
    process.communicate()
    if process.returncode:
        raise SystemExit("A process failed; its message stands above.")
    return {"wall": time.perf_counter() - wall, "cpu": _children() - cpu}


def _children() -> float:
    """Return the processor seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
