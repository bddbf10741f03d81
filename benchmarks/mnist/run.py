"""SimFBO on MNIST with the paper's settings: 2 partitions x 3 seeds x 2,000 rounds.

    python benchmarks/mnist/run.py

Runs that results/ already holds are not run again. Writes the figure and prints the table of
README.md.
"""

import shutil
import sys
from pathlib import Path
from statistics import mean, stdev

from simfbo import config as settings
from simfbo import report, run
from simfbo.build import build_algorithm, build_federation, build_task
from simfbo.history import FILE, History

HERE = Path(__file__).parent
PAPER = HERE.parent.parent / "examples" / "demo.toml"
PARTITIONS, SEEDS = ("iid", "shards"), (0, 1, 2)
AT, TARGETS = (100, 500, 1000, 2000), (0.90, 0.95, 0.97)


def result(partition: str, seed: int) -> History:
    """Return one run, from results/ where it is there."""
    kept = HERE / "results" / f"{partition}-seed{seed}.jsonl"
    if not kept.exists():
        keys = {"task.partition": partition, "seed": seed, "every": 20}
        keys["task.upper_share"] = 0.5 if partition == "iid" else 0.2
        train(settings.load(PAPER, keys), kept)
    return History.load(kept)


def train(config: settings.RunConfig, kept: Path) -> None:
    """Run a configuration and keep its history."""
    task = build_task(config)
    scratch = kept.with_suffix(".running")
    shutil.rmtree(scratch, ignore_errors=True)

    def show(t: int, record: dict | None) -> None:
        if record and t % 500 == 0:
            print(f"{kept.stem} round {t}: {record['test_accuracy']:.4f}", file=sys.stderr)

    run(
        build_algorithm(config.algorithm, task.problem), build_federation(config, task.data),
        task.x0, task.y0, rounds=config.rounds, seed=config.seed, evaluate=task.evaluate,
        every=config.every or 20, directory=scratch, config=config.model_dump(mode="json"),
        on_round=show,
    )  # fmt: skip
    (scratch / FILE).replace(kept)
    scratch.rmdir()


def accuracy(history: History, t: int) -> float:
    """Return the test accuracy after t rounds, in percent."""
    return next(100 * r["test_accuracy"] for r in history.records if r["round"] == t)


def reached(history: History, target: float) -> dict | None:
    """Return the first record at or above the target accuracy."""
    return next((r for r in history.records if r["test_accuracy"] >= target), None)


def to_target(partition: str, histories: list[History], target: float) -> str:
    """Return a row of the second table; only where every seed got there."""
    first = [record for h in histories if (record := reached(h, target))]
    if len(first) < len(histories):
        return f"| {partition} | {target:.0%} | {len(first)} of {len(histories)} seeds | | |"
    sent = [(r["bytes_up"] + r["bytes_down"]) / 1e6 for r in first]
    rounds, seconds = (mean(r[key] for r in first) for key in ("round", "seconds"))
    return f"| {partition} | {target:.0%} | {rounds:.0f} | {mean(sent):,.0f} | {seconds:.1f} |"


def spread(values: list[float]) -> str:
    """Return mean and standard deviation."""
    return f"{mean(values):.2f} ± {stdev(values):.2f}"


def main() -> None:
    """Run what is missing; print the tables."""
    runs = {p: [result(p, seed) for seed in SEEDS] for p in PARTITIONS}
    print("| partition | " + " | ".join(f"{t:,} rounds" for t in AT) + " |")
    print("|---|" + "---|" * len(AT))
    for partition, histories in runs.items():
        cells = [spread([accuracy(h, t) for h in histories]) for t in AT]
        print(f"| {partition} | " + " | ".join(cells) + " |")
    print(
        "\n| partition | to accuracy | rounds | megabytes, both ways | seconds |"
        "\n|---|---|---|---|---|"
    )
    for partition, histories in runs.items():
        for target in TARGETS:
            print(to_target(partition, histories, target))
    everything = [history for histories in runs.values() for history in histories]
    names = [h.header["config"]["task"]["partition"] for h in everything]
    figure = report.draw(everything, names=names)
    figure.axes[0].set_ylim(0.88, 0.98)
    figure.savefig(HERE / "figure.png", dpi=110)


if __name__ == "__main__":
    main()
