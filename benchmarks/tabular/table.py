"""The tables of README.md, from results.jsonl: `python benchmarks/tabular/table.py`."""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
LINEAR = ("ours", "0.003 for all", "FedAvg, shared penalty", "pooled", "lasso, pooled", "alone")
NETWORKS = ("our network", "pooled network")


def results():
    """Return the losses and processor seconds, [2, seeds], by table and method."""
    found = defaultdict(lambda: defaultdict(list))
    lines = map(json.loads, (HERE / "results.jsonl").read_text().splitlines())
    for line in sorted(lines, key=lambda line: line["seed"]):
        found[line["table"]][line["method"]].append((line["loss"], line["seconds"]))
    return {
        table: {method: np.array(pairs).T for method, pairs in methods.items()}
        for table, methods in found.items()
    }


def gap(methods, ours, other):
    """Return by how many per cent our mean loss is above another, and the standard error."""
    seeds = min(len(methods[one][0]) for one in (ours, other))
    mine, theirs = (methods[one][0][:seeds] for one in (ours, other))
    scale = 100 / theirs.mean()
    return (mine - theirs).mean() * scale, (mine - theirs).std(ddof=1) / len(mine) ** 0.5 * scale


def ranks(every):
    """Return the mean rank by loss of each linear method."""
    order = [[methods[name][0].mean() for name in LINEAR] for methods in every]
    return (np.argsort(np.argsort(order, 1), 1) + 1).mean(0)


def linear():
    """Return the table of mean losses of linear models in Markdown."""
    found = results()
    rows = [
        [name, str(len(methods["ours"][0])), *(f"{methods[one][0].mean():.4f}" for one in LINEAR)]
        for name, methods in found.items()
    ]
    rows.append(["mean rank", "", *(f"{one:.1f}" for one in ranks(found.values()))])
    return markdown(["table", "seeds", *LINEAR], rows)


def gaps():
    """Return the table of our gaps to the other linear models in Markdown, and the largest."""
    others, rows, values = LINEAR[1:5], [], []
    for name, methods in results().items():
        pairs = [gap(methods, "ours", other) for other in others]
        pairs.append(gap(methods, "0.003 for all", "pooled"))
        values.append([value for value, _ in pairs])
        rows.append([name, *(f"{value:+.1f} ± {error:.1f}" for value, error in pairs)])
    for name, of in (("smallest", np.min), ("largest", np.max)):
        rows.append([name, *(f"{one:+.1f}" for one in of(values, 0))])
    heads = [f"ours to {other}, %" for other in others]
    return markdown(["table", *heads, "0.003 for all to pooled, %"], rows)


def networks():
    """Return the table of networks in Markdown."""
    head = ["table", *NETWORKS, "ours, linear", "our network to pooled, %", "to ours, linear, %"]
    rows = []
    for name, methods in results().items():
        if NETWORKS[0] in methods:
            pair = [gap(methods, NETWORKS[0], other) for other in (NETWORKS[1], "ours")]
            seeds = len(methods[NETWORKS[0]][0])
            losses = (methods[one][0][:seeds].mean() for one in (*NETWORKS, "ours"))
            rows.append([
                name, *(f"{loss:.4f}" for loss in losses),
                *(f"{value:+.1f} ± {error:.1f}" for value, error in pair),
            ])  # fmt: skip
    return markdown(head, rows)


def seconds():
    """Return the table of processor seconds in Markdown."""
    head = ["", *LINEAR, *NETWORKS]
    found = results().values()
    each = [[m[name][1] for m in found if name in m] for name in head[1:]]
    first = [f"{np.median([one[0] for one in of]):.2f}" for of in each]
    later = [f"{np.median(np.concatenate([one[1:] for one in of])):.2f}" for of in each]
    return markdown(head, [["first fit", *first], ["later fits", *later]])


def markdown(head, rows):
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill():
    """Put the tables into README.md, each after its mark."""
    page = HERE / "README.md"
    text = page.read_text()
    for make in (linear, gaps, networks, seconds):
        mark = rf"(?<=<!-- {make.__name__} -->\n)(?:\|.*\n)*"
        text = re.sub(mark, make() + "\n", text)
    page.write_text(text)


if __name__ == "__main__":
    fill()
