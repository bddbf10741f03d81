"""The finding of a figure, in one sentence with the numbers of the runs."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from simfbo.experiments.results import Groups
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.runs.report import sentence, size
from simfbo.studies.tables import COSTS, firsts, lost

METRIC = "test_accuracy"
# The format of a cost, and its unit, which is written after the first number.
_AMOUNTS: dict[str, tuple[Callable[[float], str], str]] = {
    "rounds": (lambda value: f"{value:,.0f}", " exchanges"),
    "MB": (lambda value: size(int(1e6 * value)), ""),
    "s": (lambda value: f"{value:.1f}", " s"),
    "CPU s": (lambda value: f"{value:.1f}", " processor seconds"),
}


def finding(groups: Groups, tree: Json) -> str:
    """Write the sentence configured by `finding` in an experiment's configuration.

    `names` maps names in the sentence to methods; for several methods the sentence gives the range.
    With `reaches`, an accuracy, it states the costs (`cost`) to reach it, otherwise the final
    values. `where` comes first. Methods that were not run, or whose runs were lost, are left out.
    """
    options: Json = tree.get("finding", {})
    available = {key: runs for key, runs in groups.items() if not lost(runs)}
    names: dict[str, list[str]] = options.get("names", {})
    named = {
        name: [available[key] for key in keys if key in available] for name, keys in names.items()
    }
    named = {name: runs for name, runs in named.items() if runs}
    if not named:
        return ""
    result = (
        reached(named, options["reaches"], options["cost"])
        if "reaches" in options
        else ended(named)
    )
    return sentence(f"{options.get('where', '')} {result}".strip())


def ended(named: Mapping[str, Sequence[Sequence[History]]]) -> str:
    """State the final values, the best first: "A ends at 62.2 to 64.9 %, B at 40.0 %"."""
    ends = {name: sorted(map(_end, runs)) for name, runs in named.items()}
    order = sorted(ends, key=lambda name: -ends[name][-1])
    parts = [f"{name} {'ends ' * (name == order[0])}at {_range(ends[name])} %" for name in order]
    return ", ".join(parts)


def _end(histories: Sequence[History]) -> float:
    return 100 * mean(history.records[-1][METRIC] for history in histories)


def _range(ends: Sequence[float]) -> str:
    low, high = f"{ends[0]:.1f}", f"{ends[-1]:.1f}"
    return low if low == high else f"{low} to {high}"


def reached(named: Mapping[str, Sequence[Sequence[History]]], target: float, cost: str) -> str:
    """State the costs to reach an accuracy, the cheapest first, and the methods that did not."""
    records_of = {name: firsts(runs[0], METRIC, target) for name, runs in named.items()}
    spent = {
        name: mean(COSTS[cost](record) for record in records if record)
        for name, records in records_of.items()
        if None not in records
    }
    order = sorted(spent, key=lambda name: spent[name])
    not_reached = [name for name in records_of if name not in spent]
    if not order:
        return f"none of {', '.join(not_reached)} reaches {100 * target:g} % in all seeds"
    write, unit = _AMOUNTS[cost]
    first = f"{order[0]} reaches {100 * target:g} % after {write(spent[order[0]])}{unit}"
    others = [f"{name} after {write(spent[name])}" for name in order[1:]]
    return ", ".join(
        [first, *others, *(f"{name} in {_count(records_of[name])}" for name in not_reached)]
    )


def _count(records: Sequence[Json | None]) -> str:
    count = sum(record is not None for record in records)
    return f"{count or 'none'} of {len(records)} seeds"
