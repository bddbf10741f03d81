"""Label cleaning: how far to trust labels, learnt from a few that are known to be right.

    g_i = mean of trust(x, row) loss(y, row) + lambda/2 ||y||^2      on labels that may be wrong,
    f_i = mean loss(y, row)                                          on the few clean ones.

The trust is a number between 0 and 1, either one for every client, sigmoid(x_i), or a small network
of the row's loss under a reference model r, which sees all labels alike:

    r = argmin mean loss(r, row) + lambda/2 ||r||^2,     trust = net_x(loss(r, row)).

r is part of the lower variable and is learnt along. No gradient flows through the trust into r, so
r does not depend on x and the hypergradient stays exact. The size of x does not grow with the data.
Ren et al. (2018) and Shu et al. (2019) weigh samples in this way on one machine.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import roc_auc_score

from simfbo.core import trees
from simfbo.core.data import FederatedData, federate
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.errors import UserError
from simfbo.tasks import linear
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Samples, owners
from simfbo.tasks.task import Baseline, Metrics, Task

Trust = Literal["network", "clients"]
_NOISE, _NETWORK = 13, 14  # purposes of a seed
_HIDDEN = 8
_GRID = np.linspace(-7.0, 0.0, 8)  # logarithms of lambda


class Network(NamedTuple):
    """A perceptron from one number to one number, with hidden units of tanh."""

    slope: Any
    offset: Any
    out: Any
    bias: Any

    def __call__(self, loss: jax.Array) -> jax.Array:
        """Return the trust in rows of these losses."""
        hidden = jnp.tanh(loss[:, None] * self.slope + self.offset)
        return jax.nn.sigmoid(hidden @ self.out + self.bias)


class Reference(NamedTuple):
    """The lower variable beside a network: the model, and the reference whose losses it sees."""

    model: Linear
    reference: Linear


class Noisy(NamedTuple):
    """Labels of which some are wrong.

    Attributes:
        labels: what the clients have.
        wrong: whether each is wrong.
        rates: each client's share of wrong labels.
    """

    labels: np.ndarray
    wrong: np.ndarray
    rates: np.ndarray


def corrupted(labels: np.ndarray, parts: Rows, share: float, classes: int, seed: int) -> Noisy:
    """Return labels with each client's wrong at a rate of its own, spread evenly about `share`.

    A wrong label is any of the other classes, with equal chances. The rates reach from
    2 share - 1 or 0 up to 2 share or 1.
    """
    if not 0 < share < 1:
        raise UserError(f"The share of wrong labels must lie between 0 and 1, got {share}.")
    rng, reach = np.random.default_rng([_NOISE, seed]), min(share, 1 - share)
    spread = np.linspace(-reach, reach, len(parts)) if len(parts) > 1 else np.zeros(1)
    rates = rng.permutation(share + spread)
    noisy, wrong = labels.copy(), np.zeros(len(labels), bool)
    for rows, rate in zip(parts, rates, strict=True):
        wrong[rows] = rng.random(len(rows)) < rate
    noisy[wrong] = (labels[wrong] + rng.integers(1, classes, wrong.sum())) % classes
    return Noisy(noisy.astype(np.int32), wrong, rates)


def problem(trust: Trust, classes: int, penalty: float) -> BilevelProblem:
    """Return the two losses, on batches (features, label, client)."""

    def by_client(x: jax.Array, y: Linear, batch: tuple) -> jax.Array:
        features, label, client = batch
        found = linear.losses(y(features), label, classes)
        return (jax.nn.sigmoid(x)[client] * found).mean() + 0.5 * penalty * trees.squared_norm(y)

    def by_network(x: Network, y: Reference, batch: tuple) -> jax.Array:
        features, label, _ = batch
        reference = linear.losses(y.reference(features), label, classes)
        found = x(jax.lax.stop_gradient(reference)) * linear.losses(
            y.model(features), label, classes
        )
        return (found + reference).mean() + 0.5 * penalty * trees.squared_norm(y)

    def upper(x: PyTree, y: Any, batch: tuple) -> jax.Array:
        return linear.losses(model_of(y)(batch[0]), batch[1], classes).mean()

    return BilevelProblem(upper, by_network if trust == "network" else by_client)


def model_of(y: Linear | Reference) -> Linear:
    """Return the model that predicts."""
    return y.model if isinstance(y, Reference) else y


def trust_in(x: Any, y: Any, batch: tuple, classes: int) -> jax.Array:
    """Return the trust in each row of a batch (features, label, client)."""
    if isinstance(y, Reference):
        return x(linear.losses(y.reference(batch[0]), batch[1], classes))
    return jax.nn.sigmoid(x)[batch[2]]


def first(trust: Trust, clients: int, features: int, classes: int, seed: int) -> tuple[Any, Any]:
    """Return x0 and y0; all labels are trusted alike."""
    y0 = linear.zeros(features, classes)
    if trust == "clients":
        return np.zeros(clients, np.float32), y0
    rng = np.random.default_rng([_NETWORK, seed])
    slope, offset = rng.normal(size=(2, _HIDDEN)).astype(np.float32)
    nothing = np.zeros(_HIDDEN, np.float32)
    return Network(slope, offset, nothing, np.zeros((), np.float32)), Reference(y0, y0)


def label_cleaning(
    samples: Samples,
    parts: Rows,
    *,
    wrong: float = 0.5,
    clean: int = 100,
    trust: Trust = "network",
    penalty: float = 0.01,
    batch_size: int | None = None,
    seed: int = 0,
) -> Task:
    """Return the task of training on labels of which many are wrong.

    Args:
        samples: the rows, with right labels; wrong ones are made here.
        parts: each client's rows.
        wrong: the share of wrong labels, all clients together.
        clean: how many rows, all clients together, keep right labels as the upper part.
        trust: `network` or `clients`.
        penalty: lambda.
        batch_size: rows in a minibatch; all by default.
        seed: of the noise, of which rows are clean, and of the network.

    Returns:
        The task; its metric is the accuracy on the test rows.
    """
    classes, owner = samples.classes, owners(parts, len(samples.target))
    lower, upper = set_apart(parts, clean, seed)
    noisy = corrupted(samples.target, lower, wrong, classes, seed)
    samples = samples._replace(features=jnp.asarray(samples.features))  # held once by all data
    rows = (samples.features, noisy.labels, owner)  # the upper rows of it are right
    data = federate(rows, lower, upper, batch_size=batch_size)
    losses = problem(trust, classes, penalty)
    x0, y0 = first(trust, len(parts), samples.features.shape[1], classes, seed)
    known = np.concatenate(lower)
    labelled = tuple(jnp.asarray(part[known]) for part in rows)
    evaluate = _evaluator(losses, data, samples, labelled, noisy.wrong[known])
    baselines = _baselines(samples, noisy, (lower, upper), owner, penalty, batch_size, evaluate)
    return Task(
        "label-cleaning", losses, data, x0, y0, evaluate, "test_accuracy", "upper_loss", baselines
    )


def set_apart(parts: Rows, count: int, seed: int) -> tuple[Rows, Rows]:
    """Return (the rest, up to `count` rows taken evenly from the clients), client by client.

    A client keeps at least one row; what it cannot give is not made up for.
    """
    if any(len(rows) < 2 for rows in parts):
        raise UserError("Every client needs two rows, one to train on and one that is clean.")
    if count < len(parts):
        raise UserError(
            f"{count} clean rows cannot give each of {len(parts)} clients one: use more of them, "
            "or fewer clients."
        )
    rng, sizes = np.random.default_rng([_NOISE + 2, seed]), np.full(len(parts), count // len(parts))
    sizes[: count % len(parts)] += 1
    mixed = [rng.permutation(rows) for rows in parts]
    cuts = [min(size, len(rows) - 1) for size, rows in zip(sizes, mixed, strict=True)]
    lower = [rows[cut:] for rows, cut in zip(mixed, cuts, strict=True)]
    return lower, [rows[:cut] for rows, cut in zip(mixed, cuts, strict=True)]


def _evaluator(
    losses: BilevelProblem, data: FederatedData, samples: Samples, rows: tuple, wrong: np.ndarray
) -> Metrics:
    """Return (state) -> accuracy on test rows, and how well trust tells right labels from wrong."""
    upper = linear.upper_loss(losses, data)
    inputs, target = jnp.asarray(samples.test_features), jnp.asarray(samples.test_target)
    right = jax.jit(lambda model: model(inputs).argmax(-1).astype(target.dtype) == target)
    trust = jax.jit(lambda x, y: trust_in(x, y, rows, samples.classes))

    def evaluate(state: Any) -> dict[str, float]:
        found = {
            "test_accuracy": float(right(model_of(state.y)).mean(dtype=float)),
            "upper_loss": upper(state),
        }
        if state.x is None or len(np.unique(wrong)) < 2:
            return found
        auc = roc_auc_score(~wrong, np.nan_to_num(np.asarray(trust(state.x, state.y))))
        return {**found, "trust_auc": float(auc)}

    return evaluate


def _baselines(
    samples: Samples, noisy: Noisy, split: tuple[Rows, Rows], owner: np.ndarray,
    penalty: float, batch_size: int | None, evaluate: Metrics,
) -> tuple[Baseline, ...]:  # fmt: skip
    """Return training on all labels as they are, on the clean ones only, and on the truth."""
    (lower, upper), features = split, samples.features

    def mistakes(x: jax.Array, y: Linear, batch: tuple) -> jax.Array:
        return linear.losses(y(batch[0]), batch[1], samples.classes).mean()

    def trained(x: jax.Array, y: Linear, batch: tuple) -> jax.Array:
        return mistakes(x, y, batch) + 0.5 * jnp.exp(x) * trees.squared_norm(y)

    def plain(name: str, labels: np.ndarray, rows: Rows, grid: Any) -> Baseline:
        data = federate((features, labels, owner), rows, upper, batch_size=batch_size)
        values = tuple(np.asarray(value, np.float32) for value in grid)
        y0 = linear.zeros(features.shape[1], samples.classes)
        losses = BilevelProblem(mistakes, trained)
        return Baseline(name, losses, data, y0, values, lambda state: evaluate(Point(y=state.y)))

    own = (np.log(penalty),)
    both = [np.concatenate(pair) for pair in zip(lower, upper, strict=True)]
    return (
        plain("noisy labels", noisy.labels, lower, own),
        plain("clean labels only", noisy.labels, upper, own),
        plain("noisy and clean together", noisy.labels, both, own),
        plain("noisy labels, 8 lambdas tried", noisy.labels, lower, _GRID),
        plain("all labels right (oracle)", samples.target, lower, own),
    )
