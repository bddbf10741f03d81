"""Long tail: few samples of many classes, and every class is to count alike.

Training adds to the class scores what makes up for the imbalance, a scale and a shift per class:

    g_i = mean cross-entropy(exp(a_c) score_c + log(share_c) + b_c, label) + lambda/2 ||y||^2,
    f_i = mean cross-entropy(score, label) / (C share_label)  +  rho/2 (||a||^2 + ||b||^2),

on the folds of a cross-validation (`simfbo.tasks.linear`); predictions use the score alone.
x = (a, b) begins at zero, which is logit adjustment (Menon et al. 2021), and learns what that
leaves; scales and shifts are the vector-scaling loss of Kini et al. (2021), learnt centrally by Li
et al. (2021).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.data import FederatedData
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem
from simfbo.errors import UserError
from simfbo.tasks import linear
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Samples
from simfbo.tasks.task import Baseline, Metrics, Task

_TAIL = 16  # purpose of a seed
_GRID = np.linspace(-1.0, 1.0, 9)


class Adjustment(NamedTuple):
    """The upper variable: for each class the logarithm of its scale, and its shift."""

    scale: Any
    shift: Any


def problem(shares: np.ndarray, folds: int, penalty: float, prior: float) -> BilevelProblem:
    """Return the two losses, on batches (features, label, fold).

    Args:
        shares: each class' share of all training rows.
        folds: of the cross-validation.
        penalty: lambda.
        prior: rho.
    """
    base = jnp.log(jnp.maximum(jnp.asarray(shares, jnp.float32), 1e-6))
    balance = jnp.asarray(linear.weights_of(shares), jnp.float32)
    classes = len(shares)

    def train(x: Adjustment, model: Linear, rows: tuple) -> jax.Array:
        scores = model(rows[0])
        adjusted = jnp.exp(x.scale) * scores + (base.astype(scores.dtype) + x.shift)
        return linear.losses(adjusted, rows[1], classes)

    def check(x: Adjustment, model: Linear, rows: tuple) -> jax.Array:
        found = linear.losses(model(rows[0]), rows[1], classes)
        return balance.astype(found.dtype)[rows[1]] * found

    fit = linear.cross_validated(train, check, folds, penalty)

    def upper(x: Adjustment, y: Linear, batch: tuple) -> jax.Array:
        return fit.upper(x, y, batch) + 0.5 * prior * trees.squared_norm(x)

    return BilevelProblem(upper, fit.lower)


def long_tailed(labels: np.ndarray, imbalance: float, seed: int) -> np.ndarray:
    """Return rows such that classes fall off geometrically, in a random order of classes.

    Args:
        labels: of all rows.
        imbalance: how many times more samples the first class has than the last.
        seed: of the order of classes and of the rows.
    """
    if imbalance < 1:
        raise UserError(f"The imbalance must be at least 1, got {imbalance}.")
    rng, classes = np.random.default_rng([_TAIL, seed]), np.unique(labels)
    most = np.bincount(labels).min(where=np.bincount(labels) > 0, initial=len(labels))
    fall = imbalance ** -(np.arange(len(classes)) / max(1, len(classes) - 1))
    rows = [
        rng.permutation(np.flatnonzero(labels == label))[: max(2, round(most * share))]
        for label, share in zip(rng.permutation(classes), fall, strict=True)
    ]
    return rng.permutation(np.concatenate(rows))


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
    """Return the task of learning how to make up for an imbalance of classes.

    Args:
        samples: the rows, long-tailed already (`long_tailed`).
        parts: each client's rows.
        folds: of the cross-validation.
        penalty: lambda.
        prior: rho, which keeps classes of a handful of samples from being overfitted.
        batch_size: rows in a minibatch; all by default.
        seed: of the folds.

    Returns:
        The task; its metric is the mean accuracy over classes on the test rows.
    """
    classes, features = samples.classes, samples.features.shape[1]
    shares = np.bincount(samples.target, minlength=classes) / len(samples.target)
    fold = linear.assign_folds(samples.target, folds, seed)
    data = linear.held((samples.features, samples.target, fold), parts, batch_size)
    losses = problem(shares, folds, penalty, prior)
    zero = np.zeros(classes, np.float32)
    x0, y0 = Adjustment(zero, zero), linear.zeros(features, classes, folds)
    evaluate = _evaluator(problem(shares, folds, penalty, 0.0), data, samples)
    logs = np.log(np.maximum(shares, 1e-6)).astype(np.float32)

    def adjusted(*taus: float) -> tuple[Adjustment, ...]:
        return tuple(Adjustment(zero, np.float32(tau - 1) * logs) for tau in taus)

    def baseline(name: str, losses: BilevelProblem, *taus: float) -> Baseline:
        return Baseline(name, losses, data, y0, adjusted(*taus), evaluate)

    weighed = BilevelProblem(losses.upper, _weighed(shares, folds, penalty))
    return Task(
        "long-tail", losses, data, x0, y0, evaluate, "balanced_accuracy", "upper_loss",
        (
            baseline("no tuning", losses, 0.0),
            baseline("inverse frequency", weighed, 0.0),
            baseline("logit adjustment", losses, 1.0),
            baseline("logit adjustment, 9 strengths tried", losses, *(1 + _GRID)),
        ),
    )  # fmt: skip


def _weighed(shares: np.ndarray, folds: int, penalty: float) -> Any:
    """Return the lower loss with weights in inverse proportion to a class' share."""
    balance, classes = jnp.asarray(linear.weights_of(shares), jnp.float32), len(shares)

    def train(x: Any, model: Linear, rows: tuple) -> jax.Array:
        found = linear.losses(model(rows[0]), rows[1], classes)
        return balance.astype(found.dtype)[rows[1]] * found

    return linear.cross_validated(train, train, folds, penalty).lower


def by_class(found: np.ndarray, target: np.ndarray, classes: int) -> np.ndarray:
    """Return the accuracy on every class; NaN for one without samples.

    Example:
        >>> by_class(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
        [0.5, 1.0]
    """
    right = np.bincount(target, weights=found == target, minlength=classes)
    count = np.bincount(target, minlength=classes)
    return np.where(count > 0, right / np.maximum(count, 1), np.nan)


def _evaluator(losses: BilevelProblem, data: FederatedData, samples: Samples) -> Metrics:
    """Return (state) -> accuracies on the test rows, and the upper loss without its prior."""
    upper, inputs = linear.upper_loss(losses, data), jnp.asarray(samples.test_features)
    predict = jax.jit(lambda y: linear.averaged(y)(inputs).argmax(-1))

    def evaluate(state: Any) -> dict[str, float]:
        found = by_class(np.asarray(predict(state.y)), samples.test_target, samples.classes)
        return {
            "balanced_accuracy": float(np.nanmean(found)),
            "worst_class_accuracy": float(np.nanmin(found)),
            "upper_loss": upper(state),
        }

    return evaluate
