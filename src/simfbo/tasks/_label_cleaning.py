"""Label cleaning: learn how far to trust labels, from a few that are correct.

    g_i = mean of trust(x, row) loss(y, row) + lambda/2 ||y||^2      on labels that may be wrong,
    f_i = mean loss(y, row)                                          on the few clean ones.

Trust is a number between 0 and 1: either one per client, or per client and period, sigmoid(x_i), or
a small network of the row's loss under a reference model r that weights all labels equally:

    r = argmin mean loss(r, row) + lambda/2 ||r||^2,     trust = net_x(loss(r, row)).

r is part of the lower variable and is learnt with it. No gradient flows through the trust into r,
so r does not depend on x and the hypergradient stays exact. The size of x does not grow with the
data. Ren et al. (2018) and Shu et al. (2019) weight samples in this way on one machine.
"""

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.data import federate
from simfbo.core.keys import Purpose, seed_rng
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.errors import require
from simfbo.tasks import linear
from simfbo.tasks.label_noise import Noisy, corrupted, set_apart
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Samples, Training, owners
from simfbo.tasks.task import Baseline, Metrics, Setting, Task

Trust = Literal["network", "clients"]
_HIDDEN = 8
_GRID = np.linspace(-7.0, 0.0, 8)  # logarithms of lambda


class Network(NamedTuple):
    """A perceptron from one number to one number, with one hidden layer of tanh units."""

    slope: Any
    offset: Any
    out: Any
    bias: Any

    def __call__(self, loss: jax.Array) -> jax.Array:
        """Return the trust in rows with these losses."""
        hidden = jnp.tanh(loss[:, None] * self.slope + self.offset)
        return jax.nn.sigmoid(hidden @ self.out + self.bias)


class Reference(NamedTuple):
    """The lower variable with a trust network: the model, and the reference model."""

    model: Linear
    reference: Linear


@lru_cache(maxsize=32)
def problem(trust: Trust, classes: int, penalty: float) -> BilevelProblem:
    """Build the two losses on batches (features, label, cell); cached.

    The cell is the index of the row's trust: its client, or its client and period.
    """

    def by_client(x: jax.Array, y: Linear, batch: linear.Batch) -> jax.Array:
        features, label, cell = batch
        row_losses = linear.losses(y(features), label, classes)
        return (jax.nn.sigmoid(x)[cell] * row_losses).mean() + 0.5 * penalty * trees.squared_norm(y)

    def by_network(x: Network, y: Reference, batch: linear.Batch) -> jax.Array:
        features, label, _ = batch
        reference = linear.losses(y.reference(features), label, classes)
        row_losses = x(jax.lax.stop_gradient(reference)) * linear.losses(
            y.model(features), label, classes
        )
        return (row_losses + reference).mean() + 0.5 * penalty * trees.squared_norm(y)

    def upper(x: PyTree, y: PyTree, batch: linear.Batch) -> jax.Array:
        return linear.losses(model_of(y)(batch[0]), batch[1], classes).mean()

    return BilevelProblem(upper, by_network if trust == "network" else by_client)


@lru_cache(maxsize=32)
def weighted_by_row(trust: Trust, classes: int, penalty: float) -> BilevelProblem:
    """Build the losses on batches (features, label, cell, lower factor, upper factor).

    The factors turn the weighted sum over clients into a mean over rows at each level: a client
    without rows at a level has factor zero there.
    """
    plain = problem(trust, classes, penalty)

    def lower(x: PyTree, y: PyTree, batch: linear.Batch) -> jax.Array:
        return batch[3].mean() * plain.lower(x, y, batch[:3])

    def upper(x: PyTree, y: PyTree, batch: linear.Batch) -> jax.Array:
        return batch[4].mean() * plain.upper(x, y, batch[:3])

    return BilevelProblem(upper, lower)


def assemble(
    training: Training,
    split: tuple[Rows, Rows],
    *,
    trust: Trust,
    penalty: float,
    batch_size: int | None,
    seed: int,
    by_row: bool = False,
    cells: np.ndarray | None = None,
) -> Setting:
    """Assemble problem, data and initial point; the task and the estimator share this.

    Args:
        training: the rows; the labels of the upper ones are correct.
        split: each client's lower (noisy) and upper (clean) rows.
        trust: `network` or `clients`.
        penalty: lambda.
        batch_size: rows in a minibatch; None for all.
        seed: of the network's initial weights.
        by_row: all rows of a level count equally, so that clients may lack rows at a level;
            otherwise clients have the same weights at both levels.
        cells: [N], the index of each row's trust with `clients`; its client's by default. Rows of
            different clients have different ones.
    """
    features, target, classes, parts, _ = training
    owner, build = owners(parts, len(target)), weighted_by_row if by_row else problem
    cells = owner if cells is None else cells
    factors = tuple(share_factor(owner, part) for part in split) if by_row else ()
    data = federate(
        (features, target, cells, *factors),
        *(some_rows(part, parts) if by_row else part for part in split),
        batch_size=batch_size,
        p=[len(rows) for rows in parts] if by_row else None,
    )
    trusts = max(len(parts), int(cells.max()) + 1)
    start = first(trust, trusts, features.shape[1], classes, seed)
    upper_outputs = outputs_if_clean if by_row else outputs
    return Setting(build(trust, classes, penalty), data, *start, upper_outputs)


def outputs(x: PyTree, y: PyTree, batch: linear.Batch) -> jax.Array:
    """Return each row's scores; upper rows are not trained on."""
    return model_of(y)(batch[0])


def outputs_if_clean(x: PyTree, y: PyTree, batch: linear.Batch) -> jax.Array:
    """Return each row's scores; NaN for a client without clean rows."""
    return jnp.where(batch[4][:, None] > 0, outputs(x, y, batch), jnp.nan)


def share_factor(owner: np.ndarray, part: Rows) -> np.ndarray:
    """Return, for every row, its client's share of the part over its share of all rows."""
    sizes, totals = np.array([len(rows) for rows in part]), np.bincount(owner)
    return ((sizes / sizes.sum()) / (totals / len(owner))).astype(np.float32)[owner]


def some_rows(part: Rows, parts: Rows) -> Rows:
    """Give each client without rows in the part one of its other rows, with factor zero."""
    return [
        part_rows if len(part_rows) else rows[:1]
        for part_rows, rows in zip(part, parts, strict=True)
    ]


def model_of(y: Linear | Reference) -> Linear:
    """Return the model that makes predictions."""
    return y.model if isinstance(y, Reference) else y


def trust_in(x: PyTree, y: PyTree, batch: linear.Batch, classes: int) -> jax.Array:
    """Return the trust in each row of a batch (features, label, index of its trust)."""
    if isinstance(y, Reference):
        return x(linear.losses(y.reference(batch[0]), batch[1], classes))
    return jax.nn.sigmoid(x)[batch[2]]


def first(
    trust: Trust, trusts: int, features: int, classes: int, seed: int
) -> tuple[PyTree, PyTree]:
    """Return x0 and y0 that trust all labels equally."""
    y0 = linear.zeros(features, classes)
    if trust == "clients":
        return np.zeros(trusts, np.float32), y0
    rng = seed_rng(seed, Purpose.TRUST_NETWORK)
    slope, offset = rng.normal(size=(2, _HIDDEN)).astype(np.float32)
    zero = np.zeros(_HIDDEN, np.float32)
    return Network(slope, offset, zero, np.zeros((), np.float32)), Reference(y0, y0)


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
    """Build the task of training on partly wrong labels.

    Args:
        samples: the rows with correct labels; this function replaces some by wrong ones.
        parts: each client's rows.
        wrong: the share of wrong labels over all clients.
        clean: how many rows over all clients keep correct labels, for the upper loss.
        trust: `network` or `clients`.
        penalty: lambda.
        batch_size: rows in a minibatch; all by default.
        seed: of the noise, of the choice of clean rows, and of the network's initial weights.

    Returns:
        The task; its metric is the accuracy on the test rows.
    """
    lower, upper = set_apart(parts, clean, seed)
    noisy = corrupted(samples.target, lower, wrong, samples.classes, seed)
    samples = samples._replace(features=jnp.asarray(samples.features))  # one copy for all data
    training = Training(samples.features, noisy.labels, samples.classes, parts)
    setting = assemble(
        training, (lower, upper), trust=trust, penalty=penalty, batch_size=batch_size, seed=seed
    )
    lower_rows = np.concatenate(lower)
    labelled = tuple(column[lower_rows] for column in setting.data.lower.samples)
    evaluate = _evaluator(setting, samples, labelled, noisy.wrong[lower_rows])
    baselines = _baselines(samples, noisy, (lower, upper), parts, penalty, batch_size, evaluate)
    return Task(
        "label-cleaning",
        *setting[:4],
        evaluate,
        "test_accuracy",
        "max",
        "upper_loss",
        frozenset({"trust_auc"}),
        baselines,
        linear.own_metrics(setting, samples.classes, setting.problem.upper),
    )


def _evaluator(
    setting: Setting, samples: Samples, rows: linear.Batch, wrong: np.ndarray
) -> Metrics:
    """Return (state) -> accuracy on test rows, and how well trust separates correct from wrong."""
    roc_auc_score = require("sklearn.metrics", "estimators").roc_auc_score
    upper = linear.upper_loss(setting.problem, setting.data)
    inputs, target = jnp.asarray(samples.test_features), jnp.asarray(samples.test_target)
    predict_correct = jax.jit(lambda model: model(inputs).argmax(-1).astype(target.dtype) == target)
    trust = jax.jit(lambda x, y: trust_in(x, y, rows, samples.classes))

    def evaluate(state: PyTree) -> dict[str, float]:
        metrics = {
            "test_accuracy": float(predict_correct(model_of(state.y)).mean(dtype=float)),
            "upper_loss": upper(state),
        }
        if state.x is None or len(np.unique(wrong)) < 2:
            return metrics
        auc = roc_auc_score(~wrong, np.nan_to_num(np.asarray(trust(state.x, state.y))))
        return {**metrics, "trust_auc": float(auc)}

    return evaluate


def _baselines(
    samples: Samples,
    noisy: Noisy,
    split: tuple[Rows, Rows],
    parts: Rows,
    penalty: float,
    batch_size: int | None,
    evaluate: Metrics,
) -> tuple[Baseline, ...]:
    """Return training on the noisy labels, on clean ones, on both, and on correct labels."""
    (lower, upper), features = split, samples.features
    owner = owners(parts, len(samples.target))

    def plain(name: str, labels: np.ndarray, rows: Rows, grid: PyTree) -> Baseline:
        data = federate((features, labels, owner), rows, upper, batch_size=batch_size)
        values = tuple(np.asarray(value, np.float32) for value in grid)
        y0 = linear.zeros(features.shape[1], samples.classes)
        losses = _one_penalty(samples.classes)
        return Baseline(name, losses, data, y0, values, lambda state: evaluate(Point(y=state.y)))

    fixed_penalty = (np.log(penalty),)
    all_rows = [np.concatenate(pair) for pair in zip(lower, upper, strict=True)]
    return (
        plain("noisy labels", noisy.labels, lower, fixed_penalty),
        plain("clean labels only", noisy.labels, upper, fixed_penalty),
        plain("noisy and clean together", noisy.labels, all_rows, fixed_penalty),
        plain("noisy labels, 8 lambdas tried", noisy.labels, lower, _GRID),
        plain("all labels right (oracle)", samples.target, lower, fixed_penalty),
    )


@lru_cache(maxsize=32)
def _one_penalty(classes: int) -> BilevelProblem:
    """Build the losses of training without trust, where x is the logarithm of lambda."""

    def upper(x: jax.Array, y: Linear, batch: linear.Batch) -> jax.Array:
        return linear.losses(y(batch[0]), batch[1], classes).mean()

    def lower(x: jax.Array, y: Linear, batch: linear.Batch) -> jax.Array:
        return upper(x, y, batch) + 0.5 * jnp.exp(x) * trees.squared_norm(y)

    return BilevelProblem(upper, lower)
