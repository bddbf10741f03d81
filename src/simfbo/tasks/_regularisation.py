"""Regularisation: an L2 weight for every feature of a linear model, chosen by cross-validation.

A feature's weight is s_j w_j with s_j^2 = sigmoid(-x_j), and all w are penalised alike, so that

    lambda_j = lambda_min (1 + exp(x_j))

is the feature's own L2 weight: lambda_min where x_j is low, growing like exp(x_j), until the
feature is shut off. Seen through w, the lower problem keeps mu = lambda_min, and an L that no x can
more than double.

    g_i = mean loss((s w)'a + b, target) + lambda_min/2 (||w||^2 + ||b||^2),   f_i = the loss alone,

on the folds of a cross-validation (`simfbo.tasks.linear`); the loss is half the squared error, or
the cross-entropy. Bengio (2000) chose hyperparameters by such gradients first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.data import FederatedData
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.tasks import linear
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Samples
from simfbo.tasks.task import Baseline, Metrics, Task

_SHUT = 12.0  # an x_j at which a feature is as good as absent
_GRID = np.linspace(-4.0, 10.0, 20)


def problem(classes: int, folds: int, floor: float, price: float = 0.0) -> BilevelProblem:
    """Return the two losses.

    Args:
        classes: how many; 0 for a number.
        folds: of the cross-validation.
        floor: lambda_min.
        price: what a feature costs the upper loss that is not shut off.
    """

    def row_losses(x: jax.Array, model: Linear, rows: tuple) -> jax.Array:
        return linear.losses(scaled(x, model)(rows[0]), rows[1], classes)

    fit = linear.cross_validated(row_losses, row_losses, folds, floor)

    def upper(x: jax.Array, y: Linear, batch: tuple) -> jax.Array:
        return fit.upper(x, y, batch) + price * jax.nn.sigmoid(-x).sum()

    return BilevelProblem(upper, fit.lower)


def scaled(x: jax.Array, model: Linear) -> Linear:
    """Return the model in the features' own scale: s_j w_j."""
    return Linear(jnp.sqrt(jax.nn.sigmoid(-x))[:, None] * model.weight, model.bias)


def strengths(x: Any, floor: float) -> np.ndarray:
    """Return lambda_j, the L2 weight of every feature.

    Example:
        >>> strengths(np.zeros(2), floor=0.01).tolist()
        [0.02, 0.02]
    """
    return floor * (1 + np.exp(np.asarray(x)))


def regularisation(
    samples: Samples,
    parts: Rows,
    *,
    folds: int = 5,
    floor: float = 0.01,
    sparsity: float = 0.1,
    batch_size: int | None = None,
    relevant: np.ndarray | None = None,
    seed: int = 0,
) -> Task:
    """Return the task of choosing every feature's L2 weight.

    Args:
        samples: the rows.
        parts: each client's rows.
        folds: of the cross-validation.
        floor: lambda_min, the least L2 weight.
        sparsity: what a feature must be worth, times log(rows) / rows; 0 for cross-validation
            alone, which keeps many of the features that do not matter.
        batch_size: rows in a minibatch; all by default.
        relevant: which features matter, where that is known: an oracle joins the baselines.
        seed: of the folds.

    Returns:
        The task; its metric is the loss on the test rows.
    """
    features, classes = samples.features.shape[1], samples.classes
    count = len(samples.target)
    losses = problem(classes, folds, floor, sparsity * math.log(count) / count)
    fold = linear.assign_folds(_strata(samples), folds, seed)
    data = linear.held((samples.features, samples.target, fold), parts, batch_size)
    x0, y0 = np.zeros(features, np.float32), linear.zeros(features, classes, folds)
    evaluate = _evaluator(problem(classes, folds, floor), data, samples)
    if relevant is not None:
        evaluate = _with_shut(evaluate, relevant)
    oracle = () if relevant is None else (np.where(relevant, -_SHUT, _SHUT),)
    shared = tuple(np.full(features, value) for value in _GRID)
    choices = {"no tuning": (x0,), "one lambda, 20 tried": shared,
               "the features that matter (oracle)": oracle}  # fmt: skip
    baselines = tuple(
        Baseline(name, losses, data, y0, tuple(x.astype(np.float32) for x in xs), evaluate)
        for name, xs in choices.items()
        if xs
    )
    return Task(
        "regularisation", losses, data, x0, y0, evaluate, "test_loss", "upper_loss", baselines
    )


def shut(x: Any) -> np.ndarray:
    """Return which features are as good as shut off: less than a twentieth of s_j^2 is left."""
    return np.asarray(jax.nn.sigmoid(-jnp.asarray(x))) < 0.05


def _with_shut(evaluate: Metrics, relevant: np.ndarray) -> Metrics:
    """Return the metrics, and the shares of features that were shut off rightly and wrongly."""

    def both(state: Any) -> dict[str, float]:
        closed = shut(state.x)
        shares = {"irrelevant_shut": closed[~relevant], "relevant_shut": closed[relevant]}
        means = {name: float(found.mean()) if found.size else 0.0 for name, found in shares.items()}
        return {**evaluate(state), **means}

    return both


def _strata(samples: Samples) -> np.ndarray:
    """Return what folds should hold alike: the classes, or nothing in particular."""
    return samples.target if samples.classes else np.zeros(len(samples.target), np.int32)


def _evaluator(losses: BilevelProblem, data: FederatedData, samples: Samples) -> Metrics:
    """Return (state) -> metrics on the test rows, and the upper loss without its price."""
    upper = linear.upper_loss(losses, data)
    classes, target = samples.classes, jnp.asarray(samples.test_target)
    inputs = jnp.asarray(samples.test_features)

    @jax.jit
    def measure(x: PyTree, y: Linear) -> dict[str, jax.Array]:
        found = scaled(x, linear.averaged(y))(inputs)
        metrics = {"test_loss": linear.losses(found, target, classes).mean()}
        if classes:
            right = found.argmax(-1).astype(target.dtype) == target
            metrics["test_accuracy"] = right.mean(dtype=found.dtype)
        return metrics

    def evaluate(state: Any) -> dict[str, float]:
        found = measure(state.x, state.y) if len(target) else {}
        names = [name for name in ("test_loss", "test_accuracy") if name in found]
        return {**{name: float(found[name]) for name in names}, "upper_loss": upper(state)}

    return evaluate
