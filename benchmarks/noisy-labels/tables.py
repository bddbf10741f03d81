"""The tables of README.md, made from results.jsonl."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from mistakes import KINDS, TABLES

Line = dict[str, Any]
METHODS = {
    "network": "trust by a network",
    "network, folds": "trust by a network, 5 folds",
    "clients": "trust per client",
    "clients, folds": "trust per client, 5 folds",
    "periods": "trust per client and period",
    "periods, folds": "trust per client and period, 5 folds",
    "all": "pooled, all labels as they are",
    "trusted": "pooled, trusted rows only",
    "weighted": "pooled, trusted rows and all, weighted",
    "oracle": "pooled, all labels right (oracle)",
}
WITHOUT_MISTAKES = ("trusted", "oracle")  # the same whatever the mistakes
MEASURES = {"accuracy": (100, 1), "loss": (1, 2)}


def applies(method: str, kind: str) -> bool:
    """Return whether a method is run with a kind of mistakes: not twice, or with idle periods."""
    if method in WITHOUT_MISTAKES:
        return kind == "random"
    return kind == "drifted" or not method.startswith("periods")


def lines_of(file: Path) -> list[Line]:
    """Return the lines of results.jsonl; none if there is no such file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _cell(found: Sequence[Line], table: str, kind: str, method: str, measure: str) -> str:
    """Return mean and standard deviation over seeds; nothing where a method was not run."""
    kind = "random" if method in WITHOUT_MISTAKES else kind
    wanted, (unit, digits) = (table, kind, method), MEASURES[measure]
    own = [unit * line[measure] for line in found
           if (line["table"], line["kind"], line["method"]) == wanted]  # fmt: skip
    return f"{mean(own):.{digits}f} ± {stdev(own):.{digits}f}" if len(own) > 1 else ""


def board(found: Sequence[Line], table: str, measure: str) -> str:
    """Return methods against kinds of mistakes, for one table of rows."""
    lines = [f"| method | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    for method, label in METHODS.items():
        cells = [_cell(found, table, kind, method, measure) for kind in KINDS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shares(found: Sequence[Line]) -> str:
    """Return the share of labels that are wrong, trusted rows included."""
    lines = [f"| wrong, % | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    for table in TABLES:
        cells = []
        for kind in KINDS:
            own = [100 * line["wrong"] for line in found
                   if (line["table"], line["kind"]) == (table, kind)]  # fmt: skip
            cells.append(f"{mean(own):.0f}" if own else "")
        lines.append(f"| {table} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def seconds(found: Sequence[Line]) -> str:
    """Return the processor time of a fit: the median, and the largest, which compiles."""
    lines = ["| method | median, s | largest, s |", "|---|---|---|"]
    for method, label in METHODS.items():
        own = sorted(line["seconds"] for line in found if line["method"] == method)
        if own:
            lines.append(f"| {label} | {own[len(own) // 2]:.1f} | {own[-1]:.1f} |")
    return "\n".join(lines) + "\n"


def write(file: Path) -> None:
    """Write the tables into README.md, each after its mark."""
    found, page = lines_of(file), file.with_name("README.md")
    text = _replaced(page.read_text(encoding="utf-8"), "wrong", shares(found))
    text = _replaced(text, "seconds", seconds(found))
    for table in TABLES:
        for measure in MEASURES:
            text = _replaced(text, f"{table}, {measure}", board(found, table, measure))
    page.write_text(text, encoding="utf-8")


def _replaced(page: str, name: str, table: str) -> str:
    """Return a page with another table after a mark."""
    before, mark, after = page.partition(f"<!-- {name} -->\n")
    return before + mark + table + after[after.find("\n\n") + 1 :] if mark else page
