"""Linear models with a cross-validation as upper loss, shared by several tasks.

The lower variable y holds K models, one per fold; model k trains on all rows outside fold k, and
the upper loss validates it on fold k:

    g_i = mean over rows of  K/(K-1) sum_{k != fold} loss(x, y_k, row)  +  lambda/2 ||y||^2
    f_i = mean over rows of  loss(y_fold, row)

Every row is used for training and for validation, however few rows a client has. Predictions use
the mean of the K models.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy

from simfbo.core import trees
from simfbo.core.data import FederatedData, federate, pooled
from simfbo.core.keys import Purpose, seed_rng
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, Loss, PyTree
from simfbo.errors import UserError
from simfbo.runs.client_metrics import ClientMetric
from simfbo.tasks.models import Linear
from simfbo.tasks.task import Outputs, Setting

Batch = tuple[jax.Array, ...]
# (x, model, the batch without its folds) -> the loss of every row
RowLosses = Callable[[PyTree, Linear, Batch], jax.Array]


class Target(IntEnum):
    """Targets that are not classes; a positive number is a number of classes."""

    NUMBER = 0
    COUNT = -1  # with Poisson's law
    SIZE = -2  # positive, with a Gamma law


def losses(outputs: jax.Array, target: jax.Array, classes: int) -> jax.Array:
    """Return each row's loss.

    The cross-entropy for classes, half the squared error for numbers, and half the deviance for
    counts and sizes, where outputs are logarithms of the mean.
    """
    if classes > 0:
        # Masked rather than indexed: the derivative of an index is a scatter, slow on a CPU.
        is_target = target[..., None] == jnp.arange(classes, dtype=target.dtype)
        return jax.nn.logsumexp(outputs, -1) - jnp.sum(jnp.where(is_target, outputs, 0.0), -1)
    output = outputs[:, 0]
    if classes == Target.COUNT:
        return jnp.exp(output) - target * (output + 1) + xlogy(target, target)
    if classes == Target.SIZE:
        return target * jnp.exp(-output) + output - 1 - jnp.log(target)
    return 0.5 * (output - target) ** 2


def zeros(features: int, classes: int, *leading: int) -> Linear:
    """Return a linear model, or a stack of them, with all weights zero."""
    width = max(classes, 1)
    shapes = (*leading, features, width), (*leading, width)
    return Linear(*(trees.on_device(np.zeros(shape, np.float32)) for shape in shapes))


def assign_folds(strata: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Assign every row to a fold, balanced within each stratum.

    Args:
        strata: a number for each row, for example its class.
        folds: K.
        seed: of the random assignment.

    Example:
        >>> assign_folds(np.array([0, 0, 1, 1]), 2, seed=0).reshape(2, 2).sum(1).tolist()
        [1, 1]
    """
    if folds < 2:
        raise UserError(f"Cross-validation needs at least 2 folds, got {folds}.")
    rng, fold = seed_rng(seed, Purpose.FOLDS), np.zeros(len(strata), np.int32)
    for stratum in np.unique(strata):
        rows = rng.permutation(np.flatnonzero(strata == stratum))
        fold[rows] = (np.arange(len(rows)) + rng.integers(folds)) % folds
    return fold


def own_folds(strata: np.ndarray, folds: int, seed: int, client: int) -> np.ndarray:
    """Assign a client's own rows to folds, balanced within each stratum and in total.

    The assignment depends on these rows only, so clients need no communication.

    Args:
        strata: a number for each of the client's rows, for example its class.
        folds: K.
        seed: of the random assignment.
        client: the client's number.

    Example:
        >>> folds = own_folds(np.array([0, 1, 0, 1]), 2, seed=0, client=3)
        >>> sorted(folds[[0, 2]].tolist())
        [0, 1]
    """
    rng, fold = np.random.default_rng([int(Purpose.FOLDS), seed, client]), np.zeros_like(strata)
    shuffled = rng.permutation(len(strata))
    rows = shuffled[np.argsort(strata[shuffled], kind="stable")]
    fold[rows] = (np.arange(len(rows)) + rng.integers(folds)) % folds
    return fold.astype(np.int32)


def cross_validated(
    train: RowLosses, check: RowLosses, folds: int, penalty: float
) -> BilevelProblem:
    """Build the problem at the top of this file, on batches (row, ..., fold).

    Args:
        train: the lower loss of each row.
        check: the upper loss of each row.
        folds: K.
        penalty: lambda.
    """
    fold_numbers = np.arange(folds, dtype=np.int32)[:, None]

    def row_losses(
        loss: RowLosses, x: PyTree, y: Linear, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        *rows, fold = batch
        losses_by_model = jax.vmap(lambda model: loss(x, model, tuple(rows)))(y)
        return losses_by_model, fold[None] == fold_numbers

    def lower(x: PyTree, y: Linear, batch: Batch) -> jax.Array:
        losses_by_model, in_fold = row_losses(train, x, y, batch)
        fit = jnp.where(in_fold, 0.0, losses_by_model).sum(0).mean() * (folds / (folds - 1))
        return fit + 0.5 * penalty * trees.squared_norm(y)

    def upper(x: PyTree, y: Linear, batch: Batch) -> jax.Array:
        losses_by_model, in_fold = row_losses(check, x, y, batch)
        return jnp.where(in_fold, losses_by_model, 0.0).sum(0).mean()

    return BilevelProblem(upper, lower)


def averaged(y: Linear) -> Linear:
    """Return the mean of the folds' models."""
    return jax.tree.map(lambda leaf: leaf.mean(0), y)


def held_out(models: Linear, features: jax.Array, fold: jax.Array) -> jax.Array:
    """Return each row's outputs by the model of its fold, which was not trained on it."""
    return of_fold(jax.vmap(lambda model: model(features))(models), fold)


def of_fold(outputs: jax.Array, fold: jax.Array) -> jax.Array:
    """Select, for each row, the outputs of its fold's model from [K, rows, ...]."""
    return jnp.take_along_axis(outputs, fold[None, :, None], axis=0)[0]


@lru_cache(maxsize=32)
def measures(outputs: Outputs, classes: int) -> Mapping[str, ClientMetric]:
    """Return the metrics that clients measure on outputs: the loss and, for classes, the accuracy.

    Args:
        outputs: (x, y, batch) -> outputs for each row of a batch (features, target, ...).
        classes: the number of classes; 0 if the target is a number.
    """

    def loss(x: PyTree, y: PyTree, batch: Batch) -> jax.Array:
        return losses(outputs(x, y, batch), batch[1], classes).mean()

    def accuracy(x: PyTree, y: PyTree, batch: Batch) -> jax.Array:
        scores = outputs(x, y, batch)
        return (scores.argmax(-1).astype(batch[1].dtype) == batch[1]).mean(dtype=scores.dtype)

    metrics = {"loss": ClientMetric(loss)}
    return {**metrics, "accuracy": ClientMetric(accuracy, "max")} if classes > 0 else metrics


def own_metrics(setting: Setting, classes: int, upper: Loss) -> dict[str, ClientMetric]:
    """Return the metrics that a task's clients measure: an upper loss and the accuracy of classes.

    Args:
        setting: with the outputs.
        classes: the number of classes; 0 if the target is a number.
        upper: the upper loss, without terms that are the same for all clients.
    """
    metrics = {"upper_loss": ClientMetric(upper)}
    if setting.outputs is None or classes <= 0:
        return metrics
    return {**metrics, "accuracy": measures(setting.outputs, classes)["accuracy"]}


def on_both_levels(
    rows: tuple[np.ndarray, ...], parts: Rows, batch_size: int | None
) -> FederatedData:
    """Distribute rows to clients, with every row on both levels."""
    return federate(rows, parts, parts, batch_size=batch_size)


def upper_loss(problem: BilevelProblem, data: FederatedData) -> Callable[[PyTree], float]:
    """Return (state) -> F(x, y), the upper loss over all clients' validation rows."""
    total = _pooled_upper(problem)
    return lambda state: float(total(data.upper, data.p, state.x, state.y))


@lru_cache(maxsize=32)
def _pooled_upper(problem: BilevelProblem) -> Callable[..., jax.Array]:
    """Return the compiled (part, p, x, y) -> F(x, y), shared by all data of the same shape."""
    return jax.jit(lambda part, p, x, y: pooled(problem.upper, part, p)(x, y))


def balancing_weights(shares: np.ndarray) -> np.ndarray:
    """Return weights under which all classes count equally; the mean over the rows is one."""
    present = shares > 0
    return np.where(present, 1 / np.where(present, shares, 1.0), 0.0) / present.sum()
