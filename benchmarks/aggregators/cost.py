"""Time and memory of a round by aggregator: the MNIST perceptron on random images.

Times are taken in one process, the aggregators taking turns round by round; peaks of memory in a
process each:  python cost.py RULE COHORT
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rules import CENTRES, RULES, everywhere

from simfbo import Point, SimulatedFederation
from simfbo.algorithms import simfbo
from simfbo.core import partition
from simfbo.core.sampling import without_replacement
from simfbo.datasets import ImageData
from simfbo.tasks import hyper_representation

COHORTS = {10: 25, 100: 7}  # and how often each is timed


def images(count: int = 6000) -> ImageData:
    """Return random images of MNIST's shape."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = np.arange(count, dtype=np.int32) % 10
    return ImageData(pixels, labels, pixels[:10], labels[:10], "random")


class Rounds:
    """Rounds of SimFBO with one aggregator."""

    def __init__(self, task: Any, rule: str, cohort: int) -> None:
        """Build, and take a round so that everything is compiled."""
        self.federation = SimulatedFederation(
            task.data, without_replacement(cohort), aggregators=everywhere(rule)
        )
        self.method = simfbo(task.problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
        self.state, self.count = self.method.init(task.x0, task.y0), 0
        self.seconds()

    def seconds(self) -> float:
        """Return the time of one more round."""
        self.count += 1
        key, begin = jax.random.key(self.count), time.perf_counter()
        self.state = jax.block_until_ready(self.method.round(self.state, self.federation, key))
        return time.perf_counter() - begin


def task() -> Any:
    """Return 100 clients with 60 images each, batches of 64."""
    return hyper_representation(images(), partition.iid(6000, 100))


def times(cohort: int, turns: int) -> dict[str, float]:
    """Return the median milliseconds of a round, by aggregator."""
    shared = task()
    rounds = {name: Rounds(shared, name, cohort) for name in RULES}
    found: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(turns):
        for name, one in rounds.items():
            found[name].append(1e3 * one.seconds())
    return {name: median(values) for name, values in found.items()}


def combining() -> dict[str, Any]:
    """Return the milliseconds of combining messages of 157,000 numbers, by cohort and rule."""
    rules = {name: rule for name, rule in (RULES | CENTRES).items() if rule.combine is not None}
    found: dict[str, Any] = {}
    for cohort, turns in COHORTS.items():
        stack = [jnp.asarray(np.random.default_rng(0).normal(size=(cohort, 784, 200)), "float32")]
        spent: dict[str, list[float]] = {name: [] for name in rules}
        for _ in range(turns + 1):
            for name, rule in rules.items():
                begin = time.perf_counter()
                jax.block_until_ready(rule.combine(stack, jnp.full(cohort, 1 / cohort)))
                spent[name].append(1e3 * (time.perf_counter() - begin))
        found[str(cohort)] = {name: median(values[1:]) for name, values in spent.items()}
    return found


def peak(rule: str, cohort: int) -> int:
    """Return the peak of memory after three rounds in a process of their own, in megabytes."""
    command = [sys.executable, __file__, rule, str(cohort)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def measure() -> dict[str, Any]:
    """Return times and peaks, by cohort and aggregator."""
    return {
        str(cohort): {
            "ms": times(cohort, turns),
            "peak_mb": {name: peak(name, cohort) for name in RULES},
        }
        for cohort, turns in COHORTS.items()
    }


if __name__ == "__main__":
    alone = Rounds(task(), sys.argv[1], int(sys.argv[2]))
    alone.seconds()
    alone.seconds()
    # ru_maxrss would begin with the parent's; this is the process's own peak, on Linux
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024)
