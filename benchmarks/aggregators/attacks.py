"""Test accuracy with hostile clients: a representation for scikit-learn's digits."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rules import RULES, everywhere

from simfbo import Client, Gate, Method, Point, SimulatedFederation, run
from simfbo.algorithms import simfbo
from simfbo.core import partition
from simfbo.core.federation import ClientStep, Federation, View
from simfbo.core.method import WrappedStep, Wrapper
from simfbo.core.sampling import Cohort, everyone, without_replacement
from simfbo.datasets import load
from simfbo.tasks import Task, hyper_representation
from simfbo.tasks.models import mlp

PARTITIONS, SEEDS, CLIENTS, ROUNDS = ("iid", "shards"), (0, 1, 2), 20, 300
SHARES = (0.0, 0.1, 0.2, 0.3)
LOUD, QUIET = -10.0, -1.0  # what hostile clients multiply their messages by
GATED, ABSENT = "mean, gate", "mean of the honest"


class Hostile(WrappedStep):
    """A client step of which hostile clients send a multiple.

    The payload also says how many clients are hostile, and by what they multiply.
    """

    def __call__(self, payload: Any, client: Client) -> Any:
        """Run the step."""
        (count, by), payload = payload
        factor = jnp.where(client.data.client < count, by, 1.0)
        return jax.tree.map(lambda a: factor.astype(a.dtype) * a, self.step(payload, client))


class Attacked(Wrapper):
    """A method whose first `count` clients are hostile."""

    count: float
    by: float

    def round(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        """Run a round under attack."""

        def attacked(step: ClientStep, payload: Any, cohort: Cohort, key: Any) -> Any:
            attack = jnp.asarray(self.count), jnp.asarray(self.by, jnp.float32)
            return federation.sum(Hostile(step), (attack, payload), cohort, key)

        return self.inner.round(state, View(federation, attacked, federation.gather), key)


def attackable(algorithm: Method) -> Callable[..., Method]:
    """Return (count, factor) -> the method with the first `count` clients hostile.

    Both are inputs, so that all attacks are one compiled program.
    """
    return lambda count, by=LOUD: Attacked(algorithm, count, by)


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


class Bench:
    """One partition and seed; programs are compiled once for all that is tried on it."""

    def __init__(self, kind: str, seed: int, sampler: Any) -> None:
        """Build task and federation."""
        self.task, self.seed = digits(kind, seed), seed
        self.federation = SimulatedFederation(self.task.data, sampler, detect_anomalies=True)
        steps = Point(x=0.05, y=0.2, v=0.1)
        self.hostile = attackable(simfbo(self.task.problem, steps, radius=10.0))

    def accuracy(
        self,
        count: int,
        rule: str = "mean",
        limit: float | None = None,
        absent: int = 0,
        by: float = LOUD,
    ) -> dict[str, Any]:
        """Return test accuracy, how the run ended and how many replies were refused."""
        self.federation.aggregators, self.federation.gate = everywhere(rule), Gate(limit)
        self.federation.absence = (lambda key, ids: ids < absent) if absent else None
        history = run(
            self.hostile(count, by), self.federation, self.task.x0, self.task.y0,
            rounds=ROUNDS, seed=self.seed, evaluate=self.task.evaluate, every=ROUNDS,
        )  # fmt: skip
        last, end = history.records[-1], history.end or {}
        return {
            "accuracy": last["test_accuracy"], "rounds": last["round"],
            "refused": last["refused"], "end": end["status"],
        }  # fmt: skip

    def first_norm(self) -> float:
        """Return the median norm of the first round's messages."""
        start = self.task.x0, self.task.y0
        run(self.hostile(0), self.federation, *start, rounds=1, seed=self.seed)
        latest = self.federation.latest
        assert latest is not None
        return float(np.median(np.sqrt(latest.squares.sum(1))))


def case(kind: str, seed: int) -> dict[str, dict[str, Any]]:
    """Return all results with everyone in every round, by rule and share of hostile clients."""
    bench = Bench(kind, seed, everyone())
    limit = 2 * bench.first_norm()
    found: dict[str, dict[str, Any]] = {name: {} for name in (*RULES, GATED, ABSENT)}
    for share in SHARES:
        count, at = round(share * CLIENTS), f"{share:g}"
        for rule in RULES:
            found[rule][at] = bench.accuracy(count, rule)
        found[GATED][at] = {**bench.accuracy(count, limit=limit), "limit": limit}
        found[ABSENT][at] = bench.accuracy(count, absent=count)
        print(kind, seed, at, {n: round(100 * v[at]["accuracy"], 1) for n, v in found.items()},
              file=sys.stderr)  # fmt: skip
    return found


def half_asked(kind: str, seed: int) -> dict[str, dict[str, Any]]:
    """Return the results with ten of the twenty in a round, four of the twenty hostile."""
    bench = Bench(kind, seed, without_replacement(CLIENTS // 2))
    return {rule: bench.accuracy(CLIENTS // 5, rule) for rule in RULES}


def quiet(kind: str, seed: int) -> dict[str, dict[str, Any]]:
    """Return the results with everyone asked, six of the twenty hostile at an honest volume."""
    bench, count = Bench(kind, seed, everyone()), round(0.3 * CLIENTS)
    limit = 2 * bench.first_norm()
    found = {rule: bench.accuracy(count, rule, by=QUIET) for rule in RULES}
    return {**found, GATED: bench.accuracy(count, limit=limit, by=QUIET)}


def measure() -> dict[str, Any]:
    """Return every result, by partition and seed."""
    return {
        "everyone": {kind: [case(kind, seed) for seed in SEEDS] for kind in PARTITIONS},
        "half": {kind: [half_asked(kind, seed) for seed in SEEDS] for kind in PARTITIONS},
        "quiet": {kind: [quiet(kind, seed) for seed in SEEDS] for kind in PARTITIONS},
    }
