"""Fairness: weights for groups, so that the group with the largest loss has a smaller one.

With shares q of G groups, training weights w = softmax(x) / q, and beside the K models of a
cross-validation (`simfbo.tasks.linear`) an estimate l of the groups' losses, learnt along:

    g_i = mean w_group loss(y, row) + lambda/2 ||y||^2
          + mean (l_group - loss(y_fold, row))^2 / (2 q_group)
    f_i = mean u_group loss(y_fold, row) / q_group - KL(u || uniform) / sharpness,
    u   = softmax(sharpness l),

with no gradient through the losses in the estimate's part, nor through l in u. That u is the best
answer to the groups' losses: it maximises F where l is right. So F is the worst group's loss,
smoothed, and its hypergradient is exact (Danskin 1966); and since it is linear in the groups'
losses, it is a sum over clients even where groups cross them. This is the minimax fairness of
Mohri, Sivek, Suresh (2019), by weights that are learnt.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem
from simfbo.errors import UserError
from simfbo.tasks import linear
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Samples
from simfbo.tasks.task import Baseline, Metrics, Task

_GRID = np.linspace(0.0, 2.0, 9)


class Watched(NamedTuple):
    """The lower variable: the folds' models, and the groups' losses as they are believed to be."""

    models: Linear
    losses: jax.Array


def problem(
    shares: tuple[float, ...], classes: int, folds: int, penalty: float, sharpness: float
) -> BilevelProblem:
    """Return the two losses, on batches (features, target, group, fold).

    Args:
        shares: each group's share of all training rows.
        classes: how many; 0 for a number.
        folds: of the cross-validation.
        penalty: lambda.
        sharpness: how closely F follows the largest loss.
    """
    share = jnp.asarray(shares, jnp.float32)

    def train(x: jax.Array, model: Linear, rows: tuple) -> jax.Array:
        found = linear.losses(model(rows[0]), rows[1], classes)
        return (jax.nn.softmax(x) / share.astype(x.dtype))[rows[2]] * found

    fit = linear.cross_validated(train, train, folds, penalty)

    def lower(x: jax.Array, y: Watched, batch: tuple) -> jax.Array:
        group, found = batch[2], jax.lax.stop_gradient(held_out(y.models, batch, classes))
        estimate = (0.5 * (y.losses[group] - found) ** 2 / share.astype(found.dtype)[group]).mean()
        return fit.lower(x, y.models, batch) + estimate

    def upper(x: jax.Array, y: Watched, batch: tuple) -> jax.Array:
        aim = jax.nn.log_softmax(sharpness * jax.lax.stop_gradient(y.losses))
        spread = (jnp.exp(aim) * (aim + math.log(len(shares)))).sum()
        found = held_out(y.models, batch, classes)
        weights = jnp.exp(aim) / share.astype(aim.dtype)
        return (weights[batch[2]] * found).mean() - spread / sharpness

    return BilevelProblem(upper, lower)


def held_out(models: Linear, batch: tuple, classes: int) -> jax.Array:
    """Return each row's loss under the model of its fold, which did not train on it."""
    features, target, _, fold = batch
    each = jax.vmap(lambda model: linear.losses(model(features), target, classes))(models)
    return jnp.take_along_axis(each, fold[None], axis=0)[0]


def first(shares: np.ndarray, features: int, classes: int, folds: int) -> tuple[Any, Watched]:
    """Return x0 and y0: every row counts alike, and nothing is known."""
    models = linear.zeros(features, classes, folds)
    return _powers(shares, 0.0)[0], Watched(models, jnp.zeros(len(shares), jnp.float32))


def _powers(shares: np.ndarray, *exponents: float) -> tuple[np.ndarray, ...]:
    """Return the x that weigh a group's rows by its share to the power of -exponent."""
    logs = np.log(shares) - np.log(shares).mean()
    return tuple(((1 - exponent) * logs).astype(np.float32) for exponent in exponents)


def weights(x: Any, shares: np.ndarray) -> np.ndarray:
    """Return how much a row of each group counts; one on average."""
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
    """Return the task of weighing groups so that the worst one's loss falls.

    Args:
        samples: the rows.
        parts: each client's rows.
        groups: the group of each training row and of each test row, from 0; groups may be clients.
        folds: of the cross-validation.
        penalty: lambda.
        sharpness: how closely the upper loss follows the largest group's.
        batch_size: rows in a minibatch; all by default.
        seed: of the folds.

    Returns:
        The task; its metric is the loss of the worst group on the test rows.
    """
    classes, count = samples.classes, int(groups[0].max()) + 1
    shares = np.bincount(groups[0], minlength=count) / len(groups[0])
    if (shares == 0).any():
        raise UserError(f"Group {int(np.argmin(shares))} has no training rows: leave it out.")
    fold = linear.assign_folds(groups[0], folds, seed)
    rows = (samples.features, samples.target, groups[0].astype(np.int32), fold)
    data = linear.held(rows, parts, batch_size)
    losses = problem(tuple(shares.tolist()), classes, folds, penalty, sharpness)
    x0, y0 = first(shares, samples.features.shape[1], classes, folds)
    evaluate = _evaluator(samples, rows, groups, count)
    choices = {"no weights": (0.0,), "inverse frequency": (1.0,),
               "inverse frequency, 9 powers tried": tuple(_GRID)}  # fmt: skip
    baselines = tuple(
        Baseline(name, losses, data, y0, _powers(shares, *exponents), evaluate)
        for name, exponents in choices.items()
    )
    return Task("fair", losses, data, x0, y0, evaluate, "worst_group_loss", "upper_loss", baselines)


def group_means(values: jax.Array, groups: jax.Array, count: int, empty: float = 0.0) -> jax.Array:
    """Return the mean of the values in every group; `empty` for one without any."""
    one_hot = jax.nn.one_hot(groups, count, dtype=values.dtype)
    sizes = one_hot.sum(0)
    return jnp.where(sizes > 0, values @ one_hot / jnp.maximum(sizes, 1.0), empty)


def _evaluator(samples: Samples, rows: tuple, groups: tuple, count: int) -> Metrics:
    """Return (state) -> the worst group's loss on test rows and, as upper loss, in the folds."""
    classes, own = samples.classes, tuple(map(jnp.asarray, rows))
    inputs, wanted = jnp.asarray(samples.test_features), jnp.asarray(samples.test_target)
    tested = jnp.asarray(groups[1])

    @jax.jit
    def measure(y: Linear) -> dict[str, jax.Array]:
        outputs = linear.averaged(y)(inputs)
        found = linear.losses(outputs, wanted, classes)
        checked = held_out(y, own, classes)
        metrics = {"worst_group_loss": group_means(found, tested, count).max(),
                   "mean_loss": found.mean()}  # fmt: skip
        if classes:
            right = (outputs.argmax(-1).astype(wanted.dtype) == wanted).astype(found.dtype)
            metrics["worst_group_accuracy"] = group_means(right, tested, count, 1.0).min()
            metrics["test_accuracy"] = right.mean()
        return {**metrics, "upper_loss": group_means(checked, own[2], count).max()}

    names = ("worst_group_loss", *(("worst_group_accuracy", "test_accuracy") if classes else ()),
             "mean_loss", "upper_loss")  # fmt: skip

    def evaluate(state: Any) -> dict[str, float]:
        found = measure(state.y.models)  # in the order of the alphabet
        return {name: float(found[name]) for name in names}

    return evaluate
