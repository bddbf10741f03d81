"""table.md, from the lines of results.jsonl."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Line = dict[str, Any]
PUBLISHED = {"median": "81.4 (BR-FedBiP)", "geometric-median": "72.8 (BR-FedBiM, RFA)"}
WAYS = {False: "Without momenta", True: "With client momenta"}


def write(lines: list[Line], file: Path, defences: list[str], attacks: list[str]) -> None:
    """Write all tables there are results for.

    Args:
        lines: of the results, all with the same number of rounds.
        file: where to.
        defences: rows, in order.
        attacks: columns, in order; the first is none.
    """
    if not lines:
        print("No results for these seeds and rounds yet.")
        return
    seeds = sorted({line["seed"] for line in lines})
    parts = [
        f"Test accuracy in per cent after {lines[0]['rounds']} rounds: mean ± deviation of "
        f"seeds\n{', '.join(map(str, seeds))}. A cell with fewer seeds says how many. Worst: the "
        "lowest mean over the attacks."
    ]
    for momenta, title in WAYS.items():
        own = _by_way(lines, momenta)
        if own:
            parts += [f"{title}:", _accuracies(own, defences, attacks, len(seeds))]
    parts += ["Under the worst attack, beside published figures:", _worst(lines, defences, attacks)]
    file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _by_way(lines: Iterable[Line], momenta: bool) -> list[Line]:
    return [line for line in lines if (line["theta"] != 1) == momenta]


def _percent(lines: Iterable[Line], defence: str, attack: str) -> list[float]:
    """Return the accuracies of all seeds."""
    wanted = defence, attack
    return [100 * line["accuracy"] for line in lines if (line["defence"], line["attack"]) == wanted]


def _cell(values: list[float], seeds: int) -> str:
    if not values:
        return ""
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}" + (f" ({len(values)})" if len(values) < seeds else "")


def worst(lines: list[Line], defence: str, attacks: Sequence[str]) -> tuple[float, str] | None:
    """Return the lowest mean over attacks, and the attack; None unless all attacks were run."""
    found = {attack: _percent(lines, defence, attack) for attack in attacks}
    if not all(found.values()):
        return None
    return min((mean(values), attack) for attack, values in found.items())


def _text(found: tuple[float, str] | None) -> str:
    return "not yet measured" if found is None else f"{found[0]:.1f} ({found[1]})"


def _accuracies(lines: list[Line], defences: list[str], attacks: list[str], seeds: int) -> str:
    """Return accuracies by aggregator and attack."""
    head = ["aggregator", *attacks, "worst"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in defences:
        cells = [_cell(_percent(lines, name, attack), seeds) for attack in attacks]
        if any(cells):
            lowest = worst(lines, name, attacks[1:])
            cells.append("" if lowest is None else f"{lowest[0]:.1f}")
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _worst(lines: list[Line], defences: list[str], attacks: list[str]) -> str:
    """Return the worst attack by aggregator, with and without momenta."""
    rows = ["| aggregator | without momenta | with momenta | published |", "|---" * 4 + "|"]
    for name in defences:
        cells = [_text(worst(_by_way(lines, way), name, attacks[1:])) for way in WAYS]
        if _percent(lines, name, attacks[1]) or name in PUBLISHED:
            rows.append(f"| {name} | {' | '.join(cells)} | {PUBLISHED.get(name, '')} |")
    return "\n".join(rows)
