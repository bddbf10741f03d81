"""The preset `private` on five seeds, with and without privacy: writes preset.jsonl.

Runs that are in the file are not run again.
"""

import json
from pathlib import Path

from simfbo.config.build import build, run_built
from simfbo.config.build_task import build_task
from simfbo.config.run import checked

RESULTS = Path(__file__).with_name("preset.jsonl")


def main() -> None:
    """Run what is missing."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    done = {(one["seed"], one["private"]) for one in map(json.loads, lines)}
    for seed in range(5):
        task = {"name": "hyper-representation", "dataset": "mnist"}
        config = checked({"preset": "private", "task": task, "seed": seed, "every": 100}, {})
        for private in {True, False} - {kept for found, kept in done if found == seed}:
            chosen = config if private else config.model_copy(update={"privacy": None})
            records = run_built(build(chosen, build_task(chosen, None)), None).records
            line = {
                "seed": seed,
                "private": private,
                "acc": [record["test_accuracy"] for record in records],
                "eps": records[-1].get("epsilon"),
            }
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
