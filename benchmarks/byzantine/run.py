"""Two of ten clients hostile on label-sharded MNIST: aggregators, with and without client momenta.

    python benchmarks/byzantine/run.py                            everything (see README.md)
    python benchmarks/byzantine/run.py --only geometric-median    runs whose name contains this
    python benchmarks/byzantine/run.py --only plain               those without momenta
    python benchmarks/byzantine/run.py --table                    only table.md, from the results

Appends a line per run to results.jsonl; what is there is not run again. Writes table.md.
"""

import argparse
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from table import write

from simfbo import Gate, Method, Point, SimulatedFederation, aggregation, run
from simfbo.algorithms import simfbo
from simfbo.core import partition
from simfbo.core.keys import keyed
from simfbo.datasets import load
from simfbo.errors import ClientWarning
from simfbo.tasks import Task, hyper_representation

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "trust"))  # hostile clients that see all honest messages first

from attacks import CLIENTS, HOSTILE, Attack, alie, attacked, ipm, times  # noqa: E402

try:
    from simfbo.algorithms import with_momenta
except ImportError:
    with_momenta: Any = None

IMAGES, STEPS, RADIUS = 10_000, Point(x=0.05, y=0.2, v=0.1), 10.0
PLAIN, MOMENTA = "plain", "momenta"

ATTACKS: dict[str, Attack] = {
    "none": lambda messages: messages,
    "sign flip": partial(times, -1.0),
    "ALIE, z 1.5": partial(alie, 1.5),
    "IPM 0.5": partial(ipm, 0.5),
    "IPM 5": partial(ipm, 5.0),
    "10x": partial(times, 10.0),
}


class Defence(NamedTuple):
    """An aggregator on all channels, and a gate; or the hostile clients away, to compare with."""

    aggregator: aggregation.Aggregator = aggregation.mean()
    gate: Gate = Gate()
    absence: Callable[[Any, np.ndarray], np.ndarray] | None = None


HONEST = "mean of the honest"
DEFENCES = {
    "mean": Defence(),
    "mean, auto limit": Defence(gate=Gate("auto")),
    "median": Defence(aggregation.median()),
    "trimmed-mean 0.2": Defence(aggregation.trimmed_mean(0.2)),
    "clipped-mean": Defence(aggregation.clipped_mean()),
    "geometric-median": Defence(aggregation.geometric_median()),
    "centred-clipping": Defence(aggregation.centred_clipping()),
    HONEST: Defence(absence=keyed(lambda key, ids: ids < HOSTILE)),
}


class Job(NamedTuple):
    """One run; `theta` is 1 without momenta."""

    seed: int
    rounds: int
    theta: float
    defence: str
    attack: str

    @property
    def name(self) -> str:
        """Return what `--only` is looked for in."""
        way = PLAIN if self.theta == 1 else MOMENTA
        return f"{way}, {self.defence}, {self.attack}, seed {self.seed}"


class Bench:
    """One seed: partition, split into levels, initial weights and batches."""

    def __init__(self, seed: int) -> None:
        """Note the seed; data is loaded when a run needs it."""
        self.seed = seed

    @cached_property
    def task(self) -> Task:
        """Return the task; label shards leave a client about two digits."""
        images = load("mnist")
        images = images._replace(
            train_images=images.train_images[:IMAGES], train_labels=images.train_labels[:IMAGES]
        )
        parts = partition.shards(images.train_labels, CLIENTS, 2, self.seed)
        return hyper_representation(images, parts, seed=self.seed)

    def algorithm(self, theta: float) -> Method:
        """Return SimFBO, whose clients send m_i = (1 - theta) m_i + theta d_i unless theta is 1."""
        plain = simfbo(self.task.problem, STEPS, radius=RADIUS)
        return plain if theta == 1 else with_momenta(plain, theta)

    def hostile(self, job: Job) -> Method:
        """Return the algorithm with two hostile clients; momenta are those of honest messages."""
        algorithm, honest = self.algorithm(job.theta), SimulatedFederation(self.task.data)
        honest.remember(algorithm, self.task.x0, self.task.y0)
        return attacked(algorithm, honest, ATTACKS[job.attack])

    def outcome(self, job: Job) -> dict[str, Any]:
        """Return test accuracy and how the run ended."""
        task, (rule, gate, absence) = self.task, DEFENCES[job.defence]
        federation = SimulatedFederation(
            task.data, gate=gate, aggregators=Point(rule, rule, rule), absence=absence
        )
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ClientWarning)
            history = run(
                self.hostile(job), federation, task.x0, task.y0, rounds=job.rounds, seed=self.seed,
                evaluate=task.evaluate, every=job.rounds,
            )  # fmt: skip
        last = history.records[-1]
        return {
            "accuracy": last["test_accuracy"], "ended": last["round"],
            "end": (history.end or {})["status"], "refused": last["refused"],
            "cpu_seconds": round(time.process_time() - begin, 2),
        }  # fmt: skip


def jobs(seeds: list[int], rounds: int, thetas: list[float]) -> Iterator[Job]:
    """Yield all runs, seed by seed."""
    for seed, theta, name, attack in itertools.product(seeds, thetas, DEFENCES, ATTACKS):
        if name != HONEST or attack == "none":
            yield Job(seed, rounds, theta, name, attack)


def finished(file: Path) -> list[dict[str, Any]]:
    """Return the lines of the results; one that was cut off is left out, and so run again."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"Skipped a damaged line of {file.name}.", file=sys.stderr)
    return found


def thetas(theta: float, table_only: bool) -> list[float]:
    """Return 1 and, where the library has client momenta, theta."""
    if with_momenta is None and not table_only:
        print("This version has no client momenta: only runs without them.", file=sys.stderr)
        return [1.0]
    return [1.0, theta]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--theta", type=float, default=0.1, help="weight of the latest direction")
    parser.add_argument("--only", default="", help="a part of the names of runs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--output", type=Path, default=HERE / "table.md")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, and write the table."""
    options = arguments()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    wanted = list(jobs(seeds, options.rounds, thetas(options.theta, options.table)))
    done = {Job(**{key: line[key] for key in Job._fields}) for line in finished(options.results)}
    todo = [job for job in wanted if job not in done and options.only in job.name]
    benches = {seed: Bench(seed) for seed in seeds}
    for number, job in enumerate([] if options.table else todo, 1):
        line = job._asdict() | benches[job.seed].outcome(job)
        with options.results.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        accuracy, seconds = 100 * line["accuracy"], line["cpu_seconds"]
        print(f"{number}/{len(todo)} {job.name}: {accuracy:.1f} %, {seconds} s", flush=True)
    known = set(wanted)
    lines = [
        line for line in finished(options.results)
        if Job(**{key: line[key] for key in Job._fields}) in known
    ]  # fmt: skip
    write(lines, options.output, list(DEFENCES), list(ATTACKS))


if __name__ == "__main__":
    main()
