"""Evaluation of a model on each client's rows.

One exchange with all clients (`simfbo.runs.client_metrics`). After `fit`, every row is evaluated by
a model that was not trained on it.
"""

import math

import jax

from simfbo.core.data import federate
from simfbo.core.federation import Federation
from simfbo.core.problem import Point, PyTree
from simfbo.engines.simulated import SimulatedFederation
from simfbo.estimators._scaling import Table
from simfbo.runs.client_metrics import evaluation_of
from simfbo.runs.client_scores import ClientScores
from simfbo.tasks import linear
from simfbo.tasks.linear import Target
from simfbo.tasks.models import Linear
from simfbo.tasks.task import Goal, Outputs, Setting


def measured(outputs: Outputs, classes: int, federation: Federation, state: PyTree) -> ClientScores:
    """Evaluate the loss and, for classes, the accuracy on all clients.

    Args:
        outputs: (x, y, batch) -> the predictions for each row of a batch (features, target, ...).
        classes: the number of classes, or a `linear.Target`.
        federation: of the clients; its ledger records the exchange.
        state: with x and y.
    """
    evaluation = evaluation_of(linear.measures(outputs, classes))
    return evaluation.ask(federation, state, jax.random.key(0))  # without random draws


def after_fit(
    setting: Setting, classes: int, federation: Federation, state: PyTree
) -> ClientScores:
    """Evaluate rows by models that were not trained on them; arguments as in `measured`."""
    assert setting.outputs is not None, "all tasks of the estimators have outputs"
    return measured(setting.outputs, classes, federation, state)


def unit_of(classes: int, target_units: tuple[float, float]) -> float:
    """Return the factor that converts a loss on the scaled target to the user's units."""
    mean, deviation = target_units
    if classes == Target.COUNT:
        return math.exp(mean)
    return deviation**2 if classes == Target.NUMBER else 1.0


def in_units(scores: ClientScores, table: Table, unit: float) -> ClientScores:
    """Add the clients' ids to scores and convert regression losses to the user's units.

    Args:
        scores: as measured: half squared errors of numbers, half deviances of counts and sizes.
        table: the rows in the user's units.
        unit: of the losses.
    """
    scores = scores._replace(ids=table.clients.ids)
    if table.classes > 0:
        return scores
    name = "deviance" if table.classes else "mse"
    goals: dict[str, Goal] = {name: "min"}
    return scores._replace(values={name: 2 * unit * scores.values["loss"]}, goals=goals)


def score(table: Table, outputs: Outputs, model: PyTree) -> ClientScores:
    """Evaluate a fitted model on the rows of each client.

    Args:
        table: the rows, in the user's units.
        outputs: (x, y, batch) -> the outputs for each row.
        model: y.
    """
    federation = SimulatedFederation(
        federate((table.inputs, table.target), table.parts, table.parts)
    )
    scores = measured(outputs, table.classes, federation, Point(x=(), y=model))
    return in_units(scores, table, 1.0)


def outputs(x: PyTree, y: Linear, batch: linear.Batch) -> jax.Array:
    """Return the outputs of a linear model for each row."""
    return y(batch[0])
