"""Measure the CPU time of a FedNest iteration against PyTorch, interleaved, and write results.

    python benchmarks/fednest_speed/run.py              all implementations (about 3 minutes)
    python benchmarks/fednest_speed/run.py --check      only compare what they compute

Every implementation runs in a process of its own. They take turns, a few iterations each, so that
whatever else the machine does hits all of them; the median of all iterations counts. PyTorch has
one thread and simfbo its defaults, so compare CPU time, which is that of all threads.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from worker import build, initial

HERE = Path(__file__).parent
COMMON = {"clients": 100, "images": 600, "cohort": 10, "batch": 64, "steps": (0.01, 0.1, 0.01)}
# Five epochs of ceil(300 / 64) batches.
RELEASED = {"mode": "as_released", "local_steps": 25, "against": "simfbo"}
PAPER = {"mode": "paper", "local_steps": 5, "against": "simfbo-minibatch"}
CASES: dict[str, dict[str, Any]] = {
    "simfbo": {"reader": None, **RELEASED},
    "torch-released": {"reader": "pictures", "cancelling": True, **RELEASED},
    "torch-loader": {"reader": "loader", **RELEASED},
    "torch-tensors": {"reader": "tensors", **RELEASED},
    "simfbo-minibatch": {"reader": None, **PAPER},
    "torch-minibatch": {"reader": "minibatch", **PAPER},
}
TOLERANCE = 1e-3


def start(name: str) -> subprocess.Popen:
    """Return the worker of an implementation; PyTorch's is limited to one thread."""
    case = {**COMMON, **CASES[name], "implementation": name, "warm": 1}
    environment = dict(os.environ)
    if case["reader"]:
        limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment |= dict.fromkeys(limits, "1")
    return subprocess.Popen(
        [sys.executable, str(HERE / "worker.py"), json.dumps(case)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def ask(worker: subprocess.Popen, iterations: int) -> dict[str, Any]:
    """Return the times of that many iterations of one worker."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{iterations}\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("A worker died; its message stands above.")
    return json.loads(line)


def measure(turns: int, iterations: int) -> dict[str, dict[str, float]]:
    """Return the median CPU and wall milliseconds of every implementation."""
    workers = {}
    for name in CASES:  # each compiles and warms up alone
        workers[name] = start(name)
        ask(workers[name], 1)
    found: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": []} for name in CASES}
    for _ in range(turns):
        for name, worker in workers.items():
            time.sleep(0.2)  # the threads of the one before come to rest
            times = ask(worker, iterations)
            for kind in found[name]:
                found[name][kind] += times[kind]
    for worker in workers.values():
        worker.communicate()
    return {
        name: {f"{kind}_ms": round(1e3 * median(taken), 1) for kind, taken in times.items()}
        for name, times in found.items()
    }


def ratios(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return how many times longer each PyTorch version takes than simfbo on the same task."""
    return {
        name: {
            kind: round(found[name][f"{kind}_ms"] / found[case["against"]][f"{kind}_ms"], 2)
            for kind in ("cpu", "wall")
        }
        for name, case in CASES.items()
        if case["reader"]
    }


def table(results: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    lines = [
        "| implementation | mode | CPU, ms | wall, ms | CPU / simfbo | wall / simfbo |",
        "|---|---|---|---|---|---|",
    ]
    for name, times in results["implementations"].items():
        ratio = results["ratios"].get(name)
        shown = f"{ratio['cpu']:.2f}x | {ratio['wall']:.2f}x" if ratio else "1 | 1"
        mode = CASES[name]["mode"].replace("_", " ")
        lines.append(f"| {name} | {mode} | {times['cpu_ms']} | {times['wall_ms']} | {shown} |")
    return "\n".join(lines)


def check() -> bool:
    """Print how far PyTorch's x, y and v after an iteration are from simfbo's; return if close.

    Settings in which no random batch matters: a single local step, whose gradients cancel, or local
    batches of all samples. Steps are larger than when timed, so that every term counts. What is
    compared is the change from the common start, relative to its norm.
    """
    base = {**COMMON, "clients": 20, "steps": (0.2, 0.1, 0.1)}
    once = {**base, "mode": "as_released", "local_steps": 1}
    full = {**base, "mode": "as_released", "local_steps": 5, "batch": None}
    settings = {
        "as released, one local step": (once, ("tensors", "loader", "pictures")),
        "as released, five full-batch steps": (full, ("tensors", "loader", "pictures")),
        "paper, five full-batch steps": ({**full, "mode": "paper"}, ("tensors",)),
    }
    good = True
    for title, (case, readers) in settings.items():
        ours = _change(case | {"reader": None})
        for reader in readers:
            theirs = _change(case | {"reader": reader, "cancelling": reader == "pictures"})
            errors = [_distance(a, b) for a, b in zip(theirs, ours, strict=True)]
            good &= max(errors) < TOLERANCE
            shown = ", ".join(f"{n} {e:.1e}" for n, e in zip("xyv", errors, strict=True))
            print(f"{title:35} {reader:10} {shown}", flush=True)
    return good


def _change(case: dict[str, Any]) -> list[np.ndarray]:
    """Return by how much one iteration moves x and y, and v."""
    begin = (*initial(), None)
    end = build(case)(0)
    return [
        np.concatenate([np.asarray(leaf, float).ravel() for leaf in after])
        - (0 if before is None else np.concatenate([leaf.ravel() for leaf in before]))
        for after, before in zip(end, begin, strict=True)
    ]


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return ||a - b|| / ||b||."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare results; measure nothing")
    parser.add_argument("--turns", type=int, default=5, help="turns of each implementation")
    parser.add_argument("--iterations", type=int, default=4, help="timed iterations of a turn")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    if options.check:
        raise SystemExit(None if check() else f"They differ by more than {TOLERANCE}.")
    found = measure(options.turns, options.iterations)
    results = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("jax", "torch", "numpy")},
        },
        "turns": options.turns,
        "iterations": options.iterations,
        "implementations": found,
        "ratios": ratios(found),
    }
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
