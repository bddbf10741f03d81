"""What watching costs: processor time of a round with and without, taking turns in one process.

    python benchmarks/trust/watch_cost.py

Writes results/watch-cost.json.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from simfbo import Point, SimulatedFederation
from simfbo.algorithms import simfbo
from simfbo.datasets import ImageData
from simfbo.robust import anomalies
from simfbo.tasks import Task, hyper_representation, quadratic
from simfbo.tasks.models import mlp

FILE = Path(__file__).parent / "results/watch-cost.json"
TURNS = 30


def images(clients: int) -> Task:
    """Return the MNIST perceptron on random images."""
    rng = np.random.default_rng(0)
    shown = rng.integers(0, 256, (2000, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, len(shown)).astype(np.int32)
    parts = [rng.permutation(len(shown))[:200] for _ in range(clients)]
    bundle = ImageData(shown, labels, shown[:1], labels[:1], "random")
    return hyper_representation(bundle, parts, model=mlp(784, 200, 10), batch_size=64)


CASES: dict[str, tuple[Callable[[], Task], int]] = {
    "quadratic, 10 clients": (lambda: quadratic(clients=10), 70),
    "quadratic, 100 clients": (lambda: quadratic(clients=100), 28),
    "MNIST perceptron, 10 clients": (lambda: images(10), 14),
}


def seconds(task: Task, rounds: int, start: int, detect: bool) -> float:
    """Return processor seconds per round after exchange `start`."""
    federation = SimulatedFederation(task.data, detect_anomalies=detect)
    federation.ledger.total = federation.ledger.total._replace(rounds=start)
    algorithm = simfbo(task.problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
    state = algorithm.init(task.x0, task.y0)
    keys = list(jax.random.split(jax.random.key(0), rounds))
    begin = time.process_time()
    for key in keys:
        state = algorithm.round(state, federation, key)
    jax.block_until_ready(state)
    return (time.process_time() - begin) / rounds


def measure(make: Callable[[], Task], rounds: int) -> dict[str, Any]:
    """Return the medians of all turns, in milliseconds, and the ratio to not watching."""
    ways = {"without": 10**6, "watched": 10**6, "the first 32": 0}
    tasks = make(), make()  # a program each
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 2):
        for way, start in ways.items():
            each = min(rounds, anomalies.EVERY_ONE) if start == 0 else rounds
            took = seconds(tasks[way == "without"], each, start, way != "without")
            if turn >= 2:  # the first ones compile
                times[way].append(took)
    middle = {way: statistics.median(found) for way, found in times.items()}
    ratios = {
        way: statistics.median(a / b for a, b in zip(found, times["without"], strict=True))
        for way, found in times.items()
    }
    return {"milliseconds": {w: 1000 * s for w, s in middle.items()}, "ratio": ratios}


def main() -> None:
    """Measure all cases."""
    found = {}
    for name, (task, rounds) in CASES.items():
        found[name] = measure(task, rounds)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
