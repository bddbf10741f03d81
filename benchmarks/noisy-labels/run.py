"""Which mistakes in labels does learnt trust repair? Eight kinds of them, in three tables.

    python benchmarks/noisy-labels/run.py              # seeds 0 to 4; finished fits are kept
    python benchmarks/noisy-labels/run.py --table      # only the tables of README.md
    python benchmarks/noisy-labels/run.py --first 100 --seeds 2 --output FILE   # other seeds

A line of results.jsonl holds the accuracy and the log-loss on test rows, whose labels are right,
and the processor time of the fit.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np
from methods import fitted
from mistakes import KINDS, TABLES, labelled, load
from sklearn.metrics import log_loss
from tables import METHODS, Line, applies, lines_of, write
from threadpoolctl import threadpool_limits

RESULTS = Path(__file__).with_name("results.jsonl")


def result(name: str, kind: str, method: str, seed: int) -> Line:
    """Fit once, and return a line of results.jsonl."""
    table = load(name, seed)
    labels = labelled(kind, table, seed)
    begun = time.process_time()
    model = fitted(method, table, labels, seed)
    spent = time.process_time() - begun
    odds = model.predict_proba(table.test_inputs)
    right = np.mean(model.predict(table.test_inputs) == table.test_truth)
    return {
        "table": name, "kind": kind, "method": method, "seed": seed,
        "accuracy": round(float(right), 4), "loss": round(log_loss(table.test_truth, odds), 4),
        "wrong": round(float(np.mean(labels != table.truth)), 4), "seconds": round(spent, 2),
    }  # fmt: skip


def measure(seeds: Iterable[int], file: Path) -> None:
    """Fit what is not in the file yet, and add it."""
    keys = ("table", "kind", "method", "seed")
    done = {tuple(line[key] for key in keys) for line in lines_of(file)}
    for name, seed, kind, method in product(TABLES, seeds, KINDS, METHODS):
        if (name, kind, method, seed) in done or not applies(method, kind):
            continue
        line = json.dumps(result(name, kind, method, seed))
        print(line, flush=True)
        with file.open("a") as out:
            out.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="write the tables only")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.table:
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measure(range(options.first, options.first + options.seeds), options.output)
    if options.output == RESULTS:
        write(RESULTS)


if __name__ == "__main__":
    main()
