"""Losses from PyTorch against losses in JAX: python benchmarks/torch/speed.py.

SimFBO on 10 of 100 clients, batches of 64, one local step: processor time per round, in turns of
the two, and the time until the first round is done. Writes results/speed.json.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from models import LeNet, Perceptron

from simfbo import Point, SimulatedFederation, Task, datasets, partition, run, sampling
from simfbo.algorithms import simfbo
from simfbo.tasks import hyper_representation, models
from simfbo.torch import hyper_representation as from_module

RESULTS = Path(__file__).parent / "results" / "speed.json"
TURNS = 9
CASES = {
    "perceptron, MNIST": ("mnist", Perceptron, models.mlp(784, 200, 10), 60),
    "CNN, CIFAR-10": ("cifar10", LeNet, models.cnn(32, 3, 10), 8),
}


class Contestant:
    """A task with its federation, which runs some rounds and says what they took."""

    def __init__(self, build: Callable[[], Task]) -> None:
        """Build the task and run its first round; `first` is what both take."""
        start = time.process_time()
        self._task, self._seconds = build(), []
        self._federation = SimulatedFederation(self._task.data, sampling.without_replacement(10))
        self._algorithm = simfbo(self._task.problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
        self.run(1)
        self.first = time.process_time() - start

    def run(self, rounds: int) -> float:
        """Run so many rounds and return their processor time."""
        start = time.process_time()
        run(self._algorithm, self._federation, self._task.x0, self._task.y0, rounds=rounds)
        return time.process_time() - start

    def turn(self, rounds: int) -> None:
        """Run and remember the time of a round."""
        self._seconds.append(self.run(rounds) / rounds)

    @property
    def seconds(self) -> list[float]:
        """Return the times of all turns."""
        return self._seconds


def compare(dataset: str, module: type, model: models.Model, rounds: int) -> dict:
    """Return the times of one case."""
    images = datasets.load(dataset)
    parts = partition.iid(len(images.train_labels), 100, 0)
    clients = [(images.train_images[rows], images.train_labels[rows]) for rows in parts]
    torch.manual_seed(0)

    def traced() -> Task:
        return from_module(module(*models.moments(images.train_images)), "head.*", clients)

    in_torch = Contestant(traced)
    in_jax = Contestant(lambda: hyper_representation(images, parts, model=model))
    for _ in range(TURNS):
        in_torch.turn(rounds)
        in_jax.turn(rounds)
    ratios = [a / b for a, b in zip(in_torch.seconds, in_jax.seconds, strict=True)]
    return {
        "ms_torch": 1000 * statistics.median(in_torch.seconds),
        "ms_jax": 1000 * statistics.median(in_jax.seconds),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "first_torch": in_torch.first,
        "first_jax": in_jax.first,
    }


def main() -> None:
    """Measure all cases and write them."""
    found = {}
    for name, case in CASES.items():
        found[name] = compare(*case)
        print(name, found[name], flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
