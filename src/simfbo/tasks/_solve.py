"""A task solved in one call: SimFBO or another single-loop method, with automatic steps."""

from collections.abc import Callable
from pathlib import Path

from simfbo.algorithms._auto_steps import Plan, automatic
from simfbo.algorithms._simfbo import simfbo
from simfbo.core.federation import Algorithm
from simfbo.core.local_work import LocalWork
from simfbo.core.sampling import Sampler
from simfbo.engines.simulated import SimulatedFederation
from simfbo.runs.history import History
from simfbo.runs.runner import OnRound, run
from simfbo.tasks.task import Task


def solve(
    task: Task,
    *,
    rounds: int = 500,
    seed: int = 0,
    method: Callable[..., Algorithm] = simfbo,
    sampler: Sampler | None = None,
    local_work: LocalWork | None = None,
    every: int | None = None,
    directory: str | Path | None = None,
    on_round: OnRound | None = None,
) -> History:
    """Return the history of a task's run in simulation, with automatic steps.

    Args:
        task: what to solve.
        rounds: iterations.
        seed: of every random draw.
        method: `simfbo`, `shrofbo` or `memfbo`.
        sampler: who is asked; everyone by default.
        local_work: how much each does; one step by default.
        every: evaluate after so many iterations; about 20 times by default.
        directory: where to write history and checkpoints; nothing is written by default.
        on_round: as in `run`.

    Returns:
        The history; `.state` is the last state.

    Example:
        >>> from simfbo.tasks import regularisation, samples
        >>> made_up = samples.synthetic(clients=4, features=6, relevant=2)
        >>> task = regularisation(made_up.samples, made_up.parts)
        >>> history = solve(task, rounds=50)
        >>> history.records[-1]["test_loss"] < history.records[0]["test_loss"]
        True
    """

    def build(plan: Plan) -> Algorithm:
        return method(task.problem, plan.local, plan.server)

    return run(
        automatic(build, task.problem, task.x0, rounds),
        SimulatedFederation(task.data, sampler, local_work),
        task.x0,
        task.y0,
        rounds=rounds,
        seed=seed,
        evaluate=task.evaluate,
        every=every or max(1, rounds // 20),
        directory=directory,
        on_round=on_round,
    )
