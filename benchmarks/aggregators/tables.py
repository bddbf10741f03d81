"""The tables of README.md, from the results."""

from statistics import mean, stdev
from typing import Any


def spread(values: list[float], digits: int = 2) -> str:
    """Return mean and standard deviation."""
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def table(title: str, first: str, columns: Any, rows: dict[str, list[str]]) -> None:
    """Print a table."""
    print(f"\n{title}\n\n| {first} | " + " | ".join(map(str, columns)) + " |")
    print("|---|" + "---|" * len(list(columns)))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |")


def of_lists(title: str, first: str, part: dict[str, dict[str, list[float]]]) -> None:
    """Print a table of lists by row and column."""
    rows = {name: [spread(values) for values in row.values()] for name, row in part.items()}
    table(title, first, next(iter(part.values())), rows)


def percent(seeds: list[dict[str, Any]], rule: str, share: str | None = None) -> list[float]:
    """Return the test accuracies of all seeds, in per cent."""
    found = [seed[rule] if share is None else seed[rule][share] for seed in seeds]
    return [100 * one["accuracy"] for one in found]


def show_bias(part: dict[str, Any]) -> None:
    """Print the distances from the solution."""
    sizes = {"length of x*": part["size"]}
    of_lists("Distance from x*, by heterogeneity", "aggregator", {**part["normal"], **sizes})
    of_lists("The same, skewed clients", "aggregator", part["skewed"])
    of_lists("One channel at a time, heterogeneity 1", "aggregator", part["one channel"])
    of_lists("Median of many clients, heterogeneity 1", "clients", part["median of many"])


def show_centres(part: dict[str, Any]) -> None:
    """Print the distances with the aggregators that move a centre."""
    of_lists("Distance from x*, by heterogeneity, centres", "aggregator", part["normal"])
    of_lists("The same, skewed clients", "aggregator", part["skewed"])
    times = part["combining"]
    rows = {
        name: [f"{by[name]:.1f}" for by in times.values()] for name in next(iter(times.values()))
    }
    table("Combining alone, ms", "aggregator", [f"P = {p}" for p in times], rows)


def show_attacks(part: dict[str, Any]) -> None:
    """Print the accuracies."""
    for kind, seeds in part["everyone"].items():
        shares = list(seeds[0]["mean"])
        rows = {
            rule: [spread(percent(seeds, rule, share), 1) for share in shares] for rule in seeds[0]
        }
        table(f"Accuracy, {kind}, by share of hostile clients", "aggregator", shares, rows)
    of_kinds("Ten of twenty asked, four of twenty hostile", part["half"])
    of_kinds("Six of twenty hostile at an honest volume", part["quiet"])


def of_kinds(title: str, kinds: dict[str, list[dict[str, Any]]]) -> None:
    """Print accuracies by aggregator and partition."""
    rows = {
        rule: [spread(percent(seeds, rule), 1) for seeds in kinds.values()]
        for rule in next(iter(kinds.values()))[0]
    }
    table(title, "aggregator", kinds, rows)


def show_cost(part: dict[str, Any]) -> None:
    """Print times and peaks."""
    rows: dict[str, list[str]] = {}
    for found in part.values():
        for rule, ms in found["ms"].items():
            ratio = ms / found["ms"]["mean"]
            cells = [f"{ms:.0f}", f"{ratio:.1f}x", str(found["peak_mb"][rule])]
            rows.setdefault(rule, []).extend(cells)
    columns = [f"P = {p}, {what}" for p in part for what in ("ms", "ratio", "peak MB")]
    table("A round of the MNIST perceptron", "aggregator", columns, rows)


def show(results: dict[str, Any]) -> None:
    """Print all tables there are results for."""
    parts = {"bias": show_bias, "centres": show_centres, "attacks": show_attacks, "cost": show_cost}
    for name, part in parts.items():
        if name in results:
            part(results[name])
