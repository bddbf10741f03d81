"""Let 10,000 clients take part in each of 100 rounds, and watch the memory.

    python benchmarks/faults/memory.py         (about 3 minutes)

MNIST perceptron, 6 images a client; a tenth of the clients drops out of every round, so 1,000
replies a round are refused and written down.
"""

import json
import resource
import tempfile
import time
from pathlib import Path

from simfbo.build import build_task, run_config
from simfbo.config import load

HERE = Path(__file__).parent
SETTINGS = {
    "task.name": "hyper-representation",
    "task.dataset": "mnist",
    "task.clients": 10_000,
    "task.batch_size": "full",
    "sampling.kind": "everyone",
    "gate.drop_out": 0.1,
    "rounds": 100,
    "every": 50,
}


def resident() -> float:
    """Return the memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    """Run, watch, write results/memory.json."""
    config = load(None, SETTINGS)
    task, used = build_task(config), {}

    def on_round(t: int, record: dict | None) -> None:
        used[t] = round(resident())

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        history = run_config(config, task, Path(folder), on_round)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    found = {
        "clients": 10_000,
        "rounds": history.records[-1]["round"],
        "peak_mb": round(peak),
        "mb_by_round": {t: used[t] for t in (1, 10, 25, 50, 75, 100)},
        "refused": len(history.refusals),
        "seconds": round(time.monotonic() - begin),
    }
    (HERE / "results" / "memory.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
