"""One implementation of a SimFBO round in a process of its own, timed on demand.

Started by run.py with the case as JSON in argv. For every line on standard input it runs that many
rounds and answers with the wall and CPU seconds of each.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = {"mlp": (0.2, 0.1, 0.05), "cnn": (0.1, 0.05, 0.03)}
BATCH = 64


def data(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, list]:
    """Return random images (speed does not depend on what they show), labels and clients' rows."""
    model, clients, images_per_client = case["model"], case["clients"], case["images"]
    rng = np.random.default_rng(0)
    shape = (28, 28) if model == "mlp" else (32, 32, 3)
    count = min(case["pool"], clients * images_per_client)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = rng.integers(0, 10, count).astype(np.int32)
    deal = np.arange(clients * images_per_client) % count
    hands = deal.reshape(clients, images_per_client)
    half = images_per_client // 2
    return images, labels, [(hand[:half], hand[half:]) for hand in hands]


def taus(tau: int | str, clients: int) -> np.ndarray:
    """Return the local steps of all; "random" is uniform in {1..10}, fixed for the run."""
    if tau == "random":
        return np.random.default_rng(1).integers(1, 11, clients)
    return np.full(clients, int(tau))


def cohorts(clients: int, size: int) -> Callable[[int], np.ndarray]:
    """Return the cohort of each round, the same for every implementation."""

    def draw(t: int) -> np.ndarray:
        ids = np.random.default_rng([2, t]).choice(clients, size, replace=False)
        return np.sort(ids).astype(np.int32)

    return draw


def reference(case: dict[str, Any]) -> Callable[[int], Any]:
    """Return the round of the PyTorch or the NumPy reference."""
    if case["implementation"].startswith("torch"):
        import torch
        import torch_reference as module

        torch.set_num_threads(case["threads"])
    else:
        import numpy_reference as module
    options = {"torch-channels-last": "channels_last", "torch-merged": "merged"}
    extra = {options[name]: True for name in options if name == case["implementation"]}
    images, labels, rows = data(case)
    shaped = images.reshape(len(images), -1) if case["model"] == "mlp" else images
    step = module.make_round(
        case["model"], shaped, labels, rows, tau=taus(case["tau"], case["clients"]),
        batch_size=BATCH, steps=STEPS[case["model"]], **extra,
    )  # fmt: skip
    x, y = initial(case["model"])
    box = [(x, y, [0 * leaf for leaf in y])]
    draw, rng = cohorts(case["clients"], case["cohort"]), np.random.default_rng(3)

    def one(t: int) -> Any:
        box[0] = step(box[0], draw(t), rng)
        return box[0]

    return one


def initial(model: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the same initial weights for everybody, drawn by NumPy."""
    rng = np.random.default_rng(4)
    shapes = {
        "mlp": ([(784, 200), (200,)], [(200, 10), (10,)]),
        "cnn": ([(5, 5, 3, 6), (6,), (5, 5, 6, 16), (16,), (400, 120), (120,), (120, 84), (84,)],
                [(84, 10), (10,)]),
    }[model]  # fmt: skip
    return tuple([(rng.normal(size=s) * 0.05).astype(np.float32) for s in part] for part in shapes)  # pyright: ignore[reportReturnType]


def library(case: dict[str, Any]) -> Callable[[int], Any]:
    """Return the round of simfbo, as a user writes it: two losses, no flag."""
    import jax

    from simfbo import Point, SimulatedFederation
    from simfbo.algorithms import simfbo
    from simfbo.core.local_work import constant, fixed
    from simfbo.core.sampling import Cohort
    from simfbo.datasets import ImageData
    from simfbo.tasks import hyper_representation
    from simfbo.tasks.models import cnn, mlp

    images, labels, rows = data(case)
    model = mlp(784, 200, 10) if case["model"] == "mlp" else cnn(32, 3, 10)
    bundle = ImageData(images, labels, images[:1], labels[:1], "random")
    task = hyper_representation(
        bundle, [np.concatenate(pair) for pair in rows], model=model, batch_size=BATCH
    )
    draw = cohorts(case["clients"], case["cohort"])
    turn = [0]

    def sampler(key: Any, p: np.ndarray) -> Cohort:
        ids = draw(turn[0])
        return Cohort(ids, p[ids] * (len(p) / len(ids)))

    fixed_taus = taus(case["tau"], case["clients"])
    work = fixed(fixed_taus) if case["tau"] == "random" else constant(int(case["tau"]))
    federation = SimulatedFederation(task.data, sampler, work)
    y, v, x = STEPS[case["model"]]
    algorithm = simfbo(task.problem, Point(x, y, v), radius=10.0)
    box = [algorithm.init(task.x0, task.y0)]
    root, fold = jax.random.key(0), jax.jit(jax.random.fold_in)

    def one(t: int) -> Any:
        turn[0] = t
        box[0] = algorithm.round(box[0], federation, fold(root, t))
        return jax.block_until_ready(box[0])

    return one


def main() -> None:
    case = json.loads(sys.argv[1])
    one = library(case) if case["implementation"] == "simfbo" else reference(case)
    one(0)
    done = 1
    import resource

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
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"wall": walls, "cpu": cpus, "peak": peak}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
