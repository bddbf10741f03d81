"""Regularisation: an L2 weight for every feature of a linear model, chosen by cross-validation.

A feature's weight is s_j w_j with s_j^2 = sigmoid(-x_j), and all w are penalised equally, so that

    lambda_j = lambda_min (1 + exp(x_j))

is the feature's own L2 weight: lambda_min for small x_j, growing like exp(x_j) until the feature is
removed. As a function of w, the lower problem keeps mu = lambda_min, and no x can more than double
its L.

    g_i = mean loss((s w)'a + b, target) + lambda_min/2 (||w||^2 + ||b||^2),   f_i = the loss alone,

on the folds of a cross-validation (`simfbo.tasks.linear`); the loss is half the squared error, or
the cross-entropy. Bengio (2000) was the first to choose hyperparameters by such gradients.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.data import FederatedData
from simfbo.core.partition import Rows
from simfbo.core.problem import BilevelProblem, PyTree
from simfbo.tasks import linear
from simfbo.tasks.models import Linear
from simfbo.tasks.samples import Samples, Training
from simfbo.tasks.task import Baseline, Metrics, Outputs, Setting, Task

_SHUT = 12.0  # an x_j that practically removes its feature
_START = 0.003  # the first L2 weight
_GRID = np.linspace(-4.0, 10.0, 20)


class Form(NamedTuple):
    """A kind of model whose L2 weights are learnt.

    Attributes:
        outputs: (x, model, features) -> the outputs for each row.
        start: (features, classes, floor, seed) -> the initial x and model.
    """

    outputs: Callable[[jax.Array, PyTree, jax.Array], jax.Array]
    start: Callable[[int, int, float, int], tuple[np.ndarray, PyTree]]


def _first_linear(width: int, classes: int, floor: float, seed: int) -> tuple[np.ndarray, Linear]:
    return first_x(width, floor), linear.zeros(width, classes)


LINEAR = Form(lambda x, model, features: scaled(x, model)(features), _first_linear)


@lru_cache(maxsize=32)
def problem(
    classes: int,
    folds: int,
    floor: float,
    price: float = 0.0,
    pull: float = 0.0,
    weighted: bool = False,
    form: Form = LINEAR,
) -> BilevelProblem:
    """Build the two losses; cached, so they are compiled once for the same settings.

    Args:
        classes: the number of classes, or a `linear.Target`.
        folds: of the cross-validation.
        floor: lambda_min.
        price: of each feature that is not removed, in the upper loss.
        pull: the factor of half the squared distance of each log(lambda_j) from their mean.
        weighted: batches hold the rows' weights, after the target.
        form: the kind of model.
    """

    def row_losses(x: jax.Array, model: PyTree, rows: linear.Batch) -> jax.Array:
        losses = linear.losses(form.outputs(x, model, rows[0]), rows[1], classes)
        return rows[2] * losses if weighted else losses

    fit = linear.cross_validated(row_losses, row_losses, folds, floor)

    def upper(x: jax.Array, y: PyTree, batch: linear.Batch) -> jax.Array:
        return fit.upper(x, y, batch) + charge(x, price, pull)

    return BilevelProblem(upper, fit.lower)


def charge(x: jax.Array, price: Any, pull: Any) -> jax.Array:
    """Return the upper loss's price of features and penalty on unequal L2 weights (`problem`)."""
    log_ratios = jax.nn.softplus(x)  # log(lambda_j / lambda_min)
    spread = 0.5 * jnp.sum((log_ratios - log_ratios.mean()) ** 2)
    return price * jax.nn.sigmoid(-x).sum() + pull * spread


def first_x(width: int, floor: float) -> np.ndarray:
    """Return the initial x: the same small L2 weight for all features, at least twice the floor."""
    return np.full(width, math.log(max(1.0, _START / floor - 1)), np.float32)


def assemble(
    training: Training,
    *,
    folds: int,
    floor: float,
    sparsity: float,
    spread: float = math.inf,
    batch_size: int | None,
    seed: int,
    count: int | None = None,
    form: Form = LINEAR,
) -> Setting:
    """Assemble problem, data and initial point; the task and the estimators share this.

    Args:
        training: the rows.
        folds: of the cross-validation.
        floor: lambda_min.
        sparsity: the price of a feature is this times log(count) / count.
        spread: the expected deviation of log(lambda_j).
        batch_size: rows in a minibatch; None for all.
        seed: of the folds and the initial model.
        count: the number of rows that determines price and pull; all rows by default.
        form: the kind of model.
    """
    count = len(training.target) if count is None else count
    fold = linear.assign_folds(training.strata, folds, seed)
    weight = () if training.weight is None else (training.weight,)
    rows = (training.features, training.target, *weight, fold)
    x0, model = form.start(training.features.shape[1], training.classes, floor, seed)
    return Setting(
        problem(
            training.classes,
            folds,
            floor,
            sparsity * math.log(count) / count,
            1 / (spread**2 * count),
            weighted=bool(weight),
            form=form,
        ),
        linear.on_both_levels(rows, training.parts, batch_size),
        x0,
        trees.on_device(jax.tree.map(lambda a: np.broadcast_to(a, (folds, *a.shape)), model)),
        held_out(form),
    )


@lru_cache(maxsize=32)
def held_out(form: Form) -> Outputs:
    """Return (x, y, batch) -> each row's outputs by the model of its fold."""

    def outputs(x: jax.Array, y: PyTree, batch: linear.Batch) -> jax.Array:
        each = jax.vmap(lambda model: form.outputs(x, model, batch[0]))(y)
        return linear.of_fold(each, batch[-1])

    return outputs


def scaled(x: jax.Array, model: Linear) -> Linear:
    """Return the model in the features' own units: s_j w_j."""
    return Linear(jnp.sqrt(jax.nn.sigmoid(-x))[:, None] * model.weight, model.bias)


def penalties(x: PyTree, floor: float) -> np.ndarray:
    """Return lambda_j, the L2 weight of every feature.

    Example:
        >>> penalties(np.zeros(2), floor=0.01).tolist()
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
    """Build the task of choosing every feature's L2 weight.

    Args:
        samples: the rows.
        parts: each client's rows.
        folds: of the cross-validation.
        floor: lambda_min, the smallest L2 weight.
        sparsity: the improvement of the upper loss that a feature must bring, in units of
            log(rows) / rows; 0 leaves cross-validation alone, which keeps many irrelevant features.
        batch_size: rows in a minibatch; all by default.
        relevant: a mask of relevant features, if known: adds an oracle to the baselines.
        seed: of the folds.

    Returns:
        The task; its metric is the loss on the test rows.
    """
    training = samples.dealt(parts)
    setting = assemble(
        training, folds=folds, floor=floor, sparsity=sparsity, batch_size=batch_size, seed=seed
    )
    unpriced = problem(samples.classes, folds, floor)
    evaluate = _evaluator(unpriced, setting.data, samples)
    if relevant is not None:
        evaluate = _with_shut(evaluate, relevant, floor)
    baselines = _baselines(setting, evaluate, relevant)
    return Task(
        "regularisation",
        *setting[:4],
        evaluate,
        "test_loss",
        tuned_by="upper_loss",
        maximise=frozenset({"test_accuracy", "irrelevant_shut"}),
        baselines=baselines,
        own_metrics=linear.own_metrics(setting, samples.classes, unpriced.upper),
    )


def _baselines(
    setting: Setting, evaluate: Metrics, relevant: np.ndarray | None
) -> tuple[Baseline, ...]:
    """Return one L2 weight for all features, guessed or searched, and an oracle if possible."""
    width = len(setting.x0)
    choices = {
        "no tuning": (setting.x0,),
        "one lambda, 20 tried": tuple(np.full(width, value) for value in _GRID),
    }
    if relevant is not None:
        oracle = np.where(relevant, -_SHUT, _SHUT)
        choices["the features that matter (oracle)"] = (oracle,)
    return tuple(
        Baseline(
            name,
            setting.problem,
            setting.data,
            setting.y0,
            tuple(x.astype(np.float32) for x in xs),
            evaluate,
        )
        for name, xs in choices.items()
    )


def shut(x: PyTree, floor: float) -> np.ndarray:
    """Return a mask of the features that are removed: those shrunk by 90 % or more.

    Ridge keeps 1 / (1 + lambda_j) of a standardised feature that is uncorrelated with the others.
    """
    return penalties(x, floor) >= 9


def _with_shut(evaluate: Metrics, relevant: np.ndarray, floor: float) -> Metrics:
    """Add the shares of irrelevant and of relevant features that were removed to the metrics."""

    def evaluate_all(state: PyTree) -> dict[str, float]:
        removed = shut(state.x, floor)
        shares = {"irrelevant_shut": removed[~relevant], "relevant_shut": removed[relevant]}
        means = {name: float(mask.mean()) if mask.size else 0.0 for name, mask in shares.items()}
        return {**evaluate(state), **means}

    return evaluate_all


def _evaluator(losses: BilevelProblem, data: FederatedData, samples: Samples) -> Metrics:
    """Return (state) -> metrics on the test rows, and the upper loss without the price."""
    upper = linear.upper_loss(losses, data)
    classes, target = samples.classes, jnp.asarray(samples.test_target)
    inputs = jnp.asarray(samples.test_features)

    @jax.jit
    def measure(x: PyTree, y: Linear) -> dict[str, jax.Array]:
        outputs = scaled(x, linear.averaged(y))(inputs)
        metrics = {"test_loss": linear.losses(outputs, target, classes).mean()}
        if classes > 0:
            correct = outputs.argmax(-1).astype(target.dtype) == target
            metrics["test_accuracy"] = correct.mean(dtype=outputs.dtype)
        return metrics

    def evaluate(state: PyTree) -> dict[str, float]:
        measured = measure(state.x, state.y) if len(target) else {}
        names = [name for name in ("test_loss", "test_accuracy") if name in measured]
        return {**{name: float(measured[name]) for name in names}, "upper_loss": upper(state)}

    return evaluate
