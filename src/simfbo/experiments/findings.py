"""What a figure shows, in one sentence whose numbers are those of the runs."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from simfbo.experiments.results import Groups
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.runs.report import sentence, size
from simfbo.studies.tables import COSTS, firsts, lost

METRIC = "test_accuracy"
# How a cost is written, and its unit, which the first of several has.
_AMOUNTS: dict[str, tuple[Callable[[float], str], str]] = {
    "rounds": (lambda value: f"{value:,.0f}", " exchanges"),
    "MB": (lambda value: size(int(1e6 * value)), ""),
    "s": (lambda value: f"{value:.1f}", " s"),
    "CPU s": (lambda value: f"{value:.1f}", " processor seconds"),
}


def finding(groups: Groups, tree: Json) -> str:
    """Return what was found, as `finding` in an experiment's configuration asks for it.

    `names` says what methods are called in the sentence, and which runs that means: where there are
    several, the range. With `reaches`, an accuracy, the sentence says what it cost them (`cost`) to
    get there, otherwise where they ended. `where` comes first. Methods that were not run, or whose
    runs were lost, are left out.
    """
    asked: Json = tree.get("finding", {})
    there = {key: runs for key, runs in groups.items() if not lost(runs)}
    names: dict[str, list[str]] = asked.get("names", {})
    named = {name: [there[key] for key in keys if key in there] for name, keys in names.items()}
    named = {name: runs for name, runs in named.items() if runs}
    if not named:
        return ""
    told = reached(named, asked["reaches"], asked["cost"]) if "reaches" in asked else ended(named)
    return sentence(f"{asked.get('where', '')} {told}".strip())


def ended(named: Mapping[str, Sequence[Sequence[History]]]) -> str:
    """Return where methods ended, the best first: "A ends at 62.2 to 64.9 %, B at 40.0 %"."""
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
    """Return what it took to reach an accuracy, the cheapest first, and who did not get there."""
    found = {name: firsts(runs[0], METRIC, target) for name, runs in named.items()}
    spent = {
        name: mean(COSTS[cost](record) for record in records if record)
        for name, records in found.items()
        if None not in records
    }
    order = sorted(spent, key=lambda name: spent[name])
    short = [name for name in found if name not in spent]
    if not order:
        return f"none of {', '.join(short)} reaches {100 * target:g} % in all seeds"
    write, unit = _AMOUNTS[cost]
    first = f"{order[0]} reaches {100 * target:g} % after {write(spent[order[0]])}{unit}"
    others = [f"{name} after {write(spent[name])}" for name in order[1:]]
    return ", ".join([first, *others, *(f"{name} in {_count(found[name])}" for name in short)])


def _count(records: Sequence[Json | None]) -> str:
    there = sum(record is not None for record in records)
    return f"{there or 'none'} of {len(records)} seeds"
