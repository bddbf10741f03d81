"""Personal models on data with natural clients: a shared representation with private heads, against
FedAvg, FedAvg with fine-tuning, and training alone.

    python benchmarks/personal/run.py              # seeds 0 to 2; finished runs are kept
    python benchmarks/personal/run.py --table      # only table.md, from results.jsonl

A line of results.jsonl holds the accuracy of every client on its own test images.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from simfbo import Point, SimulatedFederation, datasets, local_work, partition, run
from simfbo.algorithms import fedavg, fedbioacc_local, simfbo
from simfbo.core import trees
from simfbo.datasets import ImageData
from simfbo.tasks import hyper_representation, private_heads
from simfbo.tasks._hyper_representation import scaled_features
from simfbo.tasks.models import mlp, moments
from simfbo.tasks.personal_heads import Half, own_accuracies, padded

HERE = Path(__file__).parent
IMAGES = datasets.load("exercises")
CLASSES, CLIENTS, ROUNDS, TAU = 7, 20, 600, 5
MODEL = mlp(60, 200, CLASSES)
FEATURES = scaled_features(MODEL, *moments(IMAGES.train_images))
PULL = 1e-3  # of a head's norm, as in the lower loss
COMMON = {"model": MODEL, "regularisation": PULL}
STEPS = Point(x=0.3, y=0.3, v=0.1)
WORLDS = {"all images": 1.0, "15 % of them": 0.15, "own labels": 1.0}
METHODS = {
    "local": "training alone",
    "fedavg": "FedAvg, one network",
    "fedavg-heads": "FedAvg, then own heads",
    "fine-tuned": "FedAvg, then fine-tuned",
    "simfbo": "SimFBO, shared lower level, then own heads",
    "private": "SimFBO, private lower level",
    "fedbioacc_local": "FedBiOAcc-Local (our reading of the abstract)",
}


class World(NamedTuple):
    """The images, each client's rows of them, and its training and test images."""

    images: ImageData
    parts: partition.Rows
    fit: Half
    test: Half


def world(name: str, seed: int) -> World:
    """Return all images, a share of them, or images whose labels mean something else per client."""
    images, parts = IMAGES, partition.by_user(IMAGES.train_clients)
    if name == "own labels":
        images = relabelled(images, np.random.default_rng(seed))
    if WORLDS[name] < 1:
        parts = partition.halve(parts, WORLDS[name], seed)[1]
    fit = padded(images.train_images, images.train_labels, parts)
    test = padded(images.test_images, images.test_labels, partition.by_user(images.test_clients))
    return World(images, parts, fit, test)


def relabelled(images: ImageData, rng: np.random.Generator) -> ImageData:
    """Return the images with the classes of every client in another order."""
    orders = {i: rng.permutation(CLASSES) for i in np.unique(images.train_clients).tolist()}

    def turned(labels: np.ndarray, clients: np.ndarray) -> np.ndarray:
        pairs = zip(labels.tolist(), clients.tolist(), strict=True)
        return np.array([orders[i][label] for label, i in pairs], labels.dtype)

    return images._replace(
        train_labels=turned(images.train_labels, images.train_clients),
        test_labels=turned(images.test_labels, images.test_clients),
    )


def loss(net: Point, fit: Half) -> jax.Array:
    scores = net.y(FEATURES(net.x, fit.images))
    found = optax.softmax_cross_entropy_with_integer_labels(scores, fit.labels)
    return fit.weights @ found + 0.5 * PULL * trees.squared_norm(net.y)


def accuracy(net: Point, test: Half) -> jax.Array:
    found = net.y(FEATURES(net.x, test.images)).argmax(-1).astype(test.labels.dtype)
    return test.weights @ (found == test.labels).astype(test.weights.dtype)


def trained(net: Point, fit: Half, step: float, steps: int) -> Point:
    """Return a network after gradient steps with momentum on one client's images."""
    rule = optax.sgd(step, momentum=0.9)

    def move(_: Any, carry: Any) -> Any:
        net, state = carry
        change, state = rule.update(jax.grad(loss)(net, fit), state)
        return optax.apply_updates(net, change), state

    return jax.lax.fori_loop(0, steps, move, (net, rule.init(net)))[0]


def tuned(net: Point, here: World, step: float, steps: int) -> np.ndarray:
    """Return each client's accuracy after it trains the whole network on its own images."""
    one = jax.jit(lambda fit, test: accuracy(trained(net, fit, step, steps), test))
    return np.array([one(*of(here, i)) for i in range(CLIENTS)])


def of(here: World, i: int) -> tuple[Half, Half]:
    """Return one client's training and test images."""
    return jax.tree.map(lambda a: a[i], (here.fit, here.test))


def own_heads(x: Any, here: World) -> np.ndarray:
    """Return each client's accuracy with a head of its own on a representation."""
    start = trees.host_zeros(MODEL.init(jax.random.key(0))[1])
    return np.asarray(own_accuracies(FEATURES, (here.fit, here.test), PULL)(x, start))


def averaged(here: World, seed: int) -> Point:
    """Return the network that FedAvg trains on all images of all clients."""
    task = hyper_representation(here.images, here.parts, **COMMON, together=True, seed=seed)
    return final(fedavg(task.problem, 0.3), task, seed).y


def final(algorithm: Any, task: Any, seed: int) -> Any:
    """Return the state after a run with everyone."""
    federation = SimulatedFederation(task.data, local_work=local_work.constant(TAU))
    return run(algorithm, federation, task.x0, task.y0, rounds=ROUNDS, seed=seed).state


def measured(name: str, here: World, seed: int) -> np.ndarray:
    """Return every client's accuracy on its own test images."""
    if name == "local":
        start = Point(*MODEL.init(jax.random.fold_in(jax.random.key(seed), 0)))
        return tuned(start, here, 0.1, 300)
    if name in ("fedavg", "fedavg-heads", "fine-tuned"):
        net = averaged(here, seed)
        if name == "fedavg":
            return np.array([accuracy(net, of(here, i)[1]) for i in range(CLIENTS)])
        return own_heads(net.x, here) if name == "fedavg-heads" else tuned(net, here, 0.03, 150)
    if name == "simfbo":
        task = hyper_representation(here.images, here.parts, **COMMON, seed=seed)
        return own_heads(final(simfbo(task.problem, STEPS), task, seed).x, here)
    task = private_heads(here.images, here.parts, **COMMON, seed=seed)
    if name == "private":
        return own_heads(final(simfbo(task.problem, STEPS), task, seed).x, here)
    algorithm = fedbioacc_local(task.problem, STEPS._replace(x=0.1))
    return own_heads(final(algorithm, task, seed).x, here)


def rows() -> list[dict[str, Any]]:
    file = HERE / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def measure(seeds: range) -> None:
    """Run what is not in the results yet."""
    done = {(row["method"], row["world"], row["seed"]) for row in rows()}
    jobs = [(name, where, seed) for seed in seeds for where in WORLDS for name in METHODS]
    for name, where, seed in jobs:
        if (name, where, seed) in done:
            continue
        found = measured(name, world(where, seed), seed)
        line = {"method": name, "world": where, "seed": seed,
                "accuracies": [round(float(a), 4) for a in found]}  # fmt: skip
        with (HERE / "results.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(
            f"{where}, {name}, seed {seed}: {found.mean():.4f}, worst {found.min():.3f}", flush=True
        )


def table() -> str:
    """Return the results: mean and worst over clients, then mean and deviation over seeds."""
    found = rows()
    lines = [f"| method | {' | '.join(f'{name}: mean, % | worst, %' for name in WORLDS)} |",
             "|---" * (1 + 2 * len(WORLDS)) + "|"]  # fmt: skip
    for name, label in METHODS.items():
        cells = [label]
        for where in WORLDS:
            own = [100 * np.array(row["accuracies"]) for row in found
                   if (row["method"], row["world"]) == (name, where)]  # fmt: skip
            for over in (np.mean, np.min):
                values = [float(over(one)) for one in own]
                cells.append(f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if not options.table:
        measure(range(options.seeds))
    (HERE / "table.md").write_text(table())
    print(table())


if __name__ == "__main__":
    main()
