"""A run of 160,000 numbers over six clients, with any method, that can be disturbed on purpose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo import (
    BilevelProblem,
    Gate,
    Point,
    aggregation,
    algorithms,
    codecs,
    local_work,
    sampling,
)
from simfbo.flower import Deployment

PIXELS, HIDDEN, CLIENTS = 784, 200, 6
TAUS = (1, 4, 2, 3, 1, 2)
CODECS = {
    "dithered": codecs.Codecs(
        up=Point(codecs.dithered(3), codecs.dithered(0.5), codecs.dithered(1)),
        down=Point(
            codecs.relative_to_start(codecs.dithered(3)),
            codecs.relative_to_start(codecs.dithered(0.25)),
            codecs.dithered(1),
        ),
    ),
    "small": codecs.Codecs(
        up=Point(codecs.lowrank(32, 0.3), codecs.dithered(0.5), codecs.dithered(1)),
        down=Point(
            codecs.relative_to_start(codecs.lowrank(56, 0.4)),
            codecs.relative_to_start(codecs.dithered(0.25)),
            codecs.dithered(1),
        ),
    ),
}
NODE_AGGREGATORS = {"median": aggregation.median(), "trimmed-mean": aggregation.trimmed_mean(0.34)}


def upper(x, y, batch):
    """Return the cross-entropy of a network with hidden layer x and head y."""
    images, labels = batch
    logits = jnp.tanh(images @ x) @ y
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def lower(x, y, batch):
    """Return it with a ridge on y."""
    return upper(x, y, batch) + 0.01 * jnp.sum(y**2)


def load_client(client, node):
    """Return made-up images: what they show does not matter here."""
    rng = np.random.default_rng(client)
    images = rng.normal(size=(2, 40 + client, PIXELS)).astype("float32")
    labels = rng.integers(0, 10, (2, 40 + client)).astype("int32")
    return (images[0], labels[0]), (images[1], labels[1])


def deployment(config):
    """Return the run."""
    steps = Point(x=0.01, y=0.05, v=0.05)
    method = getattr(algorithms, config["method"])(BilevelProblem(upper, lower), steps)
    x0 = jax.random.normal(jax.random.key(1), (PIXELS, HIDDEN)) / 28
    sample = np.zeros((1, PIXELS), "float32"), np.zeros(1, "int32")
    over_nodes = NODE_AGGREGATORS.get(config.get("node_aggregator", "mean"))
    return Deployment(
        algorithm=method,
        x0=x0,
        y0=0.1 * jax.random.normal(jax.random.key(2), (HIDDEN, 10)),
        clients=CLIENTS,
        load_client=load_client,
        example=(sample, sample),
        rounds=config["rounds"],
        batch_size=16,
        sampler=sampling.without_replacement(config["cohort"]),
        local_work=local_work.fixed(TAUS),
        gate=Gate(min_replies=1),
        codecs=CODECS.get(config.get("codecs", "none")),
        partial_sums=config["partial_sums"],
        node_aggregators=over_nodes and Point(over_nodes, over_nodes, over_nodes),
        timeout=config["timeout"],
        wait=90.0,
    )
