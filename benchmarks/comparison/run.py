"""All methods on MNIST, iid and non-iid: step sizes tuned with equal budgets, then 3 seeds each.

    python benchmarks/comparison/run.py tune [METHOD ...]
    python benchmarks/comparison/run.py compare

`tune` writes results/PARTITION/METHOD.toml (the winner) and METHOD.jsonl (all trials); `compare`
runs the winners and writes results/PARTITION/{METHOD-seedS.jsonl, table.md, figure.png}. What is
there already is not run again.
"""

import argparse
import shutil
import sys
from pathlib import Path

from simfbo import comparison, config
from simfbo.history import FILE, History
from simfbo.sweep import Job, sweep
from simfbo.tuning import tune

HERE = Path(__file__).parent
PARTITIONS = ("iid", "shards")
BUDGET, TRIALS, TUNING_SEED = 4000, 9, 1000
RANGES = {"y": (0.03, 1.0), "v": (0.02, 0.5), "x": (0.02, 0.5)}
TARGETS = (0.90, 0.95, 0.97)


def methods(partition: str, seed: int) -> dict[str, config.RunConfig]:
    """Return the methods' settings, with the paper's steps."""
    tree = config.read(HERE / "methods.toml")
    del tree["seeds"]
    return comparison.plan(tree, {"task.partition": partition, "seed": seed})


def tune_one(name: str, settings: config.RunConfig, folder: Path) -> None:
    """Tune a method and keep the winner and the list of trials."""
    kept = folder / f"{name}.toml"
    if kept.exists():
        return
    table = "local" if hasattr(settings.algorithm, "local") else "steps"
    fields = type(getattr(settings.algorithm, table)).model_fields
    space = {f"algorithm.{table}.{key}": RANGES[key] for key in fields}
    scratch = folder / f"{name}.tuning"
    tuned = tune(settings, scratch, budget=BUDGET, trials=TRIALS, space=space, workers=2)
    print(folder.name, name, tuned.best.algorithm, file=sys.stderr, flush=True)
    (scratch / "trials.jsonl").replace(folder / f"{name}.jsonl")
    (scratch / "best.toml").replace(kept)
    shutil.rmtree(scratch)


def compare_all(partition: str, names: list[str]) -> None:
    """Run the winners with three seeds, and write table and figure."""
    folder = HERE / "results" / partition
    seeds = config.read(HERE / "methods.toml")["seeds"]
    groups: dict[str, list[History]] = {}
    for name in names:
        groups[name] = [one_run(folder, name, seed) for seed in seeds]
    rows = comparison.rows(groups, "test_accuracy", TARGETS)
    (folder / "table.md").write_text(comparison.markdown(rows) + "\n")
    print(comparison.markdown(rows))
    figure = comparison.draw(groups, "test_accuracy")
    figure.axes[0].set_ylim(0.8, 0.985)
    figure.savefig(folder / "figure.png", dpi=110)


def one_run(folder: Path, name: str, seed: int) -> History:
    """Return a winner's run with one seed, from results/ where it is there."""
    kept = folder / f"{name}-seed{seed}.jsonl"
    if not kept.exists():
        scratch = folder / f"{name}-seed{seed}"
        settings = config.load(folder / f"{name}.toml", {"seed": seed})
        sweep([Job(settings, scratch)])
        (scratch / FILE).replace(kept)
        scratch.rmdir()
        print(kept.stem, History.load(kept).records[-1], file=sys.stderr, flush=True)
    return History.load(kept)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("tune", "compare"))
    parser.add_argument("methods", nargs="*")
    options = parser.parse_args()
    for partition in PARTITIONS:
        found = methods(partition, TUNING_SEED)
        chosen = options.methods or list(found)
        if options.what == "tune":
            for name in chosen:
                tune_one(name, found[name], HERE / "results" / partition)
        else:
            compare_all(partition, chosen)


if __name__ == "__main__":
    main()
