"""What the practical tasks come to: SimFBO with automatic steps, baselines, centrally, tuned.

    python benchmarks/practice/measure.py [--seeds 5] [--only NAME]

Appends a line per case and seed to results.jsonl beside this file; what is there is not run again.
`python benchmarks/practice/tables.py` puts the numbers into README.md.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from simfbo.config.build import build, build_federation, run_built
from simfbo.config.build_task import build_task
from simfbo.config.run import RunConfig, checked
from simfbo.core.data import federate
from simfbo.engines.compile_cache import keep_compilations
from simfbo.studies.tuning import tune
from simfbo.tasks import baselines

FILE = Path(__file__).parent / "results.jsonl"
DIGITS = {"name": "label-cleaning"}
# name -> settings of the task, what multiplies the bytes that a baseline may send
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "label-cleaning": (DIGITS, 1),
    "label-cleaning, trust per client": ({**DIGITS, "trust": "clients"}, 1),
    "label-cleaning, 60 clean of optdigits": (
        {**DIGITS, "dataset": "optdigits", "clean": 60},
        1,
    ),
    "label-cleaning, trust per client, 60 clean of optdigits": (
        {**DIGITS, "dataset": "optdigits", "clean": 60, "trust": "clients"},
        1,
    ),
    "label-cleaning, 5 % wrong, 20 clean": ({**DIGITS, "wrong": 0.05, "clean": 20}, 1),
    "long-tail, optdigits": ({"name": "long-tail", "dataset": "optdigits"}, 1),
    "long-tail, digits": ({"name": "long-tail", "imbalance": 20.0}, 1),
    "regularisation, synthetic": ({"name": "regularisation"}, 5.5),
    "regularisation, schools": ({"name": "regularisation", "dataset": "schools"}, 5.5),
    "regularisation, exam": ({"name": "regularisation", "dataset": "exam"}, 5.5),
    "regularisation, districts": ({"name": "regularisation", "dataset": "districts"}, 5.5),
    "fair, digits": ({"name": "fair"}, 1),
    "fair, mortgages": ({"name": "fair", "dataset": "mortgages"}, 1),
    "hyper-representation, unseen": (
        {"name": "hyper-representation", "unseen": 5, "partition": "dirichlet"},
        1,
    ),
    "hyper-representation, unseen, two labels each": (
        {"name": "hyper-representation", "unseen": 5, "partition": "shards"},
        1,
    ),
}
# Variations of a case above, for which no step sizes are tuned.
UNTUNED = (
    "label-cleaning, trust per client, 60 clean of optdigits",
    "label-cleaning, 5 % wrong, 20 clean",
    "long-tail, digits",
    "regularisation, districts",
    "fair, mortgages",
    "hyper-representation, unseen, two labels each",
)
RANGES = {
    "algorithm.local.y": (0.05, 5.0),
    "algorithm.local.v": (0.05, 5.0),
    "algorithm.local.x": (0.01, 100.0),
}


def main() -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    keep_compilations()
    for name in CASES:
        if options.only in name:
            for seed in range(options.seeds):
                _measure(name, seed)


def _measure(name: str, seed: int) -> None:
    """Run one case with one seed in every way that is not there yet."""
    task, multiple = CASES[name]
    done = {(line["case"], line["seed"], line["way"]) for line in lines()}
    config = _config(task, seed)
    if (name, seed, "automatic steps") not in done:
        _write(name, seed, "automatic steps", _run(config))
    built = build_task(config)
    left = tuple(one for one in built.baselines if (name, seed, one.name) not in done)
    if left:
        record = next(one for one in lines() if _is(one, name, seed, "automatic steps"))
        budget = multiple * (record["bytes_down"] + record["bytes_up"])
        for found in baselines.compare(
            built._replace(baselines=left),
            lambda data: build_federation(config, data),
            rounds=config.rounds,
            budget=int(budget),
            seed=seed,
        ):
            spent = {"communication_rounds": found.rounds, "sent": found.sent}
            _write(name, seed, found.name, {**found.metrics, **spent})
    if name == "label-cleaning" and (name, seed, "centrally") not in done:
        _write(name, seed, "centrally", _run(config, pool=True))
    if name not in UNTUNED and (name, seed, "tuned steps") not in done:
        _write(name, seed, "tuned steps", _run(_tuned(name, task, seed)))


def _config(task: dict[str, Any], seed: int, **more: Any) -> RunConfig:
    return checked({"task": task, "seed": seed, "steps": "auto", **more}, {})


def _run(config: RunConfig, pool: bool = False) -> dict[str, Any]:
    """Return the last record of a run; with `pool`, of one client that holds everybody's rows."""
    task = build_task(config)
    if pool:
        lower, upper = task.data.lower, task.data.upper
        rows = [np.asarray(lower.rows)], [np.asarray(upper.rows)]
        task = task._replace(data=federate(lower.samples, *rows))
    history = run_built(build(config, task), None)
    assert (history.end or {}).get("status") == "finished", history.end
    return history.records[-1]


def _tuned(name: str, task: dict[str, Any], seed: int) -> RunConfig:
    """Return the run with the step sizes that a search found with the first seed."""
    file = FILE.parent / "tuned" / f"{name.replace(', ', '-').replace(' ', '-')}.json"
    if not file.is_file():
        with tempfile.TemporaryDirectory() as folder:
            base = checked(_config(task, 0).model_dump(), {"algorithm.radius": "none"})
            found = tune(base, Path(folder), budget=4500, trials=9, space=RANGES)
        file.parent.mkdir(exist_ok=True)
        steps = found.best.algorithm.model_dump()["local"]
        file.write_text(json.dumps(steps) + "\n", encoding="utf-8")
    steps = json.loads(file.read_text())
    settings = {"local": steps, "radius": "none"}
    return checked({"task": task, "seed": seed, "steps": "given", "algorithm": settings}, {})


def _is(line: dict[str, Any], case: str, seed: int, way: str) -> bool:
    return (line["case"], line["seed"], line["way"]) == (case, seed, way)


def lines() -> list[dict[str, Any]]:
    """Return what was measured."""
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.is_file() else []


def _write(case: str, seed: int, way: str, record: dict[str, Any]) -> None:
    """Append one result."""
    kept = {key: round(value, 6) for key, value in record.items()}
    sent = kept.get("sent", kept.get("bytes_down", 0) + kept.get("bytes_up", 0))
    line = {"case": case, "seed": seed, "way": way, **kept, "sent": sent}
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(
        case,
        seed,
        way,
        {k: v for k, v in line.items() if "acc" in k or "loss" in k or "auc" in k},
        flush=True,
    )


if __name__ == "__main__":
    main()
