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

from simfbo import bands, comparison, config
from simfbo.history import FILE, History
from simfbo.sweep import Job, sweep
from simfbo.tuning import default_space, tune

HERE = Path(__file__).parent
PARTITIONS = ("iid", "shards")
BUDGET, TRIALS, TUNING_SEED = 4000, 9, 1000
LARGE, SMALL = (0.02, 0.5), (0.001, 0.1)  # ranges of the step of v
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
    ranges = {"y": (0.03, 1.0), "v": range_of_v(name, folder.name), "x": (0.02, 0.5)}
    space = {key: ranges[key[-1]] for key in default_space(settings)}
    scratch = folder / f"{name}.tuning"
    tuned = tune(settings, scratch, budget=BUDGET, trials=TRIALS, space=space, workers=2)
    print(folder.name, name, tuned.best.algorithm, file=sys.stderr, flush=True)
    (scratch / "trials.jsonl").replace(folder / f"{name}.jsonl")
    kept.write_text(config.as_toml(tuned.best.model_copy(update={"seed": 0})))
    shutil.rmtree(scratch)


def range_of_v(name: str, partition: str) -> tuple[float, float]:
    """Return where to look for the step of v: lower where series see one client's Hessian alone.

    With two digits to a client, and in FedMBO's chains, larger steps diverge sooner or later.
    """
    return SMALL if partition == "shards" or name == "fedmbo" else LARGE


def compare_all(partition: str, names: list[str]) -> None:
    """Run the winners with three seeds, and write table and figure."""
    folder = HERE / "results" / partition
    seeds = config.read(HERE / "methods.toml")["seeds"]
    run_missing(folder, names, seeds)
    groups = {
        name: [History.load(folder / f"{name}-seed{seed}.jsonl") for seed in seeds]
        for name in names
    }
    rows = comparison.rows(groups, "test_accuracy", TARGETS)
    (folder / "table.md").write_text(comparison.markdown(rows) + "\n")
    print(comparison.markdown(rows))
    figure = bands.draw(groups, "test_accuracy")
    figure.axes[0].set_ylim(0.8, 0.985)
    figure.savefig(folder / "figure.png", dpi=110)


def run_missing(folder: Path, names: list[str], seeds: list[int]) -> None:
    """Run the winners that results/ does not hold yet, and keep their histories."""
    tree = config.read(HERE / "methods.toml")
    jobs = []
    for name in names:
        rounds = tree["methods"][name].get("rounds", tree["rounds"])
        for seed in seeds:
            if not (folder / f"{name}-seed{seed}.jsonl").exists():
                settings = config.load(folder / f"{name}.toml", {"seed": seed, "rounds": rounds})
                jobs.append(Job(settings, folder / "running" / f"{name}-seed{seed}"))
    sweep(jobs, workers=2)
    for job in jobs:
        (job.directory / FILE).replace(folder / f"{job.directory.name}.jsonl")
    shutil.rmtree(folder / "running", ignore_errors=True)


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
