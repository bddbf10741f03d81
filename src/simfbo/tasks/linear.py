"""Linear models whose upper loss is a cross-validation: what several tasks share.

The lower variable y holds K models, one per fold; model k trains on all rows but those of fold k
and the upper loss looks at it there:

    g_i = mean over rows of  K/(K-1) sum_{k != fold} loss(x, y_k, row)  +  lambda/2 ||y||^2
    f_i = mean over rows of  loss(y_fold, row)

So every row trains and every row validates, however few a client has, and the mean of the K models
is what predicts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.core import trees
from simfbo.core.data import FederatedData, federate
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.diagnostics import pooled
from simfbo.errors import UserError
from simfbo.tasks.models import Linear

# (x, model, the batch without its folds) -> the loss of every row
RowLosses = Callable[[PyTree, Linear, tuple], jax.Array]
_FOLDS = 12  # purpose of a seed


def losses(outputs: jax.Array, target: jax.Array, classes: int) -> jax.Array:
    """Return each row's cross-entropy, or half its squared error where the target is a number."""
    if classes:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, target)
    return 0.5 * (outputs[:, 0] - target) ** 2


def zeros(features: int, classes: int, *leading: int) -> Linear:
    """Return a linear model that predicts nothing yet."""
    width = classes or 1
    shapes = (*leading, features, width), (*leading, width)
    return Linear(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


def assign_folds(strata: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Return the fold of every row, as evenly as it goes within each stratum.

    Args:
        strata: a number for each row, as its class.
        folds: K.
        seed: of the random order.

    Example:
        >>> assign_folds(np.array([0, 0, 1, 1]), 2, seed=0).reshape(2, 2).sum(1).tolist()
        [1, 1]
    """
    if folds < 2:
        raise UserError(f"Cross-validation needs at least 2 folds, got {folds}.")
    rng, fold = np.random.default_rng([_FOLDS, seed]), np.zeros(len(strata), np.int32)
    for stratum in np.unique(strata):
        rows = rng.permutation(np.flatnonzero(strata == stratum))
        fold[rows] = (np.arange(len(rows)) + rng.integers(folds)) % folds
    return fold


def cross_validated(
    train: RowLosses, check: RowLosses, folds: int, penalty: float
) -> BilevelProblem:
    """Return the problem at the top of this file, on batches (row, ..., fold).

    Args:
        train: the lower loss of each row.
        check: the upper loss of each row.
        folds: K.
        penalty: lambda.
    """
    places = jnp.arange(folds, dtype=jnp.int32)[:, None]

    def each(loss: RowLosses, x: PyTree, y: Linear, batch: tuple) -> tuple[jax.Array, jax.Array]:
        *rows, fold = batch
        found = jax.vmap(lambda model: loss(x, model, tuple(rows)))(y)
        return found, fold[None] == places

    def lower(x: PyTree, y: Linear, batch: tuple) -> jax.Array:
        found, own = each(train, x, y, batch)
        fit = jnp.where(own, 0.0, found).sum(0).mean() * (folds / (folds - 1))
        return fit + 0.5 * penalty * trees.squared_norm(y)

    def upper(x: PyTree, y: Linear, batch: tuple) -> jax.Array:
        found, own = each(check, x, y, batch)
        return jnp.where(own, found, 0.0).sum(0).mean()

    return BilevelProblem(upper, lower)


def averaged(y: Linear) -> Linear:
    """Return the mean of the folds' models."""
    return jax.tree.map(lambda leaf: leaf.mean(0), y)


def held(rows: tuple, parts: Rows, batch_size: int | None) -> FederatedData:
    """Return data in which every client's rows serve both levels."""
    return federate(rows, parts, parts, batch_size=batch_size)


def upper_loss(problem: BilevelProblem, data: FederatedData) -> Callable[[Any], float]:
    """Return (state) -> F(x, y), the upper loss over all clients: never of test data."""
    total = jax.jit(pooled(problem.upper, data.upper, data.p))
    return lambda state: float(total(state.x, state.y))


def weights_of(shares: np.ndarray) -> np.ndarray:
    """Return the weights that make every class (or group) count alike, one on average."""
    present = shares > 0
    return np.where(present, 1 / np.where(present, shares, 1.0), 0.0) / present.sum()
