"""How a fit evaluates itself, when it may end, and what is said if it has not converged."""

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
_LOOK_BACK = 2  # evaluations over which nothing may have changed
_ENOUGH = 0.25  # of the hypergradient: predictions hardly change beyond that


def evaluator(setting: Setting) -> Callable[[PyTree], dict[str, float]]:
    """Return (point) -> the upper loss over all clients, and how far y moved since the last time.

    The move is relative to y; it is one where x, which waits for y with automatic steps, stood
    still since the last time, or did so before that.
    """
    upper = upper_loss(setting.problem, setting.data)
    before: list[PyTree] = []  # x, y, and whether x stood still

    def evaluate(point: Point[PyTree]) -> dict[str, float]:
        x, y = jax.tree.map(np.asarray, (point.x, point.y))
        old_x, old_y, waited = before or (x, setting.y0, True)
        moved, size = map(trees.host_norm, (jax.tree.map(np.subtract, y, old_y), y))
        same = all(map(np.array_equal, jax.tree.leaves(x), jax.tree.leaves(old_x)))
        waits = waited or same or not size
        before[:] = x, y, same and bool(before)
        return {"upper_loss": upper(point), "y_move": 1.0 if waits else moved / size}

    return evaluate


def settled(tol: float, records: Sequence[Json]) -> bool:
    """Return whether the last evaluations changed neither the upper loss nor y.

    The loss is flat where it is smallest, so y may move by the root of the tolerance.
    """
    if len(records) <= _LOOK_BACK or not tol:
        return False
    before, *last = records[-_LOOK_BACK - 1 :]
    change = abs(last[-1]["upper_loss"] - before["upper_loss"])
    moved = sum(record["y_move"] for record in last)
    return change <= tol * abs(last[-1]["upper_loss"]) and moved <= math.sqrt(tol)


def progress(rounds: int) -> Callable[[int, Json | None], None]:
    """Return a callback that prints a line for every evaluation."""

    def show(t: int, record: Json | None) -> None:
        if record is not None:
            print(f"iteration {t} of {rounds}: upper loss {record['upper_loss']:.6g}")

    return show


def warn_unless_converged(history: History) -> None:
    """Warn, as scikit-learn does, where a fit took all its rounds and ended far from its solution.

    Where it ended by its tolerance, more rounds would not have changed it.
    """
    found, last = history.verdict, history.records[-1]["round"]
    if found is None or found["converged"] is not False or last < history.header["rounds"]:
        return
    solved = found["lower"] <= SOLVED and found["linear"] <= SOLVED
    if not solved or found.get("hypergradient", 1.0) > _ENOUGH:
        text = found["text"].removeprefix("not converged: ")
        warnings.warn(f"The fit has not converged: {text}.", ConvergenceWarning, stacklevel=4)


def require_finished(history: History) -> None:
    """Raise unless a run finished all its rounds."""
    end = history.end or {"status": "interrupted"}
    if end["status"] == "interrupted":
        raise KeyboardInterrupt  # the runner caught it to save its state
    if end["status"] != "finished":
        raise UserError(
            f"The training {end['status']} in iteration {end['round']}: {end['reason']}; use "
            "steps='auto'."
        )
