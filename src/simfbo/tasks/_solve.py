"""Solve a task in one call, by SimFBO or another single-loop method with automatic steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from simfbo.algorithms import auto_steps, simfbo
from simfbo.algorithms.steps.auto import FromPlan
from simfbo.core.local_work import LocalWork
from simfbo.core.method import Method
from simfbo.core.sampling import AnySampler
from simfbo.engines.simulated import SimulatedFederation
from simfbo.errors import UserError, brief
from simfbo.runs.beginnings import whole_numbers
from simfbo.runs.history import History
from simfbo.runs.runner import OnRound, run
from simfbo.runs.trackers.tracking import Track, Tracking
from simfbo.tasks.task import Task


def solve(
    task: Task,
    *,
    rounds: int = 500,
    seed: int = 0,
    method: Callable[..., Method] = simfbo,
    sampler: AnySampler | None = None,
    local_work: LocalWork | None = None,
    client_metrics: bool = False,
    every: int | None = None,
    directory: str | Path | None = None,
    on_round: OnRound | None = None,
    track: Track | Tracking | None = None,
    progress: bool = False,
) -> History:
    """Run a task in simulation; step sizes are chosen automatically.

    Args:
        task: the task to solve.
        rounds: iterations.
        seed: of all random draws.
        method: `simfbo`, `shrofbo` or `memfbo`.
        sampler: selects the clients of a round; all by default.
        local_work: the local steps of each client; one by default.
        client_metrics: let clients measure the upper loss and the task's other client metrics on
            their own data, as in `run`.
        every: iterations between evaluations; about 20 evaluations by default.
        directory: where to write history and checkpoints; nothing is written by default.
        on_round: callback after every round, as in `run`.
        track: where records go besides the history, as in `run`.
        progress: show a bar with the time left and the metrics.

    Returns:
        The history; `.state` is the final state.

    Example:
        >>> from simfbo.tasks import quadratic
        >>> history = solve(quadratic(), rounds=100)
        >>> history.records[-1]["x_error"] < 0.5 * history.records[0]["x_error"]
        True
    """
    _require_kinds(task, method)
    rounds, every, seed = whole_numbers(rounds, every, seed)

    return run(
        auto_steps(FromPlan(method, task.problem), task.problem, task.x0, rounds),
        SimulatedFederation(task.data, sampler, local_work),
        task.x0,
        task.y0,
        rounds=rounds,
        seed=seed,
        evaluate=task.evaluate,
        client_metrics=task.client_metrics if client_metrics else None,
        every=every or max(1, rounds // 20),
        directory=directory,
        about=task.about,
        on_round=on_round,
        track=track,
        progress=progress,
    )


def _require_kinds(task: Any, method: Any) -> None:
    """Raise unless these are a task and a method."""
    if not isinstance(task, Task):
        kind = type(task).__name__
        raise UserError(f"solve takes a task, such as simfbo.tasks.quadratic(), got {kind}.")
    if not callable(method):
        advice = "give a function such as simfbo.algorithms.simfbo"
        raise UserError(f"method cannot be {brief(method)}: {advice}.")
