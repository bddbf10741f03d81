"""The tables of results.jsonl: accuracy by method, and trust by desk."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from desks import KINDS
from opinions import SOURCES

METHODS = {
    "simfbo": "SimFBO, trust learnt",
    "all": "FedAvg, all labels as they are",
    "trusted": "FedAvg, trusted texts only",
    "agreement": "FedAvg, trust by agreement with that model",
    "oracle": "FedAvg, all labels right (oracle)",
}
MODELS = {"adapters": "adapters and head", "head": "head only"}


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the lines of results.jsonl; none if there is no such file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def accuracies(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of accuracies: mean and standard deviation over seeds."""
    lines = [f"| method | {' | '.join(f'{name}, %' for name in MODELS.values())} |",
             "|---" * (1 + len(MODELS)) + "|"]  # fmt: skip
    for method, label in METHODS.items():
        cells = [_spread(found, method, model) for model in MODELS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def trusts(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of trust against wrong labels, of adapters; means over seeds."""
    own = [row for row in found if (row["method"], row["model"]) == ("simfbo", "adapters")]
    lines = [f"| desks | {' | '.join(f'{one}: wrong, % | trust' for one in SOURCES)} |",
             "|---" * (1 + 2 * len(SOURCES)) + "|"]  # fmt: skip
    for i, kind in enumerate(KINDS):
        desks = [i + len(KINDS) * j for j in range(len(SOURCES))]
        cells = [cell for desk in desks for cell in _cells(own, desk)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(own: Sequence[dict[str, Any]], desk: int) -> tuple[str, str]:
    """Return a desk's share of wrong labels and its trust."""
    if not own:
        return "", ""
    wrong, trust = (mean(row[key][desk] for row in own) for key in ("wrong", "trust"))
    return f"{100 * wrong:.0f}", f"{trust:.2f}"


def _spread(found: Sequence[dict[str, Any]], method: str, model: str) -> str:
    """Return the accuracy of a method with a model over seeds."""
    own = [row for row in found if (row["method"], row["model"]) == (method, model)]
    values = [100 * row["accuracy"] for row in own]
    if len(values) < 2:
        return "".join(f"{one:.1f}" for one in values)
    return f"{mean(values):.1f} ± {stdev(values):.1f}"


def write(file: Path) -> str:
    """Write table.md next to results.jsonl, and return it."""
    text = f"{accuracies(rows(file))}\n{trusts(rows(file))}"
    file.with_name("table.md").write_text(text, encoding="utf-8")
    return text
