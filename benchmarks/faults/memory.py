"""Let 10,000 clients take part in each of 100 rounds, and watch the memory.

    python benchmarks/faults/memory.py         (about 6 minutes)

MNIST perceptron, 6 images a client, full batches. (Where replies are refused, the history grows by
0.3 kB each, in memory too.)
"""

import json
import resource
import tempfile
import time
from pathlib import Path

from simfbo.config.build import build, run_built
from simfbo.config.build_task import build_task
from simfbo.config.run import load

HERE = Path(__file__).parent
SETTINGS = {
    "task.name": "hyper-representation",
    "task.dataset": "mnist",
    "task.clients": 10_000,
    "task.batch_size": "full",
    "sampling.kind": "everyone",
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
        history = run_built(build(config, task), Path(folder), on_round)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    found = {
        "clients": 10_000,
        "rounds": history.records[-1]["round"],
        "peak_mb": round(peak),
        "mb_by_round": {t: used[t] for t in (1, 10, 25, 50, 75, 100)},
        "seconds": round(time.monotonic() - begin),
    }
    (HERE / "results" / "memory.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
