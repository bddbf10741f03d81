"""The results of this benchmark in Markdown."""

from typing import Any

COLUMNS = ("torch-loop", "torch-compile", "numpy", "numpy-gram", "soba-jax")
KINDS = {"cpu": "processor time", "wall": "wall time"}


def table(results: dict[str, Any]) -> str:
    """Return one table per number of threads, then the rows of implementations seen once."""
    parts = [
        part
        for key, cases in results.items()
        if key.startswith("threads_")
        for part in (_common(key, cases, "cpu"), _common(key, cases, "wall"), _others(key, cases))
    ]
    return "\n\n".join(part for part in parts if part)


def _common(key: str, cases: dict[str, Any], kind: str) -> str:
    """Return simfbo's time of a kind, and how many times as much the common peers take."""
    lines = [
        f"{_threads(key)}, {KINDS[kind]} per round, and the others' as a multiple:",
        "",
        f"| case | simfbo, ms | {' | '.join(COLUMNS)} |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    for name, case in cases.items():
        found = case["implementations"]
        ours = found["simfbo"][f"{kind}_ms"]
        cells = [_ratio(found, column, f"{kind}_ms") for column in COLUMNS]
        if any(column in found for column in COLUMNS):
            lines.append(f"| {name} | {ours:.3g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _others(key: str, cases: dict[str, Any]) -> str:
    """Return the implementations that only some cases have; nothing if there are none."""
    rows = []
    for name, case in cases.items():
        found = case["implementations"]
        rest = [other for other in found if other not in COLUMNS]
        rows += [_row(name, other, found) for other in rest if len(rest) > 1]
    lines = [
        f"{_threads(key)}, the implementations of single cases:",
        "",
        "| case | implementation | CPU, ms | wall, ms | CPU / simfbo | wall / simfbo |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) if rows else ""


def _row(case: str, name: str, found: dict[str, Any]) -> str:
    times, ours = found[name], found["simfbo"]
    ratios = [f"{times[kind] / ours[kind]:.2f}x" for kind in ("cpu_ms", "wall_ms")]
    shown = [f"{times[kind]:.4g}" for kind in ("cpu_ms", "wall_ms")]
    return f"| {case} | {name} | {' | '.join(shown + ratios)} |"


def _ratio(found: dict[str, Any], name: str, kind: str) -> str:
    """Return a ratio, with an asterisk if there is a note on the implementation."""
    if name not in found:
        return ""
    star = "*" if found[name].get("notes") else ""
    return f"{found[name][kind] / found['simfbo'][kind]:.3g}x{star}"


def _threads(key: str) -> str:
    count = key.removeprefix("threads_")
    return "One thread" if count == "1" else f"{count} threads"
