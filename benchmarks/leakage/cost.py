"""What [privacy] costs: accuracy beside epsilon, on thousands of small clients."""

from typing import Any

import jax
import numpy as np

from simfbo import datasets
from simfbo.config import run as settings
from simfbo.config.build import build, build_algorithm, build_federation, run_built
from simfbo.config.build_task import build_task
from simfbo.core.problem import Point
from simfbo.core.sampling import Cohort

ROUNDS, IMAGES, SHARE = 300, 12, 25  # images a client; one client in 25 takes part
FROZEN = {"algorithm.local.x": 1e-30}
STRONG = {
    "privacy.clip": {"x": 0.4, "y": 1.0, "v": 0.4},
    "privacy.noise": {"x": 11.0, "y": 11.0, "v": 11.0},
}
RUNS: dict[str, dict[str, Any]] = {
    "no privacy": {},
    "z = 4, C = 1, 1, 1": {"privacy.noise": {"x": 4.0, "y": 4.0, "v": 4.0}},
    "z = 11, C = 0.4, 1, 0.4": STRONG,
    "no privacy, x never moves": FROZEN,
    "z = 11, C = 0.4, 1, 0.4, x never moves": STRONG | FROZEN,
}


def runs(name: str) -> dict[str, Any]:
    """Return accuracy and epsilon of every run, and the medians of the messages' norms."""
    task = build_task(setting(name))
    results = {"norms": first_norms(name, task)._asdict(), "runs": {}}
    print("median norms of q in round 1:", results["norms"])
    for label, keys in RUNS.items():
        history = run_built(build(setting(name, keys), task), None)
        last = history.records[-1]
        row = {key: last.get(key) for key in ("test_accuracy", "epsilon", "seconds")}
        results["runs"][label] = row
        print(label, row, flush=True)
    return results


def setting(name: str, keys: dict[str, Any] | None = None) -> settings.RunConfig:
    """Return the settings of a run: full batches, server-side noise."""
    clients = len(datasets.load(name).train_labels) // IMAGES
    task = {"name": "hyper-representation", "dataset": name, "clients": clients}
    tree = {
        "task": {**task, "batch_size": "full"}, "sampling": {"size": clients // SHARE},
        "rounds": ROUNDS, "every": ROUNDS,
    }  # fmt: skip
    return settings.checked(tree, keys or {})


def first_norms(name: str, task: Any) -> Point[float]:
    """Return the median norms of the first messages of up to a hundred clients, by channel."""
    method = build_algorithm(setting(name).algorithm, task.problem, setting(name).rounds)
    ids = np.arange(min(100, task.data.n), dtype=np.int32)
    state = method.init(task.x0, task.y0)
    payload, everyone = Point(state.x, state.y, state.v), Cohort(ids, np.ones(len(ids)))
    federation = build_federation(setting(name), task.data)
    step = method.client_steps["simfbo_step"]
    return norms(federation.gather(step, payload, everyone, jax.random.key(0)))


def norms(messages: Point) -> Point[float]:
    """Return the median norm of messages, stacked client by client, by channel."""
    return Point(*(float(np.median(_norms(part))) for part in messages))


def _norms(stack: Any) -> np.ndarray:
    squares = [np.square(leaf).reshape(len(leaf), -1).sum(1) for leaf in jax.tree.leaves(stack)]
    return np.sqrt(sum(squares))
