"""The tables of attacks.md, from results/attacks.json and results/honest.json."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

FOLDER = Path(__file__).parent
POINTS = 5.0


def attacks() -> str:
    """Return a table per partition: accuracy, and what the runs said."""
    found = json.loads((FOLDER / "results/attacks.json").read_text())
    return "\n\n".join(f"{kind}:\n\n{_accuracies(rules)}" for kind, rules in found.items())


def _accuracies(rules: dict[str, Any]) -> str:
    names = list(rules["mean"])
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for rule, outcomes in rules.items():
        cells = [_cell(outcomes[name], outcomes["none"]) for name in names]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(runs: list[dict[str, Any]], honest: list[dict[str, Any]]) -> str:
    """Return the mean accuracy; bold if a run lost more than 5 points, and how many said so."""
    said = sum(map(said_so, runs))
    text = f"{100 * mean(run['accuracy'] for run in runs):.1f}"
    lost = any(loss(a, b) > POINTS for a, b in zip(runs, honest, strict=True))
    return f"{f'**{text}**' if lost else text} ({said}/{len(runs)})"


def loss(run: dict[str, Any], honest: dict[str, Any]) -> float:
    """Return the points that a run lost against the same set-up without attackers."""
    return 100 * (honest["accuracy"] - run["accuracy"])


def said_so(run: dict[str, Any]) -> bool:
    """Return whether a run warned."""
    return bool(run["warnings"])


def counts() -> dict[str, int]:
    """Return in how many runs accuracy was lost, and how many of these said nothing."""
    found = json.loads((FOLDER / "results/attacks.json").read_text())
    pairs = [
        (run, honest, attack)
        for rules in found.values()
        for outcomes in rules.values()
        for attack, runs in outcomes.items()
        for run, honest in zip(runs, outcomes["none"], strict=True)
    ]
    lost = [run for run, honest, _ in pairs if loss(run, honest) > POINTS]
    return {
        "runs": len(pairs),
        "lost": len(lost),
        "lost, did not warn": sum(not said_so(run) for run in lost),
        "lost, finished and did not warn": sum(
            not said_so(run) and run["end"] == "finished" for run in lost
        ),
        "nobody hostile": sum(attack == "none" for *_, attack in pairs),
        "nobody hostile, warned": sum(said_so(run) for run, _, a in pairs if a == "none"),
    }


def honest() -> str:
    """Return the runs without attackers: result with and without the automatic limit."""
    found = json.loads((FOLDER / "results/honest.json").read_text())
    lines = ["| case | metric | no limit | auto limit | refused | warnings |", "|---" * 6 + "|"]
    for name, ways in found.items():
        off, auto = (mean(run["value"] for run in ways[way]) for way in ("off", "auto"))
        refused = mean(run["refused"] for run in ways["auto"])
        warned = ", ".join(str(sum(map(said_so, ways[way]))) for way in ("off", "auto"))
        metric = ways["off"][0]["metric"].replace("_", " ")
        lines.append(
            f"| {name} | {metric} | {off:.4g} | {auto:.4g} | {refused:.2%} | "
            f"{warned} of {len(ways['off'])} |"
        )
    return "\n".join(lines)


def costs() -> str:
    """Return what watching costs."""
    found = json.loads((FOLDER / "results/watch-cost.json").read_text())
    ways = list(next(iter(found.values()))["milliseconds"])
    lines = [f"| processor ms per round | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for name, case in found.items():
        cells = [f"{case['milliseconds'][way]:.2f} ({case['ratio'][way]:.2f}x)" for way in ways]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(attacks(), json.dumps(counts()), honest(), costs(), sep="\n\n")
