"""Kill a run of 1,500 rounds at random moments, 50 times in all, and go on each time.

    python benchmarks/faults/kills.py         (about 10 minutes)

A run that was killed over and over must end with the same state, to the bit, and the same history,
but for the clocks, as one that was left alone. When it has finished before all kills are spent,
another begins.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from simfbo.runs import checkpoint
from simfbo.runs.history import FILE, History

HERE = Path(__file__).parent
BRIEFLY = ["--quiet", "--checkpoint-seconds", "0.2"]
RUN = ["--config", str(HERE / "kills.toml"), *BRIEFLY]
CLOCKS = ("seconds", "cpu_seconds", "crc32")


def start(*arguments: str) -> subprocess.Popen:
    """Return `simfbo run ...`, started."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "simfbo.cli.main", "run", *arguments], **quiet)


def finish(process: subprocess.Popen) -> None:
    """Wait for the end of a run that must succeed."""
    _, complaint = process.communicate()
    if process.returncode:
        raise SystemExit(complaint.decode())


def outcome(directory: Path) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Return the final state and the history without its clocks."""
    found = checkpoint.load(checkpoint.files(directory)[0])
    lines = [json.loads(line) for line in (directory / FILE).read_text().splitlines()]
    return found.arrays, [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines]


def same(a: Path, b: Path) -> bool:
    """Return whether two runs ended alike, in every bit of the state and line of the history."""
    (state, lines), (other, others) = outcome(a), outcome(b)
    arrays = list(state) == list(other) and all(
        state[name].tobytes() == other[name].tobytes() for name in state
    )
    return arrays and lines == others


def progress(directory: Path) -> int:
    """Return the round of the newest checkpoint; -1 before there is one."""
    return checkpoint.newest(directory, lambda found: found.manifest["round"]) or -1


def torment(directory: Path, rng: random.Random, left: int, longest: float) -> list[int]:
    """Return the rounds in which the run was killed, after it has finished."""
    moments: list[int] = []
    process = start(*RUN, "--output", str(directory))
    while len(moments) < left:
        try:
            process.wait(rng.uniform(0.0, longest))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        moments.append(progress(directory) if directory.exists() else -1)
        begun = directory.exists() and (directory / FILE).exists()
        flags = [*BRIEFLY, "--resume"] if begun else [*RUN, "--output"]
        process = start(*flags, str(directory))
    finish(process)
    return moments


def main() -> None:
    """Kill, resume, compare; write results/kills.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, folder = random.Random(options.seed), Path(tempfile.mkdtemp())
    finish(start(*RUN, "--output", str(folder / "alone")))  # compiles
    shutil.rmtree(folder / "alone")
    begin = time.monotonic()
    finish(start(*RUN, "--output", str(folder / "alone")))
    took = time.monotonic() - begin
    runs: list[dict[str, Any]] = []
    while (spent := sum(len(run["killed_in_round"]) for run in runs)) < options.kills:
        directory = folder / f"run{len(runs)}"
        moments = torment(directory, rng, options.kills - spent, longest=took / 2)
        alike = same(directory, folder / "alone")
        runs.append({"killed_in_round": moments, "identical": alike})
        print(f"{len(moments)} kills, after rounds {moments}: identical {alike}", flush=True)
    history = History.load(folder / "alone")
    found = {
        "kills": sum(len(run["killed_in_round"]) for run in runs),
        "within_rounds": sum(t >= 0 for run in runs for t in run["killed_in_round"]),
        "identical": all(run["identical"] for run in runs),
        "rounds": history.header["rounds"],
        "refused_replies": len(history.refusals),
        "seconds_left_alone": round(took, 1),
        "runs": runs,
    }
    (HERE / "results" / "kills.json").write_text(json.dumps(found) + "\n")
    shutil.rmtree(folder)
    print({key: value for key, value in found.items() if key != "runs"})
    sys.exit(0 if found["identical"] else 1)


if __name__ == "__main__":
    main()
