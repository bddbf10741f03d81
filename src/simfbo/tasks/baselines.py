"""Baselines: what one would do without a bilevel method, on the same federation and budget.

Each trains the lower variable by FedAvg at a fixed x, with automatic steps. A search over several
values of x divides among them the bytes that the bilevel run sent; telling which was best is free.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simfbo.algorithms._auto_steps import Plan, automatic
from simfbo.algorithms._fedavg import fedavg
from simfbo.core.federation import Algorithm, Engine, Ledger
from simfbo.core.problem import Point
from simfbo.engines.counting import cost
from simfbo.runs.report import size
from simfbo.runs.runner import run
from simfbo.studies.comparison import higher_is_better
from simfbo.tasks.task import Baseline, Task

FILE = "baselines.json"
_FEWEST = 20  # rounds below which a candidate is not worth a try
_PROBING = 24  # rounds of FedAvg that cost what the search for its steps does


class Outcome(NamedTuple):
    """What came of a baseline.

    Attributes:
        name: of the baseline.
        metrics: of the best candidate; empty where the budget did not suffice to try them.
        chosen: its number.
        tried: how many there were.
        rounds: communication rounds, of all candidates together.
        sent: bytes, both ways, of all candidates together.
    """

    name: str
    metrics: dict[str, float]
    chosen: int
    tried: int
    rounds: int
    sent: int


def compare(
    task: Task,
    federate: Callable[[Any], Engine],
    *,
    rounds: int,
    budget: int,
    seed: int = 0,
    on_baseline: Callable[[str], None] | None = None,
) -> list[Outcome]:
    """Return what came of every baseline of a task.

    Args:
        task: whose baselines.
        federate: (data) -> a federation that holds it.
        rounds: iterations at most.
        budget: bytes, both ways, that a search may send; a single candidate gets all iterations.
        seed: of every random draw.
        on_baseline: called with the name of each before it begins.
    """
    outcomes = []
    for baseline in task.baselines:
        if on_baseline is not None:
            on_baseline(baseline.name)
        outcomes.append(_outcome(baseline, task.tuned_by, federate, rounds, budget, seed))
    return outcomes


def _outcome(
    baseline: Baseline,
    judge: str,
    federate: Callable[[Any], Engine],
    rounds: int,
    budget: int,
    seed: int,
) -> Outcome:
    """Return what came of one baseline."""
    federation, first = federate(baseline.data), baseline.candidates[0]
    each = _bytes(cost(fedavg(baseline.problem, 1.0), federation, first, baseline.y0).total)
    share = min(rounds, budget // (each * len(baseline.candidates)) - _PROBING)
    if len(baseline.candidates) == 1:
        share = rounds
    elif share < min(rounds, _FEWEST):
        return Outcome(baseline.name, {}, 0, 0, 0, 0)
    method, found, spent, sent = _fedavg(baseline, share), [], 0, 0
    for x in baseline.candidates:
        federation.ledger = Ledger()
        history = run(method, federation, x, baseline.y0, rounds=share, seed=seed)
        if (history.end or {}).get("status") == "interrupted":
            raise KeyboardInterrupt
        found.append(baseline.evaluate(Point(x=x, y=history.state.y)))
        total = federation.ledger.total
        spent, sent = spent + total.rounds, sent + _bytes(total)
    sign = -1.0 if higher_is_better(judge) else 1.0
    marks = [sign * metrics[judge] for metrics in found]
    best = min(range(len(found)), key=lambda i: (math.isnan(marks[i]), marks[i]))
    return Outcome(baseline.name, found[best], best, len(found), spent, sent)


def _fedavg(baseline: Baseline, rounds: int) -> Algorithm:
    """Return FedAvg with steps of its own finding."""

    def build(plan: Plan) -> Algorithm:
        return fedavg(baseline.problem, plan.local.y, plan.server.y)

    return automatic(build, baseline.problem, baseline.candidates[0], rounds)


def _bytes(traffic: Any) -> int:
    return traffic.bytes_down + traffic.bytes_up


def table(outcomes: Sequence[Outcome], method: str, last: Mapping[str, Any], metric: str) -> str:
    """Return a run's result beside those of its baselines, as plain text.

    Args:
        outcomes: of the baselines.
        method: what the run's algorithm is called.
        last: the last record of the run.
        metric: what to show.
    """
    sent = last["bytes_down"] + last["bytes_up"]
    rows = [(method, last[metric], last["communication_rounds"], sent)]
    run = [one for one in outcomes if one.metrics]
    rows += [(one.name, one.metrics[metric], one.rounds, one.sent) for one in run]
    width = max(len(name) for name, *_ in rows)
    title = metric.replace("_", " ")
    lines = [f"{'':{width}}  {title:>{max(9, len(title))}}  {'rounds':>7}  {'sent':>9}"]
    for name, value, rounds, octets in rows:
        number = f"{value:.4f}".rjust(max(9, len(title)))
        lines.append(f"{name:{width}}  {number}  {rounds:>7,}  {size(octets):>9}")
    left_out = [one.name for one in outcomes if not one.metrics]
    lines += [f"Left out, for as many bytes allow too few rounds: {name}." for name in left_out]
    return "\n".join(lines)


def save(outcomes: Sequence[Outcome], directory: Path) -> None:
    """Write the outcomes into a run's folder."""
    text = json.dumps([outcome._asdict() for outcome in outcomes], indent=1)
    (directory / FILE).write_text(text + "\n", encoding="utf-8")


def load(directory: Path) -> list[Outcome]:
    """Return the outcomes in a run's folder; none where there are none."""
    file = directory / FILE
    return [Outcome(**one) for one in json.loads(file.read_text())] if file.is_file() else []
