"""Compare the estimators' defaults with pooled models, FedAvg and models of single clients.

    python benchmarks/tabular/run.py

measures what results.jsonl does not hold yet, a line for each table, seed and method, and fills the
tables of README.md. Settings were chosen on seeds from 100 (`--seeds 100-107 --output FILE`), the
results are of seeds 0 to 4, those of linear models of small tables, which vary most, of seeds 0 to
19. It can be interrupted at any time.
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
from data import NUMBERS, TABLES, split
from methods import METHODS, NETWORKS
from sklearn.metrics import log_loss
from table import HERE, fill

SMALL = ("breast cancer", "wine", "diabetes", "houses")  # less than 600 rows
ALL = METHODS | NETWORKS


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=_seeds, help="such as 0-4")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--methods", nargs="+", default=list(ALL), choices=ALL)
    parser.add_argument("--output", type=Path, default=HERE / "results.jsonl")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    done = _done(options.output)
    cases = [
        (table, seed, method)
        for table in options.tables
        for method in options.methods
        for seed in options.seeds or range(20 if table in SMALL and method in METHODS else 5)
        if not (table in NUMBERS and method in NETWORKS)
    ]
    for number, case in enumerate(cases, 1):
        if case in done:
            continue
        line = measure(*case)
        with options.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{number}/{len(cases)} {line}", flush=True)
    if options.output == HERE / "results.jsonl":
        fill()


def measure(table: str, seed: int, method: str) -> dict:
    """Return the test loss of a method, and its processor time."""
    train, test = split(table, seed)
    start = time.process_time()
    found = ALL[method](train, test, seed)
    seconds = time.process_time() - start
    if table in NUMBERS:
        loss = np.mean((found - test.target) ** 2) / np.var(train.target)
    else:
        loss = log_loss(test.target, found, labels=np.unique(train.target))
    return {"table": table, "seed": seed, "method": method, "loss": round(float(loss), 6),
            "seconds": round(seconds, 3)}  # fmt: skip


def _done(file: Path) -> set[tuple[str, int, str]]:
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {(line["table"], line["seed"], line["method"]) for line in lines}


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    main()
