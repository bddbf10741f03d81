"""Workers that take turns: how benchmarks start them, ask them and serve in them.

Every implementation runs in a process of its own, pinned to the same cores. The workers take turns
within a minute, some rounds in one go each, so that whatever else the machine does hits all of
them. A turn gives processor and wall time per round; the medians over turns count, and their
ratios.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

Case = dict[str, Any]
Rounds = Callable[[int], Any]
REST = 0.4  # OpenMP threads of the one before spin for up to 0.2 s


def start(
    case: Case, implementation: str, threads: int, script: Path, folder: Path | None = None
) -> subprocess.Popen:
    """Start a worker pinned to as many cores as it has threads.

    Args:
        case: what to run.
        implementation: of the rounds.
        threads: cores and threads.
        script: the worker's file, which calls `serve`.
        folder: the checkout whose simfbo it imports; the installed one by default.
    """
    wanted = {**case, "implementation": implementation, "threads": threads}
    return launch([str(script), json.dumps(wanted)], threads, _library_threads(wanted), folder)


def launch(
    command: Sequence[str], threads: int, library_threads: int, folder: Path | None = None
) -> subprocess.Popen:
    """Start Python with these arguments, pinned to as many cores as it has threads."""
    limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | dict.fromkeys(limits, str(library_threads))
    if folder is not None:
        environment["PYTHONPATH"] = str(folder / "src")
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip


def _library_threads(case: Case) -> int:
    """Return the threads of BLAS: one for NumPy's tiny products, which two make 70 times slower."""
    tiny = case["implementation"].startswith("numpy") and case["problem"] != "mlp"
    return 1 if tiny else case["threads"]


def ask(worker: subprocess.Popen, rounds: int) -> dict[str, Any]:
    """Return what a worker measures in that many rounds."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{rounds}\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("A worker died; its message stands above.")
    return json.loads(line)


def measure(
    case: Case, begin: dict[str, Callable[[], subprocess.Popen]], turns: int, scale: float
) -> dict[str, Any]:
    """Return the median times of every implementation of a case.

    Args:
        case: its `rounds` are those of a turn, unless it has a number for the implementation.
        begin: by name of the implementation, what starts its worker.
        turns: of each implementation.
        scale: factor on the rounds.
    """
    rounds = {name: rounds_of(case, name, scale) for name in begin}
    workers = {}
    for name in begin:  # each compiles and warms up alone, with a run of the same length
        workers[name] = begin[name]()
        ask(workers[name], rounds[name])
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in begin}
    for _ in range(turns):
        for name, worker in workers.items():
            time.sleep(REST)
            answers[name].append(ask(worker, rounds[name]))
    for worker in workers.values():
        worker.communicate()
    return {name: summary(answers[name], rounds[name]) for name in begin}


def rounds_of(case: Case, name: str, scale: float) -> int:
    """Return the rounds in a turn of an implementation."""
    return max(1, round(scale * case.get(name, case["rounds"])))


def summary(answers: Sequence[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Return the medians over turns, in milliseconds per round."""
    last = answers[-1]
    return {
        "cpu_ms": round(1e3 * median(a["cpu"] for a in answers), 4),
        "wall_ms": round(1e3 * median(a["wall"] for a in answers), 4),
        **{f"{name}_mb": round(last[name] / 1e6) for name in ("peak", "built") if name in last},
        "rounds": rounds,
        **({"notes": last["notes"]} if last.get("notes") else {}),
    }


def machine(*packages: str) -> dict[str, Any]:
    """Return what results say about the machine, Python and these packages."""
    found = {package: found for package in packages if (found := installed(package))}
    versions = {"python": platform.python_version(), **found}
    return {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "versions": versions}


def installed(package: str) -> str | None:
    """Return the version of a package, if it is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def serve(build: Callable[[Case, list[str]], Rounds]) -> None:
    """Answer `ask` in a worker: run that many rounds for every line on standard input.

    Args:
        build: (case, notes) -> what runs a number of rounds from the same start; it may add notes,
            which appear in the results.
    """
    notes: list[str] = []
    rounds = build(json.loads(sys.argv[1]), notes)
    built = {"built": _peak(), "notes": notes}  # the memory that the data took before any round
    for line in sys.stdin:
        print(json.dumps(_answer(rounds, int(line)) | built), flush=True)


def _answer(rounds: Rounds, count: int) -> dict[str, Any]:
    """Return the seconds per round of that many rounds, and the peak memory so far."""
    wall, cpu = time.perf_counter(), time.process_time()
    rounds(count)
    return {
        "wall": (time.perf_counter() - wall) / count,
        "cpu": (time.process_time() - cpu) / count,  # of all threads
        "peak": _peak(),
    }


def _peak() -> int:
    """Return the peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
