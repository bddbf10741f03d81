"""The results of this benchmark in Markdown."""

from typing import Any

from cases import GROUPS

KINDS = ("cpu_ms", "wall_ms")


def table(results: dict[str, Any]) -> str:
    """Return one table per group of cases, then the peak memory."""
    found = results.get("cases", {})
    groups = {title: _rows_of(cases, found) for title, cases in GROUPS.items()}
    parts = [_group(title, rows) for title, rows in groups.items() if rows]
    return "\n\n".join([*parts, *_memory(found)])


def _rows_of(cases: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the measured rows of a group; a case that starts processes has several."""
    return {row: one for row, one in found.items() if one["case"] in cases}


def _group(title: str, rows: dict[str, Any]) -> str:
    """Return now's times, and the others' as multiples of them."""
    others: dict[str, None] = {}
    for one in rows.values():
        others |= dict.fromkeys(name for name in one["implementations"] if name != "now")
    header = ["case", "time of", "now, CPU ms", "now, wall ms", *others]
    lines = [
        f"{title}; the others' processor / wall time as multiples of now's:",
        "",
        f"| {' | '.join(header)} |",
        "|---" * len(header) + "|",
        *(_row(name, one, list(others)) for name, one in rows.items()),
    ]
    return "\n".join(lines)


def _row(name: str, one: dict[str, Any], others: list[str]) -> str:
    found, unit = one["implementations"], one["unit"]
    now = found["now"]
    times = now["rounds"] if unit == "run" else 1
    label = f"{times:,} rounds" if unit == "run" else f"one {unit}"
    shown = [f"{times * now[kind]:.4g}" for kind in KINDS]
    ratios = [_ratios(found, other) for other in others]
    return f"| {' | '.join([name, label, *shown, *ratios])} |"


def _ratios(found: dict[str, Any], name: str) -> str:
    if name not in found:
        return ""
    return " / ".join(f"{found[name][kind] / found['now'][kind]:.3g}x" for kind in KINDS)


def _memory(found: dict[str, Any]) -> list[str]:
    """Return a line on the largest federation, if it was measured."""
    name = "ridge-100000"
    if name not in found:
        return []
    now = found[name]["implementations"]["now"]
    return [f"Peak memory of {name}: {now['peak_mb']} MB, {now['built_mb']} before any round."]
