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

import jax
import numpy as np
from sklearn.linear_model import LassoCV, LogisticRegressionCV

from simfbo import Point
from simfbo.config.build import build, build_federation, run_built
from simfbo.config.build_task import build_task
from simfbo.config.run import RunConfig, checked
from simfbo.core.data import federate
from simfbo.runs.files import keep_compilations
from simfbo.studies.tuning import tune
from simfbo.tasks import baselines
from simfbo.tasks.models import Linear
from simfbo.tasks.task import Task

FILE = Path(__file__).parent / "results.jsonl"
LASSO = "lasso, rows pooled"
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
        _baselines(name, seed, config, built._replace(baselines=left), multiple)
    if task["name"] == "regularisation":
        left = tuple(
            one._replace(name=f"{one.name}, as many bytes")
            for one in built.baselines
            if len(one.candidates) > 1 and (name, seed, f"{one.name}, as many bytes") not in done
        )
        _baselines(name, seed, config, built._replace(baselines=left), 1)
        if (name, seed, LASSO) not in done:
            _write(name, seed, LASSO, lasso(built, seed))
    if name == "label-cleaning" and (name, seed, "centrally") not in done:
        _write(name, seed, "centrally", _run(config, pool=True))
    if name not in UNTUNED and (name, seed, "tuned steps") not in done:
        _write(name, seed, "tuned steps", _run(_tuned(name, task, seed)))


def _baselines(name: str, seed: int, config: RunConfig, task: Task, multiple: float) -> None:
    """Measure baselines, whose searches may send a multiple of the bytes of SimFBO."""
    record = next(one for one in lines() if _is(one, name, seed, "automatic steps"))
    for found in baselines.compare(
        task,
        lambda data: build_federation(config, data),
        rounds=config.rounds,
        budget=int(multiple * (record["bytes_down"] + record["bytes_up"])),
        seed=seed,
    ):
        spent = {"communication_rounds": found.rounds, "sent": found.sent}
        _write(name, seed, found.name, {**found.metrics, **spent})


def lasso(task: Task, seed: int) -> dict[str, Any]:
    """Return the metrics of scikit-learn's L1 penalty, cross-validated on all rows in one place.

    Features are shut where its coefficient is zero. liblinear solves two classes.
    """
    features, target, _ = map(np.asarray, task.data.lower.samples)
    if target.dtype.kind == "f":
        model = LassoCV(cv=5, max_iter=100_000, random_state=seed).fit(features, target)
        found = Linear(model.coef_[:, None], np.atleast_1d(model.intercept_))
    else:
        model = LogisticRegressionCV(
            Cs=10, cv=5, l1_ratios=(1,), solver="liblinear", scoring="neg_log_loss",
            use_legacy_attributes=False, random_state=seed,
        ).fit(features, target)  # fmt: skip
        one, zero = model.coef_.T, np.zeros((features.shape[1], 1))
        found = Linear(np.hstack([zero, one]), np.append(0.0, model.intercept_))
    kept = np.any(found.weight != 0, axis=1)
    metrics = task.evaluate(Point(x=np.where(kept, -30.0, 30.0), y=_folds(found, task.y0)))
    del metrics["upper_loss"]  # of models that were not trained on the fold
    return metrics


def _folds(model: Linear, like: Linear) -> Linear:
    """Return one model for every fold."""
    return jax.tree.map(lambda a, b: np.broadcast_to(a, np.shape(b)).astype("f4"), model, like)


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
    line = {"case": case, "seed": seed, "way": way}
    line |= {key: round(value, 6) for key, value in record.items()}
    if "bytes_down" in line:
        line["sent"] = line["bytes_down"] + line["bytes_up"]
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
