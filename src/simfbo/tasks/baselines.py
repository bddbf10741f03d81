"""Baselines: alternatives without a bilevel method, on the same federation and byte budget.

Each trains the lower variable by FedAvg at a fixed x, with automatic steps. A search over several
values of x shares the bytes of the bilevel run among them; choosing the best is free.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from simfbo.algorithms import auto_steps, fedavg
from simfbo.algorithms.steps.auto import FromPlan, most_probes
from simfbo.core.data import FederatedData
from simfbo.core.ledger import Ledger, Traffic
from simfbo.core.problem import Point
from simfbo.engines.base import Engine
from simfbo.engines.debug import cost
from simfbo.runs.files import Json, write_atomic
from simfbo.runs.report import size
from simfbo.runs.runner import run
from simfbo.tasks.task import Baseline, Goal, Task

FILE = "baselines.json"
_FEWEST = 20  # the smallest number of rounds of a candidate
_PROBING = 1.6  # bytes of an exchange of the step-size search, in rounds of FedAvg


class Outcome(NamedTuple):
    """The result of a baseline.

    Attributes:
        name: of the baseline.
        metrics: of the best candidate; empty if the byte budget was too small.
        chosen: the index of the best candidate.
        tried: the number of candidates.
        rounds: communication rounds of all candidates together.
        sent: bytes in both directions, of all candidates together.
    """

    name: str
    metrics: dict[str, float]
    chosen: int
    tried: int
    rounds: int
    sent: int


def compare(
    task: Task,
    federate: Callable[[FederatedData], Engine],
    *,
    rounds: int,
    budget: int,
    seed: int = 0,
    on_baseline: Callable[[str], None] | None = None,
) -> list[Outcome]:
    """Run every baseline of a task.

    Args:
        task: the task.
        federate: (data) -> a federation that holds it.
        rounds: the most iterations a candidate may take.
        budget: bytes in both directions that a search may send; a single candidate always takes
            all iterations.
        seed: of all random draws.
        on_baseline: called with the name of each baseline before it starts.
    """
    criterion = task.tuned_by or task.metric
    outcomes = []
    for baseline in task.baselines:
        if on_baseline is not None:
            on_baseline(baseline.name)
        criterion_and_goal = criterion, task.goal_of(criterion)
        outcomes.append(_outcome(baseline, criterion_and_goal, federate, rounds, budget, seed))
    return outcomes


def _outcome(
    baseline: Baseline,
    criterion: tuple[str, Goal],
    federate: Callable[[FederatedData], Engine],
    rounds: int,
    budget: int,
    seed: int,
) -> Outcome:
    """Train every candidate of a baseline and keep the best by a metric and its goal."""
    federation = federate(baseline.data)
    rounds_each = _rounds_each(baseline, federation, rounds, budget)
    if not rounds_each:
        return Outcome(baseline.name, {}, 0, 0, 0, 0)
    build = FromPlan(fedavg, baseline.problem)
    method = auto_steps(build, baseline.problem, baseline.candidates[0], rounds_each)
    metrics, total_rounds, total_bytes = [], 0, 0
    for x in baseline.candidates:
        federation.ledger = Ledger()
        history = run(method, federation, x, baseline.y0, rounds=rounds_each, seed=seed)
        if (history.end or {}).get("status") == "interrupted":
            raise KeyboardInterrupt
        metrics.append(baseline.evaluate(Point(x=x, y=history.state.y)))
        total = federation.ledger.total
        total_rounds, total_bytes = total_rounds + total.rounds, total_bytes + _bytes(total)
    best = _best([candidates[criterion[0]] for candidates in metrics], criterion[1])
    return Outcome(baseline.name, metrics[best], best, len(metrics), total_rounds, total_bytes)


def _rounds_each(baseline: Baseline, federation: Engine, rounds: int, budget: int) -> int:
    """Return the number of rounds of each candidate; 0 if the budget allows too few."""
    count, first = len(baseline.candidates), baseline.candidates[0]
    if count == 1:
        return rounds
    bytes_per_round = _bytes(
        cost(fedavg(baseline.problem, 1.0), federation, first, baseline.y0).total
    )
    affordable = budget / (bytes_per_round * count)
    rounds_each = int(affordable - _PROBING * most_probes(1))
    if most_probes(rounds_each) > most_probes(1):
        rounds_each = int(affordable / (1 + _PROBING / 10))  # a tenth of the rounds search
    rounds_each = min(rounds, rounds_each)
    return rounds_each if rounds_each >= min(rounds, _FEWEST) else 0


def _best(values: Sequence[float], goal: Goal) -> int:
    """Return the index of the best value; NaN is the worst.

    Example:
        >>> _best([float("nan"), 2.0, 1.0], "min"), _best([float("nan"), 2.0, 1.0], "max")
        (2, 1)
    """
    sign = -1.0 if goal == "max" else 1.0
    return min(range(len(values)), key=lambda i: (math.isnan(values[i]), sign * values[i]))


def _bytes(traffic: Traffic) -> int:
    return traffic.bytes_down + traffic.bytes_up


def table(outcomes: Sequence[Outcome], method: str, last: Json, metric: str) -> str:
    """Return the results of a run and of the baselines as a plain-text table.

    Args:
        outcomes: of the baselines.
        method: the name to show for the run.
        last: the last record of the run.
        metric: the metric to show.
    """
    sent = last["bytes_down"] + last["bytes_up"]
    rows = [(method, last[metric], last["communication_rounds"], sent)]
    finished = [outcome for outcome in outcomes if outcome.metrics]
    rows += [
        (outcome.name, outcome.metrics[metric], outcome.rounds, outcome.sent)
        for outcome in finished
    ]
    width = max(len(name) for name, *_ in rows)
    title = metric.replace("_", " ")
    lines = [f"{'':{width}}  {title:>{max(9, len(title))}}  {'exchanges':>9}  {'sent':>9}"]
    for name, value, rounds, encoded_bytes in rows:
        number = f"{value:.4f}".rjust(max(9, len(title)))
        lines.append(f"{name:{width}}  {number}  {rounds:>9,}  {size(encoded_bytes):>9}")
    skipped = [outcome.name for outcome in outcomes if not outcome.metrics]
    lines += [
        f"Skipped {name}: the byte budget allows fewer than {_FEWEST} exchanges per candidate."
        for name in skipped
    ]
    return "\n".join(lines)


def save(outcomes: Sequence[Outcome], directory: Path) -> None:
    """Write the outcomes to a run's folder."""
    text = json.dumps([outcome._asdict() for outcome in outcomes], indent=1)
    write_atomic(directory / FILE, text + "\n")


def load(directory: Path) -> list[Outcome]:
    """Read the outcomes from a run's folder; an empty list if there are none."""
    file = directory / FILE
    return [Outcome(**fields) for fields in json.loads(file.read_text())] if file.is_file() else []
