"""What server and clients share: the losses, where a client's data is, and the run's settings.

This is the file to change. The server never calls `load_client`, a client never calls `evaluate`.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from simfbo import BilevelProblem, ClientMetric, Point, sampling
from simfbo.algorithms import simfbo
from simfbo.flower import Deployment

HIDDEN = 64


def features(x, images):
    """Return the representation that clients learn together: one hidden layer."""
    return jnp.tanh(images @ x["weight"] + x["bias"])


def upper(x, y, batch):
    """Return the loss on validation images: what the representation x is for."""
    images, labels = batch
    logits = features(x, images) @ y["weight"] + y["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(x, y, batch):
    """Return the share of a client's validation images that is classified correctly."""
    images, labels = batch
    logits = features(x, images) @ y["weight"] + y["bias"]
    return jnp.mean(jnp.argmax(logits, axis=1) == labels)


def lower(x, y, batch):
    """Return the loss on training images, strongly convex in the head y."""
    return upper(x, y, batch) + 0.01 * (jnp.sum(y["weight"] ** 2) + jnp.sum(y["bias"] ** 2))


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
    images, labels = (jnp.asarray(part[1500:]) for part in digits())
    logits = features(state.x, images) @ state.y["weight"] + state.y["bias"]
    return {"test_accuracy": float(jnp.mean(jnp.argmax(logits, axis=1) == labels))}


def start(seed):
    """Return initial x and y."""
    weight = jax.random.normal(jax.random.key(seed), (64, HIDDEN)) / 8
    x = {"weight": weight, "bias": jnp.zeros(HIDDEN)}
    return x, {"weight": jnp.zeros((HIDDEN, 10)), "bias": jnp.zeros(10)}


def deployment(config):
    """Return the run that a configuration ([tool.flwr.app.config] in pyproject.toml) describes."""
    x0, y0 = start(config["seed"])
    sample = np.zeros((1, 64), "float32"), np.zeros(1, "int32")
    return Deployment(
        algorithm=simfbo(
            BilevelProblem(upper, lower), Point(x=0.5, y=0.5, v=0.1), Point(x=0.5, y=0.5, v=0.1)
        ),
        x0=x0,
        y0=y0,
        clients=10,
        load_client=load_client,
        example=(sample, sample),
        rounds=config["rounds"],
        batch_size=32,
        sampler=sampling.without_replacement(config["cohort"]),
        evaluate=evaluate,
        every=5,
        client_metrics={"upper_loss": upper, "accuracy": ClientMetric(accuracy, "max")},
        seed=config["seed"],
        timeout=config["timeout"],
    )
