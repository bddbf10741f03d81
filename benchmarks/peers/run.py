"""Measure SimFBO rounds of simfbo and of what one could use instead, interleaved; write results.

    python benchmarks/peers/run.py                     all cases
    python benchmarks/peers/run.py --only ridge-1000 mlp-10of100 --turns 5
    python benchmarks/peers/run.py --table             print the table of results.json

Every implementation runs in a process of its own, and they take turns (turns.py).
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import turns as turn
from table import table
from turns import installed

HERE = Path(__file__).parent
PACKAGES = ("jax", "numpy", "torch", "torchopt", "jaxopt")
OPTIONAL = {"torchopt-unrolled": "torchopt", "torchopt-implicit": "torchopt"}
OPTIONAL |= {"jaxopt-implicit": "jaxopt"}

TORCH = ("torch-loop", "torch-compile")


def quadratic(clients: int, dims: tuple[int, int], rounds: int, loop: int) -> dict[str, Any]:
    """Return the case of a quadratic; `loop` is the number of rounds of the loop over clients."""
    names = ("simfbo", *TORCH, "numpy", *(("soba-jax",) if clients == 1 else ()))
    shape = {"problem": "quadratic", "dims": dims, "clients": clients}
    return {**shape, "implementations": names, "rounds": rounds, "torch-loop": loop}


def ridge(clients: int, rounds: int, loop: int) -> dict[str, Any]:
    """Return the case of a ridge."""
    central = ("soba-jax",) if clients == 1 else ()
    names = ("simfbo", *TORCH, "numpy", "numpy-gram", *central)
    shape = {"problem": "ridge", "clients": clients}
    return {**shape, "implementations": names, "rounds": rounds, "torch-loop": loop}


CASES: dict[str, dict[str, Any]] = {
    "quadratic-4x6-1": quadratic(1, (4, 6), 1000, 200),
    "quadratic-4x6-20": quadratic(20, (4, 6), 1000, 40),
    "quadratic-4x6-1000": quadratic(1000, (4, 6), 200, 2),
    "quadratic-4x6-10000": quadratic(10_000, (4, 6), 50, 1),
    "quadratic-50x50-20": quadratic(20, (50, 50), 1000, 40),
    "quadratic-50x50-1000": quadratic(1000, (50, 50), 50, 2),
    "ridge-1": ridge(1, 1000, 200),
    "ridge-10": ridge(10, 1000, 80),
    "ridge-160": ridge(160, 500, 8),
    "ridge-1000": ridge(1000, 200, 2),
    "ridge-10000": ridge(10_000, 30, 1),
    "mlp-10of100": {
        "problem": "mlp", "clients": 100, "cohort": 10, "rounds": 40,
        "implementations": ("simfbo", *TORCH, "numpy"),
    },
    "mlp-1of1": {
        "problem": "mlp", "clients": 1, "cohort": 1, "rounds": 300,
        "implementations": ("simfbo", *TORCH, "numpy", "soba-jax", *OPTIONAL),
    },
    "cnn-10of100": {
        "problem": "cnn", "clients": 100, "cohort": 10, "rounds": 5,
        "implementations": ("simfbo", *TORCH, "torch-channels-last"),
    },
    "fednest-10of100": {
        "problem": "fednest", "rounds": 3, "implementations": ("simfbo", "torch-released"),
    },
}  # fmt: skip


def measure(case: dict[str, Any], turns: int, threads: int, scale: float) -> dict[str, Any]:
    """Return the median times of every implementation of a case that is installed."""
    names = [n for n in case["implementations"] if n not in OPTIONAL or installed(OPTIONAL[n])]
    begin = {n: partial(turn.start, case, n, threads, HERE / "worker.py") for n in names}
    return turn.measure(case, begin, turns, scale)


def report(name: str, found: dict[str, Any]) -> str:
    """Return a line with simfbo's processor time and the others' ratios to it."""
    ours = found["simfbo"]["cpu_ms"]
    ratios = {k: f"{v['cpu_ms'] / ours:.3g}x" for k, v in found.items() if k != "simfbo"}
    return f"{name:22} simfbo {ours:8.3f} ms of CPU; others take {ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), help="cases to measure")
    parser.add_argument("--turns", type=int, default=7, help="turns of each implementation")
    parser.add_argument("--threads", type=int, default=1, help="cores and threads of each")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on rounds per turn")
    parser.add_argument("--table", action="store_true", help="print the table; measure nothing")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.table:
        print(table(results))
        return
    results |= turn.machine(*PACKAGES)
    for name in options.only or CASES:
        found = measure(CASES[name], options.turns, options.threads, options.scale)
        cases = results.get(f"threads_{options.threads}", {})
        cases[name] = {"turns": options.turns, "implementations": found}
        results[f"threads_{options.threads}"] = {n: cases[n] for n in CASES if n in cases}
        print(report(name, found), flush=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
