"""Linear models with a cross-validation as upper loss, shared by several tasks.

The lower variable y holds K models, one per fold; model k trains on all rows outside fold k, and
the upper loss validates it on fold k:

    g_i = mean over rows of  K/(K-1) sum_{k != fold} loss(x, y_k, row)  +  lambda/2 ||y||^2
    f_i = mean over rows of  loss(y_fold, row)

So every row is used for training and for validation, however few rows a client has. Predictions
use the mean of the K models.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.data import FederatedData, federate, pooled
from simfbo.core.keys import Purpose, seed_rng
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.errors import UserError
from simfbo.tasks.models import Linear

Batch = tuple[jax.Array, ...]
# (x, model, the batch without its folds) -> the loss of every row
RowLosses = Callable[[PyTree, Linear, Batch], jax.Array]


def losses(outputs: jax.Array, target: jax.Array, classes: int) -> jax.Array:
    """Return each row's cross-entropy, or half its squared error if the target is a number."""
    if classes:
        # Masked rather than indexed: the derivative of an index is a scatter, slow on a CPU.
        own = target[..., None] == jnp.arange(classes, dtype=target.dtype)
        return jax.nn.logsumexp(outputs, -1) - jnp.sum(jnp.where(own, outputs, 0.0), -1)
    return 0.5 * (outputs[:, 0] - target) ** 2


def zeros(features: int, classes: int, *leading: int) -> Linear:
    """Return a linear model, or a stack of them, with all weights zero."""
    width = classes or 1
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
    places = np.arange(folds, dtype=np.int32)[:, None]

    def each(loss: RowLosses, x: PyTree, y: Linear, batch: Batch) -> tuple[jax.Array, jax.Array]:
        *rows, fold = batch
        found = jax.vmap(lambda model: loss(x, model, tuple(rows)))(y)
        return found, fold[None] == places

    def lower(x: PyTree, y: Linear, batch: Batch) -> jax.Array:
        found, own = each(train, x, y, batch)
        fit = jnp.where(own, 0.0, found).sum(0).mean() * (folds / (folds - 1))
        return fit + 0.5 * penalty * trees.squared_norm(y)

    def upper(x: PyTree, y: Linear, batch: Batch) -> jax.Array:
        found, own = each(check, x, y, batch)
        return jnp.where(own, found, 0.0).sum(0).mean()

    return BilevelProblem(upper, lower)


def averaged(y: Linear) -> Linear:
    """Return the mean of the folds' models."""
    return jax.tree.map(lambda leaf: leaf.mean(0), y)


def on_both_levels(
    rows: tuple[np.ndarray, ...], parts: Rows, batch_size: int | None
) -> FederatedData:
    """Deal rows to clients; every row is used on both levels."""
    return federate(rows, parts, parts, batch_size=batch_size)


def upper_loss(problem: BilevelProblem, data: FederatedData) -> Callable[[PyTree], float]:
    """Return (state) -> F(x, y), the upper loss over all clients; it sees no test data."""
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
