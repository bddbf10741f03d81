"""A ResNet with GroupNorm on CIFAR-10, from a PyTorch module: python benchmarks/torch/resnet.py.

100 clients with 500 images each, 10 of them in a round. Interrupt it with Ctrl-C and start it again
with --resume.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from models import ResNet

from simfbo import Point, SimulatedFederation, datasets, local_work, partition, run, sampling
from simfbo.algorithms import simfbo
from simfbo.tasks.models import moments
from simfbo.torch import hyper_representation

HERE = Path(__file__).parent


def report(number: int, record: dict | None) -> None:
    """Print how far a run is."""
    if record is not None:
        print(f"round {number:4d}  test {100 * record['test_accuracy']:.2f} %", flush=True)


def main() -> None:
    """Train for one seed and keep the result beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5, help="local steps of a client")
    parser.add_argument("--local", type=float, nargs=3, default=(0.2, 0.2, 0.1), help="x y v")
    parser.add_argument("--server", type=float, nargs=3, default=(0.2, 0.2, 0.1), help="x y v")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/torch-resnet"))
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    images = datasets.load("cifar10")
    mean, deviation = moments(images.train_images)
    torch.manual_seed(given.seed)
    parts = partition.iid(len(images.train_labels), 100, given.seed)
    task = hyper_representation(
        ResNet(mean, deviation),
        head="classifier.*",
        clients=[(images.train_images[rows], images.train_labels[rows]) for rows in parts],
        test=(images.test_images, images.test_labels),
        seed=given.seed,
    )
    federation = SimulatedFederation(
        task.data, sampling.without_replacement(10), local_work.constant(given.steps)
    )
    history = run(
        simfbo(task.problem, Point(*given.local), Point(*given.server), radius=10.0),
        federation,
        task.x0,
        task.y0,
        rounds=given.rounds,
        seed=given.seed,
        evaluate=task.evaluate,
        every=given.every,
        directory=given.output,
        resume=given.resume,
        on_progress=report,
    )
    last = {key: history.records[-1][key] for key in ("round", "test_accuracy", "cpu_seconds")}
    file = HERE / "results" / f"resnet-{given.seed}.json"
    if given.rounds >= 200 and history.end == {"status": "finished"}:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"seed": given.seed, **last}, indent=1) + "\n")
    print(f"{np.sum([a.size for a in task.x0.values()]):,} upper parameters; {last}")


if __name__ == "__main__":
    main()
