"""Label cleaning whose clean rows also train: a cross-validation over the clean rows.

The lower variable holds K models, one per fold of the clean rows. Model k trains on all labels that
may be wrong, weighted by trust, and on the clean rows outside fold k with weight one; the upper
loss validates it on fold k:

    g_i = mean over rows of  sum_k trust_k(row) loss(y_k, row)  +  lambda/2 ||y||^2,
    f_i = mean over clean rows of  loss(y_fold, row),

where the trust in a clean row is one, or zero for the model of its own fold. Trust in other rows is
that of `simfbo.tasks._label_cleaning`. The reference of a network has K models too, and is trained
on the clean rows outside the fold: a row's loss measures whether its label agrees with the clean
ones, which also detects mistakes that all clients share. Predictions use the mean of the models.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.data import federate
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.tasks import linear
from simfbo.tasks._label_cleaning import Reference, Trust, first, model_of, share_factor, some_rows
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Training, owners
from simfbo.tasks.task import Setting


@lru_cache(maxsize=32)
def problem(trust: Trust, classes: int, penalty: float, folds: int) -> BilevelProblem:
    """Build the losses on batches (features, label, cell, clean factor, upper factor, fold).

    The clean factor turns a mean over all rows into one over the clean rows; for other rows it is
    zero, and their fold is -1.
    """

    def lower(x: PyTree, y: PyTree, batch: linear.Batch) -> jax.Array:
        row_losses = (
            _trusts(x, y, batch, classes, folds) * _losses(model_of(y), batch, classes)
        ).sum(0)
        if isinstance(y, Reference):
            clean = jnp.where(_others(batch[5], folds), batch[3], 0.0)
            row_losses += (clean * _losses(y.reference, batch, classes)).sum(0)
        return row_losses.mean() + 0.5 * penalty * trees.squared_norm(y)

    def upper(x: PyTree, y: PyTree, batch: linear.Batch) -> jax.Array:
        in_fold = ~_others(batch[5], folds)
        row_losses = jnp.where(in_fold, _losses(model_of(y), batch, classes), 0.0).sum(0)
        return (batch[4] * row_losses).mean()

    return BilevelProblem(upper, lower)


def _others(fold: jax.Array, folds: int) -> jax.Array:
    """Return a [K, rows] mask of the rows outside each fold."""
    return fold[None] != np.arange(folds, dtype=np.int32)[:, None]


def _losses(models: Linear, batch: linear.Batch, classes: int) -> jax.Array:
    """Return [K, rows], the loss of every row under each model."""
    return jax.vmap(lambda model: linear.losses(model(batch[0]), batch[1], classes))(models)


def _trusts(x: PyTree, y: PyTree, batch: linear.Batch, classes: int, folds: int) -> jax.Array:
    """Return [K, rows], the trust of each fold's model in every row."""
    clean = _others(batch[5], folds).astype(batch[0].dtype)
    return jnp.where(batch[5] < 0, _trusts_in_others(x, y, batch, classes), clean)


def _trusts_in_others(x: PyTree, y: PyTree, batch: linear.Batch, classes: int) -> jax.Array:
    """Return [K, rows] or [rows], the trust in rows whose labels may be wrong."""
    if isinstance(y, Reference):
        return jax.vmap(x)(jax.lax.stop_gradient(_losses(y.reference, batch, classes)))
    return jax.nn.sigmoid(x)[batch[2]]


def trust_in(x: PyTree, y: PyTree, batch: linear.Batch, classes: int) -> jax.Array:
    """Return the trust in each row of a batch as if it were not clean, averaged over the folds."""
    trusts = _trusts_in_others(x, y, batch, classes)
    return trusts.mean(0) if trusts.ndim > 1 else trusts


def assemble(
    training: Training,
    clean: np.ndarray,
    *,
    trust: Trust,
    penalty: float,
    folds: int,
    batch_size: int | None,
    seed: int,
    cells: np.ndarray,
) -> Setting:
    """Assemble problem, data and initial point; all rows of a level count equally.

    Args:
        training: the rows.
        clean: [N], a mask of correct labels.
        trust: `network` or `clients`.
        penalty: lambda.
        folds: K.
        batch_size: rows in a minibatch; None for all.
        seed: of the folds and of the network's initial weights.
        cells: [N], the index of the trust that each row has with `clients`.
    """
    features, target, classes, parts, _ = training
    fold, upper = np.full(len(target), -1, np.int32), [rows[clean[rows]] for rows in parts]
    fold[clean] = linear.assign_folds(target[clean], folds, seed)
    factors = clean / clean.mean(), share_factor(owners(parts, len(target)), upper)
    columns = (*(factor.astype(features.dtype) for factor in factors), fold)
    data = federate(
        (features, target, cells, *columns),
        parts,
        some_rows(upper, parts),
        batch_size=batch_size,
        p=[len(rows) for rows in parts],
    )
    x0, y0 = first(trust, int(cells.max()) + 1, features.shape[1], classes, seed)
    models = linear.zeros(features.shape[1], classes, folds)
    y0 = Reference(models, models) if isinstance(y0, Reference) else models
    return Setting(problem(trust, classes, penalty, folds), data, x0, y0, outputs)


def outputs(x: PyTree, y: PyTree, batch: linear.Batch) -> jax.Array:
    """Return each clean row's scores by the model of its fold; NaN for rows that are not clean."""
    scores = linear.held_out(model_of(y), batch[0], jnp.maximum(batch[5], 0))
    return jnp.where(batch[4][:, None] > 0, scores, jnp.nan)
