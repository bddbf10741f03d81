"""One implementation of a FedNest iteration in a process of its own, timed on demand.

Started by run.py with the case as JSON in argv. For every line on standard input it runs that many
iterations and answers with the wall and CPU seconds of each; CPU seconds are those of all threads.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

TERMS = 5


def data(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, list]:
    """Return random images (speed does not depend on what they show), labels and clients' rows."""
    clients, images_per_client = case["clients"], case["images"]
    rng = np.random.default_rng(0)
    count = clients * images_per_client
    images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, count).astype(np.int32)
    half = images_per_client // 2
    hands = np.arange(count).reshape(clients, images_per_client)
    return images, labels, [(hand[:half], hand[half:]) for hand in hands]


def initial() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the same initial x and y for everybody, drawn by NumPy."""
    rng = np.random.default_rng(1)

    def layer(inputs: int, outputs: int) -> list[np.ndarray]:
        bound = inputs**-0.5
        shapes = (inputs, outputs), (outputs,)
        return [rng.uniform(-bound, bound, shape).astype(np.float32) for shape in shapes]

    return layer(784, 200), layer(200, 10)


def cohorts(clients: int, size: int) -> Callable[[int], np.ndarray]:
    """Return the cohort of each iteration, the same for every implementation."""

    def draw(t: int) -> np.ndarray:
        ids = np.random.default_rng([2, t]).choice(clients, size, replace=False)
        return np.sort(ids).astype(np.int32)

    return draw


def moments(images: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of all pixels, in double precision."""
    counts = sum(np.bincount(image.ravel(), minlength=256) for image in images)
    shares, values = counts / images.size, np.arange(256)
    mean = shares @ values
    return float(mean), float(np.sqrt(shares @ (values - mean) ** 2))


def reference(case: dict[str, Any]) -> Callable[[int], Any]:
    """Return the iteration in PyTorch, on one thread."""
    import torch
    import torch_reference as module

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels, rows = data(case)
    pixels = module.Pixels(images.reshape(len(images), -1), labels, *moments(images))
    iterate = module.make_iteration(
        getattr(module, case["reader"])(pixels, rows, case["batch"] or case["images"]),
        steps=tuple(case["steps"]), local_steps=case["local_steps"], terms=TERMS,
        released=case["mode"] == "as_released", cancelling=case.get("cancelling", False),
    )  # fmt: skip
    x, y = initial()
    box = [(x, y, [0 * leaf for leaf in y])]
    draw = cohorts(case["clients"], case["cohort"])

    def one(t: int) -> Any:
        box[0] = iterate(box[0], draw(t).tolist())
        return box[0]

    return one


def library(case: dict[str, Any]) -> Callable[[int], Any]:
    """Return the iteration of simfbo, with all its defaults."""
    import jax

    from simfbo import Point, SimulatedFederation, federate
    from simfbo.algorithms import fednest
    from simfbo.core.local_work import constant
    from simfbo.core.sampling import Cohort
    from simfbo.datasets import ImageData
    from simfbo.tasks import hyper_representation
    from simfbo.tasks.models import Linear

    images, labels, rows = data(case)
    bundle = ImageData(images, labels, images[:1], labels[:1], "random")
    task = hyper_representation(bundle, [np.concatenate(pair) for pair in rows])
    # The task parts each client's images at random; here everybody shares one split.
    lower, upper = zip(*rows, strict=True)
    held = federate(task.data.lower.samples, lower, upper, batch_size=case["batch"])
    draw = cohorts(case["clients"], case["cohort"])
    turn = [0]

    def sampler(key: Any, p: np.ndarray) -> Cohort:
        ids = draw(turn[0])
        return Cohort(ids, p[ids] * (len(p) / len(ids)))

    federation = SimulatedFederation(held, sampler, constant(case["local_steps"]))
    algorithm = fednest(
        task.problem, Point(x=case["steps"][2], y=case["steps"][0], v=case["steps"][1]), 1, TERMS,
        mode=case["mode"], one_upper_step=case["mode"] == "as_released",
    )  # fmt: skip
    x, y = initial()
    box = [algorithm.init(Linear(*x), Linear(*y))]
    root, fold = jax.random.key(0), jax.jit(jax.random.fold_in)

    def one(t: int) -> Any:
        turn[0] = t
        box[0] = algorithm.round(box[0], federation, fold(root, t))
        return jax.block_until_ready(box[0])

    return one


def build(case: dict[str, Any]) -> Callable[[int], Any]:
    """Return the iteration of a case: a function of its number that returns (x, y, v)."""
    return reference(case) if case["reader"] else library(case)


def main() -> None:
    case = json.loads(sys.argv[1])
    one = build(case)
    one(0)
    done = 1
    for line in sys.stdin:
        walls, cpus = [], []
        for _ in range(case["warm"]):
            one(done)
            done += 1
        for _ in range(int(line)):
            wall, cpu = time.perf_counter(), time.process_time()
            one(done)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
            done += 1
        print(json.dumps({"wall": walls, "cpu": cpus}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
