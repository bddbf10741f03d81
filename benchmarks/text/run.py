"""Whose labels can be trusted? Adapters of a pre-trained language model, learnt by sixteen desks.

    python benchmarks/text/run.py              # seeds 0 to 2; finished runs are kept
    python benchmarks/text/run.py --small      # one seed, few texts and rounds: nothing is kept
    python benchmarks/text/run.py --table      # only table.md, from results.jsonl

A line of results.jsonl holds the accuracy on test texts and, where it is learnt, the trust in every
desk.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import bert
import classifier
import jax
import jax.numpy as jnp
import numpy as np
import opinions
import optax
import torch
import wordpiece
from desks import Rows, Sizes, Texts, World, chosen, read, world
from tables import METHODS, MODELS, rows, write

from simfbo import Point, SimulatedFederation, run
from simfbo.algorithms import fedavg, simfbo
from simfbo.core.data import FederatedData, federate
from simfbo.errors import UserError
from simfbo.torch import load

HERE = Path(__file__).parent
LENGTH, RANK, BATCH = 32, 8, 8
PENALTY, RADIUS = 1e-2, 100.0
SMALL = Sizes(desk=20, trusted=12, test=50)
SURE = 10.0  # sigmoid(10) is 1: all labels count in full


class Steps(NamedTuple):
    """Adam's steps for x and y, the step of v, and a smaller one for y on bad or few labels."""

    x: float
    y: float
    v: float
    careful: float


STEPS = {
    "adapters": Steps(x=0.05, y=3e-3, v=0.05, careful=1e-3),
    "head": Steps(x=0.05, y=1e-2, v=0.1, careful=3e-3),
}


class Setup(NamedTuple):
    """All that the methods share.

    Attributes:
        texts: the texts as numbers.
        world: who holds which of them.
        losses: of the model.
        steps: how far to go in a round.
        inputs: the model's inputs for all texts.
        rounds: how many rounds to take.
        seed: of all random draws.
    """

    texts: Texts
    world: World
    losses: classifier.Losses
    steps: Steps
    inputs: tuple[jax.Array, jax.Array]
    rounds: int
    seed: int


def setup(
    texts: Texts, losses: classifier.Losses, model: str, given: World, rounds: int, seed: int
) -> Setup:
    """Bring texts, losses and desks together."""
    features = texts.states if model == "adapters" else texts.embeddings
    inputs = jnp.asarray(features), jnp.asarray(texts.mask)
    return Setup(texts, given, losses, STEPS[model], inputs, rounds, seed)


def losses_of(model: str, layer: bert.Layer) -> classifier.Losses:
    """Return the losses with adapters and head or with the head alone; seeds share them."""
    if model == "adapters":
        return classifier.losses(classifier.adapters(layer, RANK, seed=0), PENALTY)
    return classifier.losses(classifier.head(layer.query.in_features), PENALTY)


def _labelled(here: Setup, labels: np.ndarray) -> FederatedData:
    return data_of(here, labels, here.world.desks)


def data_of(here: Setup, labels: np.ndarray, rows: Rows) -> FederatedData:
    """Return the clients' data: some labels of some rows below, the trusted ones above."""
    owner = np.zeros(len(labels), np.int32)
    for part in (here.world.desks, here.world.trusted):
        for i, own in enumerate(part):
            owner[own] = i
    samples = (*here.inputs, labels.astype(np.int32), owner)
    return federate(samples, rows, here.world.trusted, batch_size=BATCH)


def bilevel(here: Setup) -> Any:
    """Return the final state of SimFBO: trust and model together."""
    x0, data = np.zeros(len(here.world.desks), np.float32), _labelled(here, here.world.labels)
    steps = Point(here.steps.x, here.steps.y, here.steps.v)
    rules = Point(x=optax.adam(steps.x), y=_adam(steps.y, here), v=steps.v)
    method = simfbo(here.losses.problem, steps, rules, radius=RADIUS)
    return _run(method, data, x0, here)


def plain(here: Setup, data: FederatedData, step: float, x: np.ndarray | float = SURE) -> Any:
    """Return the final state of FedAvg, which trains the model with given trust."""
    x = np.full(len(here.world.desks), x, np.float32)
    method = fedavg(here.losses.problem, step, _adam(step, here))
    return _run(method, data, x, here)


def _adam(step: float, here: Setup) -> Any:
    """Return the server's rule for y: Adam with steps that fall to zero."""
    return optax.adam(optax.cosine_decay_schedule(step, here.rounds))


def _run(method: Any, data: FederatedData, x: np.ndarray, here: Setup) -> Any:
    federation = SimulatedFederation(data)
    return run(method, federation, x, here.losses.y0, rounds=here.rounds, seed=here.seed).state


@torch.no_grad()
def predicted(here: Setup, y: Any, rows: np.ndarray, chunk: int = 200) -> np.ndarray:
    """Return the classes of some texts, by the PyTorch module with what was learnt."""
    module = load(here.losses.module, y)
    parts = np.split(rows, range(chunk, len(rows), chunk))
    inputs = [[torch.from_numpy(np.array(a[part])) for a in here.inputs] for part in parts]
    return np.concatenate([module(*given).argmax(-1).numpy() for given in inputs])


def agreement(here: Setup) -> np.ndarray:
    """Return x from how often each desk agrees with a model trained on trusted texts alone.

    A desk that agrees half of the time or less is not trusted at all.
    """
    y = trained("trusted", here).y
    shares = [
        np.mean(predicted(here, y, own) == here.world.labels[own]) for own in here.world.desks
    ]
    weights = np.clip(2 * np.array(shares) - 1, 1e-4, 1 - 1e-4)
    return np.log(weights / (1 - weights))


def trained(method: str, here: Setup) -> Any:
    """Return the final state of a method."""
    labels, step, careful = here.world.labels, here.steps.y, here.steps.careful
    if method == "simfbo":
        return bilevel(here)
    if method == "trusted":
        return plain(here, data_of(here, labels, here.world.trusted), careful)
    if method == "oracle":
        return plain(here, _labelled(here, here.texts.truth), step)
    if method == "agreement":
        return plain(here, _labelled(here, labels), step, agreement(here))
    return plain(here, _labelled(here, labels), careful)


def result(method: str, model: str, here: Setup) -> dict[str, Any]:
    """Return a line of results.jsonl."""
    begun = time.perf_counter()
    state = trained(method, here)
    test = here.world.test
    right = np.mean(predicted(here, state.y, test) == here.texts.truth[test])
    line = {"method": method, "model": model, "seed": here.seed, "accuracy": round(float(right), 4),
            "seconds": round(time.perf_counter() - begun)}  # fmt: skip
    if method == "simfbo":
        found = 1 / (1 + np.exp(-np.asarray(state.x)))
        line["trust"] = [round(float(one), 3) for one in found]
        line["wrong"] = here.world.wrong(here.texts.truth).round(3).tolist()
    return line


def measure(options: argparse.Namespace, seeds: Sequence[int], sizes: Sizes, file: Path) -> None:
    """Run what is not yet in the file, and add it."""
    known = {(line["method"], line["model"], line["seed"]) for line in rows(file)}
    given, files = opinions.load(options.data_dir)
    network = bert.load(bert.Bert(), bert.read_safetensors(files[opinions.WEIGHTS]))
    pieces = wordpiece.vocabulary(files[opinions.VOCABULARY])
    texts = read(network, chosen(given, sizes), pieces, LENGTH)
    losses = {name: losses_of(name, network.layers[-1]) for name in MODELS}
    for seed, model, method in product(seeds, MODELS, METHODS):
        if (method, model, seed) not in known:
            given = world(texts.opinions, texts.truth, sizes, seed)
            here = setup(texts, losses[model], model, given, options.rounds, seed)
            line = json.dumps(result(method, model, here))
            print(line, flush=True)
            with file.open("a") as out:
                out.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="one seed, few texts and rounds")
    parser.add_argument("--table", action="store_true", help="write table.md only")
    parser.add_argument("--rounds", type=int, help="150, or 20 if small")
    parser.add_argument("--data-dir", type=Path, help="where downloads are kept")
    options = parser.parse_args()
    options.rounds = options.rounds or (20 if options.small else 150)
    with tempfile.TemporaryDirectory() as folder:
        file = (Path(folder) if options.small else HERE) / "results.jsonl"
        if not options.table:
            measure(
                options, range(1 if options.small else 3), SMALL if options.small else Sizes(), file
            )
        print(write(file))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"run.py: {error}", file=sys.stderr)
        sys.exit(2)
