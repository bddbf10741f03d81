"""Two of ten clients hostile: what aggregators and gates save, and whether the run says so.

    python benchmarks/trust/attacks.py [--seeds 0,1,2]

Writes results/attacks.json; what is there is not run again. The task is
hyper-representation on scikit-learn's digits. Hostile clients see all honest messages before they
send theirs.
"""

import argparse
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from simfbo import Gate, Method, PerClient, Point, SimulatedFederation, aggregation, run
from simfbo.algorithms import simfbo
from simfbo.core import partition
from simfbo.core.federation import ClientStep, Federation, View
from simfbo.core.method import Wrapper
from simfbo.core.sampling import Cohort
from simfbo.datasets import load
from simfbo.errors import ClientWarning
from simfbo.tasks import Task, hyper_representation
from simfbo.tasks.models import mlp

FILE = Path(__file__).parent / "results/attacks.json"
PARTITIONS, CLIENTS, HOSTILE, ROUNDS = ("iid", "shards"), 10, 2, 300
Attack = Callable[[np.ndarray], np.ndarray]  # honest messages, the hostile clients' first -> sent


def times(factor: float, messages: np.ndarray) -> np.ndarray:
    """Send a multiple of one's own message."""
    return np.concatenate([factor * messages[:HOSTILE], messages[HOSTILE:]])


def alie(z: float, messages: np.ndarray) -> np.ndarray:
    """Send the honest mean less z standard deviations (Baruch et al., NeurIPS 2019)."""
    honest = messages[HOSTILE:]
    return _all_send(honest.mean(0) - z * honest.std(0, ddof=1), messages)


def ipm(epsilon: float, messages: np.ndarray) -> np.ndarray:
    """Send the honest mean times -epsilon (Xie, Koyejo, Gupta, UAI 2020)."""
    return _all_send(-epsilon * messages[HOSTILE:].mean(0), messages)


def _all_send(message: np.ndarray, messages: np.ndarray) -> np.ndarray:
    """Return the messages with the same one from all hostile clients."""
    return np.concatenate([np.stack([message] * HOSTILE), messages[HOSTILE:]])


def z_max() -> float:
    """Return ALIE's z: with 10 clients, 2 of them hostile, it is 0."""
    supporters = CLIENTS // 2 + 1 - HOSTILE
    return NormalDist().inv_cdf((CLIENTS - HOSTILE - supporters) / (CLIENTS - HOSTILE))


ATTACKS: dict[str, Attack] = {
    "none": lambda messages: messages,
    "-1x": partial(times, -1.0),
    "5x": partial(times, 5.0),
    "20x": partial(times, 20.0),
    "100x": partial(times, 100.0),
    "-10x": partial(times, -10.0),
    "ALIE, z 0": partial(alie, z_max()),
    "ALIE, z 1.5": partial(alie, 1.5),
    "IPM 0.5": partial(ipm, 0.5),
    "IPM 10": partial(ipm, 10.0),
}


class Defence(NamedTuple):
    """An aggregator and a gate; `fixed` is a limit of twice the first round's median norm."""

    aggregator: Any = None
    limit: str | None = None


DEFENCES = {
    "mean": Defence(),
    "mean, fixed limit": Defence(limit="fixed"),
    "mean, auto limit": Defence(limit="auto"),
    "median": Defence(aggregation.median()),
    "trimmed-mean 0.2": Defence(aggregation.trimmed_mean(0.2)),
    "clipped-mean": Defence(aggregation.clipped_mean()),
}


def digits(kind: str, seed: int) -> Task:
    """Return the task; label shards leave a client about two digits."""
    images = load("digits")
    labels = images.train_labels
    if kind == "iid":
        parts = partition.iid(len(labels), CLIENTS, seed)
    else:
        parts = partition.shards(labels, CLIENTS, 2, seed)
    share = 0.5 if kind == "iid" else 0.2
    return hyper_representation(
        images, parts, model=mlp(64, 50, 10), upper_share=share, batch_size=32, seed=seed
    )


def replay(payload: Any, client: Any) -> Any:
    """Send what was received: a client step that plays back messages."""
    return payload


class Attacked(Wrapper):
    """A method whose messages are computed honestly, changed, and sent."""

    honest: SimulatedFederation = eqx.field(static=True)
    attack: Attack = eqx.field(static=True)

    def round(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        """Run a round under attack."""

        def send(step: ClientStep, payload: Any, cohort: Cohort, key: Any) -> Any:
            messages = self.honest.gather(step, payload, cohort, key)
            sent = jax.tree.map(lambda a: self.attack(np.asarray(a)).astype(a.dtype), messages)
            return federation.sum(replay, PerClient(sent), cohort, key)

        return self.inner.round(state, View(federation, send, federation.gather), key)

    def client_memory(self, x: Any, y: Any) -> None:
        """Return nothing: clients remember where honest messages are computed."""

    @property
    def has_memory(self) -> bool:
        """Return that there is none here."""
        return False


def attacked(algorithm: Method, honest: SimulatedFederation, attack: Attack) -> Method:
    """Return a method whose messages are computed honestly, changed, and sent."""
    return Attacked(algorithm, honest, attack)


class Bench:
    """One partition and seed."""

    def __init__(self, kind: str, seed: int) -> None:
        """Build the task and the federation that computes honest messages."""
        self.task, self.seed = digits(kind, seed), seed
        self.algorithm = simfbo(self.task.problem, Point(x=0.05, y=0.2, v=0.1), radius=10.0)
        self.honest = SimulatedFederation(self.task.data, detect_anomalies=True)  # of latest
        start = self.task.x0, self.task.y0
        run(self.algorithm, self.honest, *start, rounds=1, seed=seed)
        assert self.honest.latest is not None
        self.limit = 2 * float(np.median(np.sqrt(self.honest.latest.squares.sum(1))))

    def outcome(self, attack: Attack, defence: Defence) -> dict[str, Any]:
        """Return test accuracy, how the run ended, and what it said."""
        rule = defence.aggregator
        gate = Gate("auto" if defence.limit == "auto" else self.limit if defence.limit else None)
        federation = SimulatedFederation(
            self.task.data, gate=gate, aggregators=Point(rule, rule, rule), detect_anomalies=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ClientWarning)
            history = run(
                attacked(self.algorithm, self.honest, attack), federation,
                self.task.x0, self.task.y0, rounds=ROUNDS, seed=self.seed,
                evaluate=self.task.evaluate, every=ROUNDS,
            )  # fmt: skip
        last = history.records[-1]
        hostile = sum(line["client"] < HOSTILE for line in history.refusals)
        return {
            "accuracy": last["test_accuracy"], "rounds": last["round"],
            "end": (history.end or {})["status"], "refused": last["refused"],
            "refused_hostile": hostile,
            "warnings": [
                {key: line[key] for key in ("round", "about", "clients", "share")}
                for line in history.warnings
            ],
        }  # fmt: skip


def main() -> None:
    """Run all attacks against all defences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    text = options.output.read_text() if options.output.exists() else "{}"
    found: dict[str, Any] = json.loads(text)
    for kind, seed in itertools.product(PARTITIONS, map(int, options.seeds.split(","))):
        bench = Bench(kind, seed)
        for (name, defence), (attack, act) in itertools.product(DEFENCES.items(), ATTACKS.items()):
            runs = found.setdefault(kind, {}).setdefault(name, {}).setdefault(attack, [])
            if seed in [outcome["seed"] for outcome in runs]:
                continue
            runs.append({"seed": seed, **bench.outcome(act, defence)})
            print(kind, name, attack, json.dumps(runs[-1]), file=sys.stderr, flush=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
