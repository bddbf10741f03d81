"""Personal models on data with natural clients: a shared representation with private heads, against
FedAvg, FedAvg with fine-tuning, and training alone.

    python benchmarks/personal/run.py              # seeds 0 to 4; finished runs are kept
    python benchmarks/personal/run.py --choose     # the settings tried on seeds 100 and 101
    python benchmarks/personal/run.py --table      # write table.md from results.jsonl

A line of results.jsonl holds the accuracy of every client on its own test images.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import jax
import numpy as np
import optax

from simfbo import Point, SimulatedFederation, datasets, local_work, partition, run
from simfbo.algorithms import fedavg, fedbioacc_local, simfbo
from simfbo.core import trees
from simfbo.tasks import hyper_representation, private_heads
from simfbo.tasks._hyper_representation import scaled_features
from simfbo.tasks.models import mlp, moments
from simfbo.tasks.personal_heads import own_accuracies, padded

HERE = Path(__file__).parent
IMAGES = datasets.load("exercises")
TEST = padded(IMAGES.test_images, IMAGES.test_labels, partition.by_user(IMAGES.test_clients))
MODEL = mlp(60, 200, 7)
SCALE = moments(IMAGES.train_images)
FEATURES = scaled_features(MODEL, *SCALE)
PULL = 1e-3  # of a head's norm, as in the lower loss
ROUNDS = 600


def own_parts(share: float, seed: int) -> partition.Rows:
    """Return every client's training images, or a share of them."""
    parts = partition.by_user(IMAGES.train_clients)
    return parts if share == 1 else partition.halve(parts, share, seed)[1]


def scores(net: Point, images: jax.Array) -> jax.Array:
    return net.y(FEATURES(net.x, images))


def loss(net: Point, fit) -> jax.Array:
    found = optax.softmax_cross_entropy_with_integer_labels(scores(net, fit.images), fit.labels)
    return fit.weights @ found + 0.5 * PULL * trees.squared_norm(net.y)


def right(net: Point, test) -> jax.Array:
    hits = scores(net, test.images).argmax(-1).astype(test.labels.dtype) == test.labels
    return test.weights @ hits.astype(test.weights.dtype)


def trained(net: Point, fit, step: float, steps: int) -> Point:
    """Return a network after gradient steps with momentum on one client's images."""
    rule = optax.sgd(step, momentum=0.9)

    def move(_, carry):
        net, state = carry
        change, state = rule.update(jax.grad(loss)(net, fit), state)
        return optax.apply_updates(net, change), state

    return jax.lax.fori_loop(0, steps, move, (net, rule.init(net)))[0]


def tuned_accuracies(net: Point, parts: partition.Rows, step: float, steps: int) -> np.ndarray:
    """Return each client's accuracy after it trains the whole network on its own images."""
    fit = padded(IMAGES.train_images, IMAGES.train_labels, parts)
    one = jax.jit(lambda pair: right(trained(net, pair[0], step, steps), pair[1]))
    return np.array(
        [one(jax.tree.map(lambda a, i=i: a[i], (fit, TEST))) for i in range(len(parts))]
    )


def head_accuracies(x, parts: partition.Rows) -> np.ndarray:
    """Return each client's accuracy with a head of its own on a representation."""
    fit = padded(IMAGES.train_images, IMAGES.train_labels, parts)
    start = trees.host_zeros(MODEL.init(jax.random.key(0))[1])
    return np.asarray(own_accuracies(FEATURES, (fit, TEST), PULL)(x, start))


def shared_accuracies(net: Point) -> np.ndarray:
    return np.array([right(net, jax.tree.map(lambda a, i=i: a[i], TEST)) for i in range(20)])


def start(seed: int) -> Point:
    return Point(*MODEL.init(jax.random.fold_in(jax.random.key(seed), 0)))


def federation(task, tau: int) -> SimulatedFederation:
    return SimulatedFederation(task.data, local_work=local_work.constant(tau))


def fedavg_net(parts, seed: int, step: float) -> Point:
    """Return the network that FedAvg trains on all images of all clients."""
    task = hyper_representation(IMAGES, parts, model=MODEL, together=True, regularisation=PULL,
                                seed=seed)  # fmt: skip
    algorithm = fedavg(task.problem, step)
    return run(algorithm, federation(task, 5), task.x0, task.y0, rounds=ROUNDS, seed=seed).state.y


def bilevel_x(factory, task, seed: int, tau: int = 5, **options):
    algorithm = factory(task.problem, **options)
    return run(algorithm, federation(task, tau), task.x0, task.y0, rounds=ROUNDS, seed=seed).state.x


SHARE = {"upper_share": 0.5, "regularisation": PULL, "model": MODEL}
CHOSEN = {
    "local": {"step": 0.1, "steps": 300},
    "fedavg": {"step": 0.3},
    "fine-tuned": {"step": 0.03, "steps": 50},
    "simfbo": {"local": Point(x=0.1, y=0.3, v=0.1)},
    "private": {"local": Point(x=0.1, y=0.3, v=0.1)},
    "fedbioacc_local": {"steps": Point(x=0.1, y=0.3, v=0.1)},
}
LABELS = {
    "local": "training alone",
    "fedavg": "FedAvg, one network",
    "fedavg-heads": "FedAvg, then own heads",
    "fine-tuned": "FedAvg, then fine-tuned",
    "simfbo": "SimFBO, shared lower level, then own heads",
    "private": "SimFBO, private lower level",
    "fedbioacc_local": "FedBiOAcc-Local",
}


def measured(name: str, share: float, seed: int, options: dict) -> np.ndarray:
    """Return every client's accuracy on its own test images."""
    parts = own_parts(share, seed)
    if name == "local":
        return tuned_accuracies(start(seed), parts, **options)
    if name == "fedavg":
        return shared_accuracies(fedavg_net(parts, seed, **options))
    if name == "fedavg-heads":
        return head_accuracies(fedavg_net(parts, seed, **CHOSEN["fedavg"]).x, parts)
    if name == "fine-tuned":
        net = fedavg_net(parts, seed, **CHOSEN["fedavg"])
        return tuned_accuracies(net, parts, **options)
    if name == "simfbo":
        task = hyper_representation(IMAGES, parts, **SHARE, seed=seed)
        return head_accuracies(bilevel_x(simfbo, task, seed, **options), parts)
    task = private_heads(IMAGES, parts, **SHARE, seed=seed)
    factory = simfbo if name == "private" else fedbioacc_local
    return head_accuracies(bilevel_x(factory, task, seed, **options), parts)


def tried() -> list[tuple[str, float, dict]]:
    """Return the settings that are compared on seeds 100 and 101."""
    found = []
    for share in (1.0, 0.15):
        found += [
            ("local", share, {"step": s, "steps": n}) for s in (0.03, 0.1) for n in (100, 300)
        ]
        found += [("fedavg", share, {"step": s}) for s in (0.1, 0.3)]
        found += [("fine-tuned", share, {"step": s, "steps": n}) for s in (0.01, 0.03)
                  for n in (20, 50, 150)]  # fmt: skip
        steps = [Point(x=x, y=y, v=0.1) for x in (0.03, 0.1, 0.3) for y in (0.3,)]
        found += [(name, share, {"local": s}) for name in ("simfbo", "private") for s in steps]
        found += [("fedbioacc_local", share, {"steps": s}) for s in steps]
    return found


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def measure(file: Path, jobs: list[tuple[str, float, int, dict]]) -> None:
    """Run what is not in the file yet."""
    done = {(row["method"], row["share"], row["seed"], json.dumps(row["options"]))
            for row in rows(file)}  # fmt: skip
    for name, share, seed, options in jobs:
        key = name, share, seed, json.dumps(options)
        if key in done:
            continue
        found = measured(name, share, seed, options)
        line = {"method": name, "share": share, "seed": seed, "options": options,
                "accuracies": [round(float(a), 4) for a in found]}  # fmt: skip
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(f"{name:16} share {share:4} seed {seed}: {found.mean():.4f}, worst {found.min():.3f}",
              options, flush=True)  # fmt: skip


def table() -> str:
    """Return the results as a table: mean over clients, then mean and deviation over seeds."""
    found = rows(HERE / "results.jsonl")
    lines = ["| method | all images: mean, % | worst client, % | 15 % of them: mean, % | worst client, % |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, label in LABELS.items():
        cells = [label]
        for share in (1.0, 0.15):
            own = [100 * np.array(row["accuracies"]) for row in found
                   if (row["method"], row["share"]) == (name, share)]  # fmt: skip
            for of in (np.mean, np.min):
                values = [float(of(one)) for one in own]
                cells.append(f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.choose:
        jobs = [(name, share, seed, given) for name, share, given in tried() for seed in (100, 101)]
        measure(HERE / "choices.jsonl", jobs)
    elif not options.table:
        jobs = [(name, share, seed, CHOSEN.get(name, {})) for seed in range(5)
                for share in (1.0, 0.15) for name in LABELS]  # fmt: skip
        measure(HERE / "results.jsonl", jobs)
    if not options.choose:
        (HERE / "table.md").write_text(table())
        print(table())


if __name__ == "__main__":
    main()
