"""The tables of README.md, from results.jsonl: `python benchmarks/practice/tables.py`."""

import json
import re
import statistics
from pathlib import Path

HERE = Path(__file__).parent
# What each task is judged by, and what else is worth a column.
METRICS = {
    "label-cleaning": ("test_accuracy", "trust_auc"),
    "long-tail": ("balanced_accuracy", "worst_class_accuracy"),
    "regularisation": ("test_loss", "irrelevant_shut", "relevant_shut"),
    "fair": ("worst_group_loss", "mean_loss"),
    "hyper-representation": ("unseen_accuracy", "unseen_shared_accuracy"),
}


def results():
    """Return the lines by case and way, in the order of measuring."""
    found = {}
    for text in (HERE / "results.jsonl").read_text().splitlines():
        line = json.loads(text)
        found.setdefault(line["case"], {}).setdefault(line["way"], []).append(line)
    return found


def spread(values):
    """Return mean and standard deviation, as text."""
    digits = 4 if 0 < max(values) < 0.1 else 3
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def mean(seeds, name, unit):
    """Return a mean in some unit, as text; empty where rows are pooled and nothing is counted."""
    if name not in seeds[0]:
        return ""
    return f"{statistics.mean(seed[name] for seed in seeds) / unit:,.0f}"


def table(case):
    """Return one case as a table in Markdown."""
    ways = dict(sorted(results()[case].items(), key=lambda way: way[0] != "automatic steps"))
    known = next(iter(ways.values()))[0]
    metrics = [metric for metric in METRICS[case.split(",")[0]] if metric in known]
    head = ["", *(metric.replace("_", " ") for metric in metrics), "exchanges", "MB sent"]
    lines = [head, ["---"] * len(head)]
    for way, seeds in ways.items():
        numbers = [
            spread([seed[metric] for seed in seeds]) if metric in seeds[0] else ""
            for metric in metrics
        ]
        cost = [mean(seeds, "communication_rounds", 1), mean(seeds, "sent", 1e6)]
        lines.append([way, *numbers, *cost])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text):
    """Return a text with every table put after its marker."""
    for case in results():
        name = re.escape(case)
        text = re.sub(
            rf"(<!-- {name} -->\n)(?:\|.*\n)*", lambda m, case=case: m[1] + table(case) + "\n", text
        )
    return text


if __name__ == "__main__":
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
