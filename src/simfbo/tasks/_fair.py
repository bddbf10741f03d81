"""Fairness: training weights for groups that reduce the loss of the worst group.

With shares q of G groups, training weights w = softmax(x) / q, the K models of a cross-validation
(`simfbo.tasks.linear`), and an estimate l of the groups' losses that is learnt with them:

    g_i = mean w_group loss(y, row) + lambda/2 ||y||^2
          + mean (l_group - loss(y_fold, row))^2 / (2 q_group)
    f_i = mean u_group loss(y_fold, row) / q_group - KL(u || uniform) / sharpness,
    u   = softmax(sharpness l),

with no gradient through the losses in the estimate's term, nor through l in u. If l is exact, this
u maximises F; so F is a smoothed maximum of the groups' losses, and its hypergradient is exact
(Danskin 1966). F is linear in the groups' losses, so it is a sum over clients even if groups span
several clients. This is the minimax fairness of Mohri, Sivek, Suresh (2019), with learnt weights.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.errors import UserError
from simfbo.tasks import linear
from simfbo.tasks.metrics import group_means
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Samples, Training
from simfbo.tasks.task import Baseline, Metrics, Setting, Task

_GRID = np.linspace(0.0, 2.0, 9)


class Monitored(NamedTuple):
    """The lower variable: the folds' models, and an estimate of the groups' losses."""

    models: Linear
    losses: jax.Array


@lru_cache(maxsize=32)
def problem(
    shares: tuple[float, ...], classes: int, folds: int, penalty: float, sharpness: float
) -> BilevelProblem:
    """Build the two losses on batches (features, target, group, fold); cached.

    Args:
        shares: each group's share of all training rows.
        classes: the number of classes; 0 if the target is a number.
        folds: of the cross-validation.
        penalty: lambda.
        sharpness: of the smoothed maximum; F approaches the largest loss as it grows.
    """
    share = jnp.asarray(shares, jnp.float32)

    def train(x: jax.Array, model: Linear, rows: linear.Batch) -> jax.Array:
        row_losses = linear.losses(model(rows[0]), rows[1], classes)
        return (jax.nn.softmax(x) / share.astype(x.dtype))[rows[2]] * row_losses

    fit = linear.cross_validated(train, train, folds, penalty)

    def lower(x: jax.Array, y: Monitored, batch: linear.Batch) -> jax.Array:
        group, row_losses = batch[2], jax.lax.stop_gradient(held_out(y.models, batch, classes))
        estimate = (
            0.5 * (y.losses[group] - row_losses) ** 2 / share.astype(row_losses.dtype)[group]
        ).mean()
        return fit.lower(x, y.models, batch) + estimate

    def upper(x: jax.Array, y: Monitored, batch: linear.Batch) -> jax.Array:
        log_weights = jax.nn.log_softmax(sharpness * jax.lax.stop_gradient(y.losses))
        divergence = (jnp.exp(log_weights) * (log_weights + math.log(len(shares)))).sum()
        row_losses = held_out(y.models, batch, classes)
        weights = jnp.exp(log_weights) / share.astype(log_weights.dtype)
        return (weights[batch[2]] * row_losses).mean() - divergence / sharpness

    return BilevelProblem(upper, lower)


def held_out(models: Linear, batch: linear.Batch, classes: int) -> jax.Array:
    """Return each row's loss under the model of its fold, which was not trained on it."""
    features, target, _, fold = batch
    each = jax.vmap(lambda model: linear.losses(model(features), target, classes))(models)
    return jnp.take_along_axis(each, fold[None], axis=0)[0]


def outputs(x: jax.Array, y: Monitored, batch: linear.Batch) -> jax.Array:
    """Return each row's outputs by the model of its fold."""
    return linear.held_out(y.models, batch[0], batch[3])


def assemble(
    training: Training,
    groups: np.ndarray,
    shares: np.ndarray,
    strata: np.ndarray,
    *,
    folds: int,
    penalty: float,
    sharpness: float,
    batch_size: int | None,
    seed: int,
) -> Setting:
    """Assemble problem, data and initial point; the task and the estimators share this.

    Args:
        training: the rows.
        groups: the group of each row.
        shares: each group's share of the rows.
        strata: a number for each row; the folds are balanced within each number.
        folds: of the cross-validation.
        penalty: lambda.
        sharpness: how closely F follows the largest loss.
        batch_size: rows in a minibatch; None for all.
        seed: of the folds.
    """
    fold = linear.assign_folds(strata, folds, seed)
    rows = (training.features, training.target, groups.astype(np.int32), fold)
    models = linear.zeros(training.features.shape[1], training.classes, folds)
    return Setting(
        problem(tuple(shares.tolist()), training.classes, folds, penalty, sharpness),
        linear.on_both_levels(rows, training.parts, batch_size),
        _powers(shares, 0.0)[0],
        Monitored(models, jnp.zeros(len(shares), jnp.float32)),
        outputs,
    )


def _powers(shares: np.ndarray, *exponents: float) -> tuple[np.ndarray, ...]:
    """Return the x that weight a group's rows by share ** -exponent, for each exponent."""
    logs = np.log(shares) - np.log(shares).mean()
    return tuple(((1 - exponent) * logs).astype(np.float32) for exponent in exponents)


def group_weights(x: PyTree, shares: np.ndarray) -> np.ndarray:
    """Return the training weight of a row of each group; the mean over the rows is one."""
    return np.asarray(jax.nn.softmax(jnp.asarray(x))) / shares


def fair(
    samples: Samples,
    parts: Rows,
    groups: tuple[np.ndarray, np.ndarray],
    *,
    folds: int = 5,
    penalty: float = 0.003,
    sharpness: float = 20.0,
    batch_size: int | None = None,
    seed: int = 0,
) -> Task:
    """Build the task of weighting groups so that the loss of the worst group falls.

    Args:
        samples: the rows.
        parts: each client's rows.
        groups: the group of each training row and of each test row, from 0; clients can be groups.
        folds: of the cross-validation.
        penalty: lambda.
        sharpness: how closely the upper loss follows the largest group loss.
        batch_size: rows in a minibatch; all by default.
        seed: of the folds.

    Returns:
        The task; its metric is the loss of the worst group on the test rows.
    """
    count = int(groups[0].max()) + 1
    shares = np.bincount(groups[0], minlength=count) / len(groups[0])
    if (shares == 0).any():
        raise UserError(f"Group {int(np.argmin(shares))} has no training rows: leave it out.")
    setting = assemble(
        samples.dealt(parts),
        groups[0],
        shares,
        groups[0],
        folds=folds,
        penalty=penalty,
        sharpness=sharpness,
        batch_size=batch_size,
        seed=seed,
    )
    evaluate = _evaluator(samples, setting.data.lower.samples, groups[1], count)
    choices = {
        "no weights": (0.0,),
        "inverse frequency": (1.0,),
        "inverse frequency, 9 powers tried": tuple(_GRID),
    }
    losses, data, _, y0 = setting[:4]
    baselines = tuple(
        Baseline(name, losses, data, y0, _powers(shares, *powers), evaluate)
        for name, powers in choices.items()
    )
    return Task(
        "fair",
        *setting[:4],
        evaluate,
        "worst_group_loss",
        tuned_by="upper_loss",
        maximise=frozenset({"worst_group_accuracy", "test_accuracy"}),
        baselines=baselines,
        own_metrics=linear.own_metrics(setting, samples.classes, losses.upper),
    )


def _evaluator(
    samples: Samples, rows: linear.Batch, test_groups: np.ndarray, count: int
) -> Metrics:
    """Return (state) -> metrics on the test rows, and the worst group's loss in the folds."""
    classes, test_group_ids = samples.classes, jnp.asarray(test_groups)
    inputs, test_target = jnp.asarray(samples.test_features), jnp.asarray(samples.test_target)

    @jax.jit
    def measure(y: Linear) -> dict[str, jax.Array]:
        outputs = linear.averaged(y)(inputs)
        row_losses = linear.losses(outputs, test_target, classes)
        held_out_losses = held_out(y, rows, classes)
        metrics = {
            "worst_group_loss": group_means(row_losses, test_group_ids, count).max(),
            "mean_loss": row_losses.mean(),
        }
        if classes:
            correct = (outputs.argmax(-1).astype(test_target.dtype) == test_target).astype(
                row_losses.dtype
            )
            metrics["worst_group_accuracy"] = group_means(correct, test_group_ids, count, 1.0).min()
            metrics["test_accuracy"] = correct.mean()
        return {**metrics, "upper_loss": group_means(held_out_losses, rows[2], count).max()}

    names = (
        "worst_group_loss",
        *(("worst_group_accuracy", "test_accuracy") if classes else ()),
        "mean_loss",
        "upper_loss",
    )

    def evaluate(state: PyTree) -> dict[str, float]:
        metrics = measure(state.y.models)  # jit returns the keys in alphabetical order
        return {name: float(metrics[name]) for name in names}

    return evaluate
