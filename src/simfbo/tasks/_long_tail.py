"""Long tail: some classes have few samples, and all classes should count equally.

Training corrects the class scores for the imbalance by a scale and a shift per class:

    g_i = mean cross-entropy(exp(a_c) score_c + log(share_c) + b_c, label) + lambda/2 ||y||^2,
    f_i = mean cross-entropy(score, label) / (C share_label)  +  rho/2 (||a||^2 + ||b||^2),

on the folds of a cross-validation (`simfbo.tasks.linear`); predictions use the score alone.
x = (a, b) starts at zero, which is logit adjustment (Menon et al. 2021), and learns the rest.
Scales and shifts are those of the vector-scaling loss of Kini et al. (2021); Li et al. (2021) learn
them on one machine.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.data import FederatedData
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.tasks import linear
from simfbo.tasks.metrics import by_class
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Samples, Training
from simfbo.tasks.task import Baseline, Metrics, Setting, Task

_GRID = np.linspace(-1.0, 1.0, 9)


class Adjustment(NamedTuple):
    """The upper variable: the logarithm of the scale, and the shift, of every class."""

    scale: PyTree
    shift: PyTree


@lru_cache(maxsize=32)
def problem(shares: tuple[float, ...], folds: int, penalty: float, prior: float) -> BilevelProblem:
    """Build the two losses on batches (features, label, fold); cached.

    Args:
        shares: each class's share of all training rows.
        folds: of the cross-validation.
        penalty: lambda.
        prior: rho.
    """
    base = jnp.log(jnp.maximum(jnp.asarray(shares, jnp.float32), 1e-6))
    balance = jnp.asarray(linear.balancing_weights(np.asarray(shares)), jnp.float32)
    classes = len(shares)

    def train(x: Adjustment, model: Linear, rows: linear.Batch) -> jax.Array:
        scores = model(rows[0])
        adjusted = jnp.exp(x.scale) * scores + (base.astype(scores.dtype) + x.shift)
        return linear.losses(adjusted, rows[1], classes)

    def check(x: Adjustment, model: Linear, rows: linear.Batch) -> jax.Array:
        row_losses = linear.losses(model(rows[0]), rows[1], classes)
        return balance.astype(row_losses.dtype)[rows[1]] * row_losses

    fit = linear.cross_validated(train, check, folds, penalty)

    def upper(x: Adjustment, y: Linear, batch: linear.Batch) -> jax.Array:
        return fit.upper(x, y, batch) + 0.5 * prior * trees.squared_norm(x)

    return BilevelProblem(upper, fit.lower)


def assemble(
    training: Training,
    shares: np.ndarray,
    *,
    folds: int,
    penalty: float,
    prior: float,
    batch_size: int | None,
    seed: int,
) -> Setting:
    """Assemble problem, data and initial point; the task and the estimator share this."""
    fold = linear.assign_folds(training.target, folds, seed)
    zero, width = np.zeros(len(shares), np.float32), training.features.shape[1]
    rows = (training.features, training.target, fold)
    return Setting(
        problem(tuple(shares.tolist()), folds, penalty, prior),
        linear.on_both_levels(rows, training.parts, batch_size),
        Adjustment(zero, zero),
        linear.zeros(width, len(shares), folds),
        outputs,
    )


def outputs(x: Adjustment, y: Linear, batch: linear.Batch) -> jax.Array:
    """Return each row's scores by the model of its fold."""
    return linear.held_out(y, batch[0], batch[2])


def long_tail(
    samples: Samples,
    parts: Rows,
    *,
    folds: int = 5,
    penalty: float = 0.003,
    prior: float = 0.03,
    batch_size: int | None = None,
    seed: int = 0,
) -> Task:
    """Build the task of learning how to correct for an imbalance of classes.

    Args:
        samples: the rows, already long-tailed (`samples.long_tailed`).
        parts: each client's rows.
        folds: of the cross-validation.
        penalty: lambda.
        prior: rho, which prevents overfitting to classes with a handful of samples.
        batch_size: rows in a minibatch; all by default.
        seed: of the folds.

    Returns:
        The task; its metric is the mean accuracy over classes on the test rows.
    """
    shares = np.bincount(samples.target, minlength=samples.classes) / len(samples.target)
    setting = assemble(
        samples.dealt(parts),
        shares,
        folds=folds,
        penalty=penalty,
        prior=prior,
        batch_size=batch_size,
        seed=seed,
    )
    without_prior = problem(tuple(shares.tolist()), folds, penalty, 0.0)
    evaluate = _evaluator(without_prior, setting.data, samples)
    weighted = _weighted(tuple(shares.tolist()), folds, penalty)
    return Task(
        "long-tail",
        *setting[:4],
        evaluate,
        "balanced_accuracy",
        "max",
        "upper_loss",
        frozenset({"worst_class_accuracy"}),
        _baselines(setting, weighted, shares, evaluate),
        linear.own_metrics(setting, samples.classes, without_prior.upper),
    )


def _baselines(
    setting: Setting, weighted: BilevelProblem, shares: np.ndarray, evaluate: Metrics
) -> tuple[Baseline, ...]:
    """Return training without tuning, with inverse frequencies, and with logit adjustments."""
    logs = np.log(np.maximum(shares, 1e-6)).astype(np.float32)

    def baseline(name: str, losses: BilevelProblem, *taus: float) -> Baseline:
        zero = setting.x0.scale
        xs = tuple(Adjustment(zero, np.float32(tau - 1) * logs) for tau in taus)
        return Baseline(name, losses, setting.data, setting.y0, xs, evaluate)

    return (
        baseline("no tuning", setting.problem, 0.0),
        baseline("inverse frequency", weighted, 0.0),
        baseline("logit adjustment", setting.problem, 1.0),
        baseline("logit adjustment, 9 strengths tried", setting.problem, *(1 + _GRID)),
    )


@lru_cache(maxsize=32)
def _weighted(shares: tuple[float, ...], folds: int, penalty: float) -> BilevelProblem:
    """Build the losses with weights inversely proportional to the class shares, at both levels."""
    balance = jnp.asarray(linear.balancing_weights(np.asarray(shares)), jnp.float32)

    def train(x: PyTree, model: Linear, rows: linear.Batch) -> jax.Array:
        row_losses = linear.losses(model(rows[0]), rows[1], len(shares))
        return balance.astype(row_losses.dtype)[rows[1]] * row_losses

    return linear.cross_validated(train, train, folds, penalty)


def _evaluator(losses: BilevelProblem, data: FederatedData, samples: Samples) -> Metrics:
    """Return (state) -> accuracies on the test rows, and the upper loss without the prior."""
    upper, inputs = linear.upper_loss(losses, data), jnp.asarray(samples.test_features)
    predict = jax.jit(lambda y: linear.averaged(y)(inputs).argmax(-1))

    def evaluate(state: PyTree) -> dict[str, float]:
        accuracies = by_class(np.asarray(predict(state.y)), samples.test_target, samples.classes)
        return {
            "balanced_accuracy": float(np.nanmean(accuracies)),
            "worst_class_accuracy": float(np.nanmin(accuracies)),
            "upper_loss": upper(state),
        }

    return evaluate
