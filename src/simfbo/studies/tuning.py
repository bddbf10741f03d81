"""Tuning: step sizes by successive halving, within a budget of communication rounds or bytes.

Trials spread evenly (on a logarithmic scale) over the space of settings begin with few iterations
each; the best third of them is rerun with three times as many, from the start and with the same
keys, until at most three are left and the best of those wins (Jamieson and Talwalkar, 2016). Every
stage has the same share of the budget. The budget counts communication rounds, so methods with many
rounds per iteration get fewer iterations.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import qmc

from simfbo.config.build_task import build_task
from simfbo.config.files import as_toml
from simfbo.config.methods import steps_table
from simfbo.config.run import RunConfig, checked
from simfbo.errors import UserError
from simfbo.runs.files import make_folder, write_atomic
from simfbo.runs.history import History
from simfbo.runs.trackers import Tracking
from simfbo.studies.comparison import iteration_cost
from simfbo.studies.sweep import Job, sweep

Space = Mapping[str, tuple[float, float]]
OnProgress = Callable[[int, int, int, int], None]
# Committed trials depend on this order.
_RANGES = {"y": (0.01, 1.0), "v": (0.01, 1.0), "x": (0.005, 0.5)}


class Result(NamedTuple):
    """The result of one trial at one stage.

    Attributes:
        stage: the stage, from 0.
        trial: the number of the trial.
        settings: the values tried, by dotted key.
        iterations: its number of iterations.
        status: finished or diverged.
        score: the final metric; None if it diverged.
        communication_rounds: its cost.
    """

    stage: int
    trial: int
    settings: dict[str, float]
    iterations: int
    status: str
    score: float | None
    communication_rounds: int


class Tuned(NamedTuple):
    """The best configuration found, and all results."""

    best: RunConfig
    metric: str
    results: list[Result]


def tune(
    config: RunConfig,
    directory: Path,
    *,
    budget: int = 20_000,
    budget_bytes: int | None = None,
    trials: int = 27,
    space: Space | None = None,
    metric: str | None = None,
    workers: int = 1,
    data_dir: Path | None = None,
    on_progress: OnProgress | None = None,
    tracking: Tracking | None = None,
) -> Tuned:
    """Find the best step sizes for the algorithm and task of a configuration.

    Called again with the same folder, it continues where it stopped.

    Args:
        config: the run to tune; its own settings are the first trial.
        directory: for trials, `trials.jsonl` and `best.toml`.
        budget: communication rounds for all trials together.
        budget_bytes: bytes for all trials together, both ways, in place of `budget`; sizes of
            entropy codes are those of normally distributed messages.
        trials: the initial number of trials.
        space: lowest and highest value by dotted key; by default the method's step sizes.
        metric: the criterion; by default the task's `tuned_by`.
        workers: parallel processes.
        data_dir: folder of the data sets.
        on_progress: called with stage, stages, and completed and total iterations of all stages.
        tracking: the trackers of this search.

    Returns:
        The winner, ready to run, and every result.
    """
    config = config.model_copy(update={"steps": "given"})
    space = default_space(config) if space is None else space
    task = build_task(config, data_dir)
    metric = task.tuned_by or task.metric if metric is None else metric
    goal = task.goal_of(metric)
    cost = iteration_cost(config, task)
    by_bytes = budget_bytes is not None
    iterations = budget_bytes / cost.bytes if by_bytes else budget / cost.exchanges
    stages = plan(iterations, trials)
    settings, results = candidates(config, space, trials), []
    make_folder(directory)
    alive = list(range(trials))
    for stage, (size, iterations) in enumerate(stages):
        alive = alive[:size]
        jobs = [_job(config, settings[i], iterations, directory, stage, i) for i in alive]
        histories = sweep(jobs, workers, data_dir, _part(on_progress, stage, stages), tracking)
        stage_results = [
            _result(stage, i, settings[i], iterations, history, metric)
            for i, history in zip(alive, histories, strict=True)
        ]
        results += stage_results
        lines = [json.dumps(result._asdict()) + "\n" for result in results]
        write_atomic(directory / "trials.jsonl", "".join(lines))
        finished = [result for result in stage_results if result.score is not None]
        if not finished:
            raise UserError(
                f"All trials of stage {stage + 1} diverged: give smaller ranges, for example "
                "--range KEY=0.0001..0.01."
            )
        alive = [result.trial for result in sorted(finished, key=lambda r: _rank(r, goal))]
    best = checked(config.model_dump(), settings[alive[0]])
    write_atomic(directory / "best.toml", as_toml(best))
    return Tuned(best, metric, results)


_FIXED = ("rounds", "every", "seed")


def default_space(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Return the default ranges of a method's step sizes."""
    table = steps_table(config.algorithm)
    names = type(getattr(config.algorithm, table)).model_fields
    return {f"algorithm.{table}.{name}": span for name, span in _RANGES.items() if name in names}


def plan(iterations: float, trials: int) -> list[tuple[int, int]]:
    """Return (trials, iterations each) of every stage.

    Args:
        iterations: of all trials together.
        trials: of the first stage.

    Returns:
        The stages, each with an equal share of the iterations.

    Example:
        >>> plan(8100, 27)
        [(27, 100), (9, 300), (3, 900)]
    """
    if trials < 1:
        raise UserError(f"--trials must be at least 1, got {trials}.")
    sizes = [trials]
    while sizes[-1] > 3:
        sizes.append(math.ceil(sizes[-1] / 3))
    stages = [(size, int(iterations / (len(sizes) * size))) for size in sizes]
    if stages[0][1] < 1:
        raise UserError(
            f"The budget allows {iterations:.0f} iterations, too few for {trials} trials: raise "
            "the budget or lower --trials."
        )
    return stages


def candidates(config: RunConfig, space: Space, trials: int) -> list[dict[str, float]]:
    """Return the settings of all trials: the configuration's, then a Halton sequence."""
    for key, (low, high) in space.items():
        if key in _FIXED:
            raise UserError(f"'{key}' cannot be tuned: the stages set it.")
        if not 0 < low < high < math.inf:
            raise UserError(f"The range of '{key}' must satisfy 0 < low < high.")
    first = {key: lookup(config, key) for key in space}
    sequence = qmc.Halton(len(space), scramble=False)
    sequence.fast_forward(1)  # its first point is the lower corner
    lows, highs = np.log([span for span in space.values()]).T
    points = np.exp(lows + (highs - lows) * sequence.random(max(0, trials - 1)))
    rounded = [[float(f"{value:.3g}") for value in point] for point in points]
    return [first, *(dict(zip(space, values, strict=True)) for values in rounded)]


def lookup(config: RunConfig, key: str) -> float:
    """Return the value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"'{key}' cannot be tuned: it is not a number in this configuration.")
    return float(value)


def _job(
    config: RunConfig,
    settings: Mapping[str, float],
    iterations: int,
    directory: Path,
    stage: int,
    trial: int,
) -> Job:
    """Return the run of one trial; it is evaluated four times, so divergence ends it early."""
    schedule = {"rounds": iterations, "every": max(1, iterations // 4)}
    trial_config = checked(config.model_dump(), {**settings, **schedule})
    return Job(trial_config, directory / f"stage{stage}" / f"trial{trial:02d}")


def _result(
    stage: int,
    trial: int,
    settings: dict[str, float],
    iterations: int,
    history: History,
    metric: str,
) -> Result:
    status = (history.end or {}).get("status", "unknown")
    value = history.column(metric)[-1]
    score = value if status == "finished" and math.isfinite(value) else None
    spent = history.records[-1]["communication_rounds"]
    return Result(stage, trial, settings, iterations, status, score, spent)


def _rank(result: Result, goal: str) -> float:
    """Return a sort key, smaller for better results."""
    score = math.inf if result.score is None else result.score
    return -score if goal == "max" else score


def _part(
    on_progress: OnProgress | None, stage: int, stages: Sequence[tuple[int, int]]
) -> Callable[[int, int], None] | None:
    """Report a stage's progress as progress of the whole search."""
    if on_progress is None:
        return None
    sizes = [trials * iterations for trials, iterations in stages]
    before, after = sum(sizes[:stage]), sum(sizes[stage + 1 :])
    return lambda done, total: on_progress(
        stage, len(stages), before + done, before + total + after
    )
