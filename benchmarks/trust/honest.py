"""Runs in which nobody is hostile: how often they warn, and what an automatic gate limit costs.

    python benchmarks/trust/honest.py [--seeds 3,4,5] [--only NAME]

Writes results/honest.json; what is there is not run again.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from simfbo.config.build import build, run_built
from simfbo.config.build_task import build_task
from simfbo.config.run import checked
from simfbo.errors import ClientWarning
from simfbo.runs.files import keep_compilations

FILE = Path(__file__).parent / "results/honest.json"
ROUNDS = 300
UNEQUAL = {"low": 1, "high": 10}


def cases() -> dict[str, dict[str, Any]]:
    """Return the settings of all cases, by name."""
    return {**quadratics(), **digits(), **methods(), **practice()}


def quadratics() -> dict[str, dict[str, Any]]:
    """Return quadratics: clients alike and different, few and many, with unequal work."""
    found: dict[str, dict[str, Any]] = {
        f"quadratic, heterogeneity {h:g}": {"task": {"name": "quadratic", "heterogeneity": h}}
        for h in (0.0, 0.3, 1.0, 3.0, 10.0)
    }
    for n in (1, 2, 3, 6, 40):
        task = {"name": "quadratic", "clients": n}
        found[f"quadratic, {n} clients"] = {"task": task, "sampling": {"kind": "everyone"}}
    wide = {"name": "quadratic", "dim_x": 100, "dim_y": 100}
    found["quadratic, 100 numbers each"] = {"task": wide}
    for name in ("simfbo", "shrofbo"):
        found[f"quadratic, 1 to 10 steps, {name}"] = {
            "task": {"name": "quadratic"}, "local_work": UNEQUAL, "algorithm": {"name": name},
        }  # fmt: skip
    return found


def digits() -> dict[str, dict[str, Any]]:
    """Return hyper-representation on digits by partition, clients, work and sampling."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ("iid", "shards", "dirichlet"):
        task = {"name": "hyper-representation", "clients": 10, "partition": kind}
        found[f"digits, {kind}"] = {"task": task}
        found[f"digits, {kind}, 6 clients"] = {"task": {**task, "clients": 6}}
        found[f"digits, {kind}, 10 of 40"] = {
            "task": {**task, "clients": 40}, "sampling": {"kind": "without-replacement"},
        }  # fmt: skip
        for name in ("simfbo", "shrofbo"):
            found[f"digits, {kind}, 1 to 10 steps, {name}"] = {
                "task": task, "local_work": UNEQUAL, "algorithm": {"name": name},
            }  # fmt: skip
    task = {"name": "hyper-representation", "clients": 10, "partition": "shards"}
    for rule in ("median", "trimmed-mean", "clipped-mean"):
        rules = {"x": rule, "y": rule, "v": rule}
        found[f"digits, shards, {rule}"] = {"task": task, "aggregation": rules}
    return found


def methods() -> dict[str, dict[str, Any]]:
    """Return all other methods on label shards."""
    task = {"name": "hyper-representation", "clients": 10, "partition": "shards"}
    names = ("shrofbo", "fednest", "lfednest", "fedmbo", "aggitd", "memfbo", "fedbio")
    return {
        f"digits, shards, {name}": {"task": task, "algorithm": {"name": name}, "rounds": 100}
        for name in names
    }


def practice() -> dict[str, dict[str, Any]]:
    """Return the practical tasks."""
    cleaning = {"name": "label-cleaning"}
    hidden = {"name": "hyper-representation", "unseen": 5}
    tasks: dict[str, dict[str, Any]] = {
        "label-cleaning": cleaning,
        "label-cleaning, trust per client": {**cleaning, "trust": "clients"},
        "label-cleaning, 60 clean of optdigits": {**cleaning, "dataset": "optdigits", "clean": 60},
        "long-tail, digits": {"name": "long-tail", "imbalance": 20.0},
        "long-tail, optdigits": {"name": "long-tail", "dataset": "optdigits"},
        "fair, digits": {"name": "fair"},
        "fair, mortgages": {"name": "fair", "dataset": "mortgages"},
        "hyper-representation, unseen": {**hidden, "partition": "dirichlet"},
        "hyper-representation, unseen, shards": {**hidden, "partition": "shards"},
        "regularisation, synthetic": {"name": "regularisation"},
    }
    for name in ("schools", "exam", "districts"):
        tasks[f"regularisation, {name}"] = {"name": "regularisation", "dataset": name}
    return {name: {"task": task} for name, task in tasks.items()}


def measure(settings: dict[str, Any], seed: int, limit: str) -> dict[str, Any]:
    """Return what a run came to."""
    asked = {"gate": {"max_norm": limit}, "seed": seed, "detect_anomalies": True}
    config = checked({"rounds": ROUNDS, **settings, **asked}, {})
    built = build(config, build_task(config, None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClientWarning)
        history = run_built(built, None)
    last = history.records[-1]
    asked = last["communication_rounds"] * config.cohort_size(built.federation.n)
    return {
        "seed": seed,
        "metric": built.task.metric,
        "value": last[built.task.metric],
        "end": (history.end or {})["status"],
        "refused": last["refused"] / max(1, asked),
        "warnings": [
            {key: line[key] for key in ("round", "about", "clients", "share")}
            for line in history.warnings
        ],
    }


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="3,4,5")
    parser.add_argument("--only", default="")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    keep_compilations()
    text = options.output.read_text() if options.output.exists() else "{}"
    found: dict[str, Any] = json.loads(text)
    for name, settings in cases().items():
        if options.only in name and name not in found:
            ways = {"off": "none", "auto": "auto"}
            found[name] = {
                way: [measure(settings, int(seed), limit) for seed in options.seeds.split(",")]
                for way, limit in ways.items()
            }
            print(name, summary(found[name]), file=sys.stderr, flush=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n")


def summary(case: dict[str, Any]) -> str:
    """Return a case in one line."""
    mean = {way: sum(run["value"] for run in runs) / len(runs) for way, runs in case.items()}
    alarms = [[line["about"] for line in run["warnings"]] for runs in case.values() for run in runs]
    refused = sum(run["refused"] for run in case["auto"]) / len(case["auto"])
    values = ", ".join(f"{way} {value:.4g}" for way, value in mean.items())
    return f"{case['off'][0]['metric']}: {values}; refused {refused:.2%}; warnings {alarms}"


if __name__ == "__main__":
    main()
