"""What server and clients share: the traced losses, where a client's data is, and the settings.

Nothing here needs PyTorch. The server never calls `load_client`, a client never calls `evaluate`.
"""

from functools import cache
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from simfbo import BilevelProblem, Point, sampling
from simfbo.algorithms import simfbo
from simfbo.flower import Deployment
from simfbo.torch import restore

SAVED = restore(Path(__file__).parent / "problem.json")  # written by model.py


@cache
def digits():
    """Return scikit-learn's digits, shuffled: the first 1,500 for the clients, the rest to test."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16).astype("float32"), labels[order].astype("int32")


def load_client(client, node):
    """Return one client's training and validation samples, on the machine that has them.

    Replace this by your own: read a file or a database that only this node can see. `node` holds
    what its SuperNode was started with (--node-config), such as a path.
    """
    images, labels = (part[:1500] for part in digits())
    train, validate = np.array_split(np.arange(client, 1500, 10), 2)
    return (images[train], labels[train]), (images[validate], labels[validate])


def evaluate(state):
    """Return metrics on data that the server has; leave it out if it has none."""
    test = tuple(part[1500:] for part in digits())
    return {"test_accuracy": float(SAVED.losses["accuracy"](state.x, state.y, test))}


def deployment(config):
    """Return the run that a configuration ([tool.flwr.app.config] in pyproject.toml) describes."""
    problem = BilevelProblem(SAVED.losses["upper"], SAVED.losses["lower"])
    sample = np.zeros((1, 64), "float32"), np.zeros(1, "int32")
    return Deployment(
        algorithm=simfbo(problem, Point(x=0.5, y=0.5, v=0.1), Point(x=0.5, y=0.5, v=0.1)),
        x0=SAVED.x0,
        y0=SAVED.y0,
        clients=10,
        load_client=load_client,
        example=(sample, sample),
        rounds=config["rounds"],
        batch_size=32,
        sampler=sampling.without_replacement(config["cohort"]),
        evaluate=evaluate,
        seed=config["seed"],
        timeout=config["timeout"],
    )
