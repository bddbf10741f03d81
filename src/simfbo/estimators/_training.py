"""The training of `fit`: evaluation, early stopping and the warning of convergence."""

import math
import warnings
from collections.abc import Callable, Sequence

import jax
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from simfbo.core import trees
from simfbo.core.problem import Point, PyTree
from simfbo.errors import UserError
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.runs.verdict import SOLVED
from simfbo.tasks.linear import upper_loss
from simfbo.tasks.task import Setting

EVALUATIONS = 20
_PATIENCE = 2  # evaluations without a change before training stops
_ENOUGH = 0.25  # of the hypergradient, below which predictions hardly change


def evaluator(setting: Setting) -> Callable[[PyTree], dict[str, float]]:
    """Return (point) -> the upper loss over all clients, and the relative change of y.

    The change is since the last evaluation. It is one if x, which waits for y with automatic
    steps, has not changed since then or had not changed before.
    """
    upper = upper_loss(setting.problem, setting.data)
    previous: list[PyTree] = []  # x, y, and a flag for an unchanged x

    def evaluate(point: Point[PyTree]) -> dict[str, float]:
        x, y = jax.tree.map(np.asarray, (point.x, point.y))
        old_x, old_y, waited = previous or (x, setting.y0, True)
        change, size = map(trees.host_norm, (jax.tree.map(np.subtract, y, old_y), y))
        unchanged = all(map(np.array_equal, jax.tree.leaves(x), jax.tree.leaves(old_x)))
        waits = waited or unchanged or not size
        previous[:] = x, y, unchanged and bool(previous)
        return {"upper_loss": upper(point), "y_move": 1.0 if waits else change / size}

    return evaluate


def settled(tol: float, records: Sequence[Json]) -> bool:
    """Check if the upper loss and y are constant over the last evaluations.

    Since the loss is flat near its minimum, y may change by the square root of the tolerance.
    """
    if len(records) <= _PATIENCE or not tol:
        return False
    first, *last = records[-_PATIENCE - 1 :]
    change = abs(last[-1]["upper_loss"] - first["upper_loss"])
    y_change = sum(record["y_move"] for record in last)
    return change <= tol * abs(last[-1]["upper_loss"]) and y_change <= math.sqrt(tol)


def progress(rounds: int) -> Callable[[int, Json | None], None]:
    """Return a callback that prints a line for every evaluation."""

    def show(t: int, record: Json | None) -> None:
        if record is not None:
            print(f"iteration {t} of {rounds}: upper loss {record['upper_loss']:.6g}")

    return show


def warn_unless_converged(history: History) -> None:
    """Warn, as scikit-learn does, if a fit used all its rounds without converging.

    There is no warning after early stopping, since more rounds would not have changed the model.
    """
    verdict, last = history.verdict, history.records[-1]["round"]
    if verdict is None or verdict["converged"] is not False or last < history.header["rounds"]:
        return
    solved = verdict["lower"] <= SOLVED and verdict["linear"] <= SOLVED
    if not solved or verdict.get("hypergradient", 1.0) > _ENOUGH:
        text = verdict["text"].removeprefix("not converged: ")
        warnings.warn(f"The fit has not converged: {text}.", ConvergenceWarning, stacklevel=4)


def require_finished(history: History) -> None:
    """Raise if a run was interrupted, diverged or starved."""
    end = history.end or {"status": "interrupted"}
    if end["status"] == "interrupted":
        raise KeyboardInterrupt  # the runner caught it to save its state
    if end["status"] != "finished":
        raise UserError(
            f"The training {end['status']} in iteration {end['round']}: {end['reason']}; use "
            "steps='auto'."
        )
