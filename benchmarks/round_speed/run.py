"""Measure the speed of a SimFBO round against PyTorch and NumPy, interleaved, and write results.

    python benchmarks/round_speed/run.py              all cases (about 10 minutes)
    python benchmarks/round_speed/run.py --only mlp-tau1-threads2 --blocks 5

Every implementation runs in a process of its own, pinned to the same cores. They take turns, a
block of rounds each, so that whatever else the machine does hits all of them; the median of all
rounds counts. The ratios are what matters.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
MLP = ("simfbo", "torch", "torch-merged", "numpy")
CASES = {
    **{
        f"mlp-tau{tau}-threads{threads}": {
            "model": "mlp", "tau": tau, "threads": threads, "implementations": MLP,
            "rounds": 40 if tau == 1 else 6,
        }
        for threads in (1, 2)
        for tau in (1, 5, 10, "random")
    },
    **{
        f"cnn-tau{tau}-threads{threads}": {
            "model": "cnn", "tau": tau, "threads": threads, "rounds": 3 if tau == 1 else 1,
            "implementations": ("simfbo", "torch", "torch-channels-last"),
        }
        for threads in (1, 2)
        for tau in (1, 5)
    },
}  # fmt: skip


def start(case: dict[str, Any], implementation: str) -> subprocess.Popen:
    """Return a worker pinned to as many cores as the case has threads."""
    threads = case["threads"]
    warm = 1 + case["rounds"] // 4  # rounds that wake a process up before its turn is timed
    wanted = {"clients": 100, "images": 600, "pool": 60_000, "cohort": 10, "warm": warm}
    wanted |= {**case, "implementation": implementation}
    limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | dict.fromkeys(limits, str(threads))
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return subprocess.Popen(
        [sys.executable, str(HERE / "worker.py"), json.dumps(wanted)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip


def ask(worker: subprocess.Popen, rounds: int) -> dict[str, Any]:
    """Return the times of that many rounds of one worker."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{rounds}\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("A worker died; its message stands above.")
    return json.loads(line)


def measure(case: dict[str, Any], blocks: int) -> dict[str, dict[str, float]]:
    """Return the median wall and CPU milliseconds of every implementation."""
    workers = {name: start(case, name) for name in case["implementations"]}
    found: dict[str, dict[str, list[float]]] = {n: {"wall": [], "cpu": []} for n in workers}
    peaks = {}
    for block in range(blocks + 1):
        for name, worker in workers.items():
            time.sleep(0.4)  # OpenMP threads of the one before spin for up to 0.2 s
            times = ask(worker, case["rounds"])
            peaks[name] = times["peak"]
            if block:  # the first block warms up
                found[name]["wall"] += times["wall"]
                found[name]["cpu"] += times["cpu"]
    for worker in workers.values():
        worker.communicate()
    return {
        name: {
            "wall_ms": round(1e3 * median(times["wall"]), 2),
            "cpu_ms": round(1e3 * median(times["cpu"]), 2),
            "peak_mb": round(peaks[name] / 1e6),
        }
        for name, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), help="cases to measure")
    parser.add_argument("--blocks", type=int, default=12, help="turns of each implementation")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"
    for name in options.only or CASES:
        found = results.setdefault("cases", {})[name] = measure(CASES[name], options.blocks)
        ours = found["simfbo"]["wall_ms"]
        ratios = {k: f"{v['wall_ms'] / ours:.2f}x" for k, v in found.items() if k != "simfbo"}
        print(f"{name:22} simfbo {ours:8.2f} ms   others take {ratios}", flush=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
