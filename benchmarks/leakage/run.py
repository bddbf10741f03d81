"""What SimFBO's message q_x shows of a client's images, and what clipping and noise cost.

    python benchmarks/leakage/run.py [messages | training]

Writes results.json and figure.svg; the two parts can be run on their own.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import attack
import cost
import jax
import jax.numpy as jnp
import numpy as np
import picture

from simfbo import datasets, run
from simfbo.algorithms._common import State
from simfbo.config import run as settings
from simfbo.config.build import build_algorithm, build_federation
from simfbo.config.build_task import build_task
from simfbo.core.keys import client_key
from simfbo.core.local_work import constant
from simfbo.core.problem import Point
from simfbo.core.sampling import Cohort
from simfbo.engines import SimulatedFederation
from simfbo.errors import UserError
from simfbo.privacy import Privacy, private
from simfbo.runs.files import keep_compilations
from simfbo.runs.style import save_svg
from simfbo.tasks.models import moments

HERE = Path(__file__).parent
CLIENTS, ROUNDS, BATCHES, TAU = 100, 100, (1, 2, 4, 8, 16, 64), 5
NOISES = (0.01, 0.1, 1.0)
KEY = jax.random.key(7)
SHOWN = 10  # clients in the figure
SHOW = {
    "round 1, batch 1": "batch 1, round 1",
    f"round {ROUNDS + 1}, batch 1": f"batch 1, round {ROUNDS + 1}",
    "round 1, batch 8": "batch 8",
    "round 1, batch 64": "batch 64",
    "round 1, batch 1, clipped, noise by the client, z = 0.01": "batch 1, noise 0.01",
    "round 1, batch 1, clipped, noise by the client, z = 0.1": "batch 1, noise 0.1",
    "round 1, batch 1, clipped, noise by the client, z = 1": "batch 1, noise 1",
}


class Case(NamedTuple):
    """A situation in which every client sends one message."""

    name: str
    state: State
    batch: int = 1
    tau: int = 1
    privacy: Privacy | None = None


class Seen(NamedTuple):
    """What one client sent, and the images behind it: upper ones first, then lower ones."""

    q: Point
    images: np.ndarray


def dataset() -> str:
    """Return mnist, or digits where it cannot be had."""
    try:
        return datasets.load("mnist").name
    except UserError as error:
        print(f"{error} The digits take its place.")
        return "digits"


def setting(name: str, batch: int = 64) -> settings.RunConfig:
    """Return the paper's settings with another batch size."""
    keys = {"task.dataset": name, "task.batch_size": batch, "task.clients": CLIENTS}
    return settings.load(None, {"preset": "paper", "task.name": "hyper-representation", **keys})


def trained(name: str) -> tuple[State, State, float]:
    """Return the state before and after some rounds, and the test accuracy it ends with."""
    config = setting(name)
    task = build_task(config)
    method = build_algorithm(config.algorithm, task.problem, config.rounds)
    history = run(
        method, build_federation(config, task.data), task.x0, task.y0,
        rounds=ROUNDS, evaluate=task.evaluate, every=ROUNDS,
    )  # fmt: skip
    return method.init(task.x0, task.y0), history.state, history.records[-1]["test_accuracy"]


def exchange(name: str, case: Case) -> list[Seen]:
    """Return what every client sends in one exchange, as the server receives it."""
    config = setting(name, case.batch)
    task = build_task(config)
    method = build_algorithm(config.algorithm, task.problem, config.rounds)
    method = private(method, case.privacy) if case.privacy else method
    federation = SimulatedFederation(task.data, local_work=constant(case.tau))
    everyone = Cohort(np.arange(CLIENTS, dtype=np.int32), np.ones(CLIENTS))
    payload = Point(case.state.x, case.state.y, case.state.v)
    stack = federation.gather(method.client_steps["simfbo_step"], payload, everyone, KEY)
    stack = jax.tree.map(lambda leaf: np.asarray(leaf, float), stack)
    images = drawn(task.data, case.tau)
    return [Seen(jax.tree.map(lambda a, i=i: a[i], stack), images[i]) for i in range(CLIENTS)]


def drawn(data: Any, tau: int) -> np.ndarray:
    """Return the images that the clients drew, as the losses see them: [client, image, pixel]."""
    mean, deviation = moments(np.asarray(data.upper.samples[0]))

    def batches(i: Any, k: Any) -> tuple[jax.Array, jax.Array]:
        lower, upper = jax.random.split(jax.random.fold_in(client_key(KEY, i, 0), k))
        own = data.client(i)
        return own.upper_batch(upper)[0], own.lower_batch(lower)[0]

    both = jax.vmap(lambda i: jax.vmap(lambda k: batches(i, k))(jnp.arange(tau)))
    levels = [np.asarray(a, float) for a in both(jnp.arange(CLIENTS))]
    flat = [a.reshape(CLIENTS, tau * a.shape[2], -1) for a in levels]
    return (np.concatenate(flat, 1) - mean) / deviation


def candidates(seen: Seen, head: np.ndarray) -> np.ndarray:
    """Return everything that the attack makes of a message, an image a row."""
    weight, bias = seen.q.x
    return np.concatenate([attack.ratios(weight, bias), attack.guesses(weight, head)])


def best(case: Case, sent: list[Seen]) -> dict[str, float]:
    """Return how close the closest candidates come to the images behind the messages.

    The same candidates against the next client's images say what chance gives.
    """
    head, half = np.asarray(case.state.y.weight, float), len(sent[0].images) // 2
    # Before training v is zero, and with one local step the lower images do not enter.
    relevant = slice(half if case.tau == 1 and not np.any(case.state.v.weight) else None)
    found = [candidates(seen, head) for seen in sent]
    images = [seen.images[relevant] for seen in sent]
    chance = scores(found, images[1:] + images[:1])
    return scores(found, images) | {f"chance_{key}": number for key, number in chance.items()}


def scores(guesses: list[np.ndarray], images: list[np.ndarray]) -> dict[str, float]:
    """Return the best correlation, a client's and an image's in the mean; the shares above 0.9."""
    fits = [attack.correlations(f, a).max(0) for f, a in zip(guesses, images, strict=True)]
    tops = np.array([fit.max() for fit in fits])
    every = np.concatenate(fits)
    found = {"client": tops, "image": every, "clients": tops > 0.9, "images": every > 0.9}
    return {name: round(float(values.mean()), 4) for name, values in found.items()}


def exact(sent: list[Seen]) -> dict[str, float]:
    """Return the error of the first round's upper image, read from one unit, over all clients."""
    found = np.stack([attack.liveliest(*seen.q.x) for seen in sent])
    truth = np.stack([seen.images[0] for seen in sent])
    errors = np.linalg.norm(found - truth, axis=1) / np.linalg.norm(truth, axis=1)
    return {"median": float(np.median(errors)), "largest": float(errors.max())}


def both_levels(sent: list[Seen]) -> dict[str, float]:
    """Return the share of clients whose upper and lower image are among what repeats."""
    pairs = [attack.repeated(attack.ratios(*seen.q.x)) for seen in sent]
    found = [
        attack.correlations(pair, seen.images).max(0)
        for pair, seen in zip(pairs, sent, strict=True)
    ]
    upper, lower = (np.stack(found) > 0.99).mean(0)
    return {"upper": upper, "lower": lower}


def cases(first: State, late: State, clip: Point[float]) -> list[Case]:
    """Return all situations."""
    plain = [
        Case(f"{when}, batch {b}", state, b)
        for when, state in (("round 1", first), (f"round {ROUNDS + 1}", late))
        for b in BATCHES
    ]
    steps = [Case(f"round 1, batch 1, {TAU} local steps", first, tau=TAU)]
    clipped = Case("round 1, batch 1, clipped, noise by the server", first, privacy=Privacy(clip))
    noisy = [
        Case(f"round 1, batch 1, clipped, noise by the client, z = {z:g}", first,
             privacy=Privacy(clip, Point(z, z, z), "client"))
        for z in NOISES
    ]  # fmt: skip
    return [*plain, *steps, clipped, *noisy]


def closest(case: Case, sent: list[Seen]) -> tuple[list[np.ndarray], float]:
    """Return the candidates closest to the first upper images, and their mean correlation."""
    head, rows, tops = np.asarray(case.state.y.weight, float), [], []
    for seen in sent[:SHOWN]:
        found = candidates(seen, head)
        fits = attack.correlations(found, seen.images[:1])[:, 0]
        rows.append(found[fits.argmax()])
        tops.append(fits.max())
    return rows, float(np.mean(tops))


def leaks(name: str) -> dict[str, Any]:
    """Return what messages show, case by case; draw the figure."""
    first, late, accuracy = trained(name)
    plain = exchange(name, Case("", first))
    clip = cost.norms(jax.tree.map(lambda *leaves: np.stack(leaves), *(s.q for s in plain)))
    results: dict[str, Any] = {"dataset": name, "accuracy": accuracy, "clip": clip._asdict()}
    results["exact"] = exact(plain)
    rows, table = {}, {}
    for case in cases(first, late, clip):
        sent = exchange(name, case)
        table[case.name] = best(case, sent)
        if case.state is late and case.batch == 1:
            results["both"] = both_levels(sent)
        if label := SHOW.get(case.name):
            rows[label] = closest(case, sent)
        print(case.name, table[case.name], flush=True)
    truth = [seen.images[0] for seen in plain[:SHOWN]]
    rows = {label: rows[label] for label in SHOW.values()}
    save_svg(picture.draw(truth, rows), HERE / "figure.svg")
    return results | {"best": table}


PARTS = {"messages": leaks, "training": cost.runs}


def main() -> None:
    """Run both parts, or those asked for; write everything down."""
    keep_compilations()
    file, name = HERE / "results.json", dataset()
    results = json.loads(file.read_text()) if file.exists() else {}
    for part in sys.argv[1:] or PARTS:
        results[part] = PARTS[part](name)
        file.write_text(json.dumps(results, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
