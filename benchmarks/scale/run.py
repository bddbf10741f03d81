"""Measure time and memory of a SimFBO round against the number of clients and the cohort.

    python benchmarks/scale/run.py         (about 1 minute)

The same worker as benchmarks/round_speed, MNIST perceptron, batch 64, one local step, two threads.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "round_speed"))

from run import measure  # noqa: E402

BASE = {"model": "mlp", "tau": 1, "threads": 2, "implementations": ("simfbo",)}
CASES = {
    **{f"n={n:,}, P=10": {"clients": n, "cohort": 10, "rounds": 40} for n in (100, 1000, 10_000)},
    **{
        f"n=10,000, P={size:,}": {"clients": 10_000, "cohort": size, "rounds": rounds}
        for size, rounds in ((100, 8), (1000, 2))
    },
    "n=10,000, P=1,000, 1,000,000 distinct images": {
        "clients": 10_000, "cohort": 1000, "rounds": 2, "images": 100, "pool": 1_000_000,
    },
}  # fmt: skip


def main() -> None:
    """Measure every case; print a table and write results.json."""
    results = {}
    print("| case | wall ms a round | ms a client | peak MB |\n|---|---|---|---|")
    for name, case in CASES.items():
        found = results[name] = measure({**BASE, **case}, blocks=4)["simfbo"]
        each = found["wall_ms"] / case["cohort"]
        print(f"| {name} | {found['wall_ms']:.1f} | {each:.2f} | {found['peak_mb']} |", flush=True)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
