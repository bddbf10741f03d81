"""Kill the writer of 10 MB checkpoints 200 times, flip 300 bits, cut 100 files, fill a disk.

    python benchmarks/faults/writer.py         (about 2 minutes)

After every kill the newest sound checkpoint must be at least as new as the last one that the writer
had reported as saved, and hold what was put into it. Every flipped bit and every cut must be
noticed. On a disk that is full, the checkpoint before must stay as it was; that needs the right to
mount one, and is left out without it.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from simfbo.errors import UserError
from simfbo.runs import checkpoint

HERE = Path(__file__).parent
NUMBERS = 2_500_000  # of four bytes: 10 MB
warnings.filterwarnings("ignore", category=RuntimeWarning, message=".*fork.*")


def state(step: int) -> dict[str, np.ndarray]:
    """Return what a checkpoint of this step holds."""
    return {"x": np.random.default_rng(step).random(NUMBERS, np.float32), "step": np.int64(step)}


def write_forever(directory: Path, step: int, report: int) -> None:
    """Write checkpoint after checkpoint, and report each one once it is saved."""
    while True:
        step += 1
        checkpoint.save(directory, step, state(step), {"step": step})
        os.write(report, step.to_bytes(8, "little"))


def kill_one(directory: Path, step: int, wait: float) -> tuple[int, bool]:
    """Return the last step that a writer reported before it was killed, and if it was writing."""
    reader, report = os.pipe()
    child = os.fork()
    if child == 0:
        write_forever(directory, step, report)
    os.close(report)
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        steps = pipe.read()
    torn = bool(list(directory.glob(".*.tmp")))
    return int.from_bytes(steps[-8:], "little") if steps else step, torn


def kills(directory: Path, count: int, rng: random.Random) -> dict[str, int]:
    """Return how often a checkpoint was lost or wrong after a kill."""
    step, lost, wrong, writing = 0, 0, 0, 0
    checkpoint.save(directory, step, state(step), {"step": step})
    for _ in range(count):
        reported, torn = kill_one(directory, step, rng.uniform(0.0, 0.6))
        writing += torn
        checkpoint.tidy(directory)
        found = checkpoint.newest(directory, lambda one: one)
        assert found is not None
        step = int(found.manifest["step"])
        lost += step < reported
        wrong += any((found.arrays[f"['{k}']"] != v).any() for k, v in state(step).items())
        wrong += len(os.listdir(directory)) > checkpoint.KEPT
    return {"kills": count, "while_writing": writing, "lost": lost, "wrong": wrong, "saved": step}


def damage(data: bytes, flips: int, cuts: int, rng: random.Random) -> dict[str, int]:
    """Return how many flipped bits and cuts were noticed."""
    noticed = {"flips": flips, "flips_noticed": 0, "cuts": cuts, "cuts_noticed": 0}
    for _ in range(flips):
        broken = bytearray(data)
        broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        noticed["flips_noticed"] += is_damaged(bytes(broken))
    for _ in range(cuts):
        noticed["cuts_noticed"] += is_damaged(data[: rng.randrange(len(data))])
    return noticed


def is_damaged(data: bytes) -> bool:
    """Return whether these bytes are refused."""
    try:
        checkpoint.decode(data)
    except checkpoint.DamagedError:
        return True
    return False


def full_disk(folder: Path) -> dict[str, Any]:
    """Return what is left when the second checkpoint does not fit on the disk."""
    command = ["mount", "-t", "tmpfs", "-o", "size=15m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        return {"tried": False}
    try:
        old = checkpoint.save(folder, 1, state(1), {"step": 1})
        before = old.read_bytes()
        try:
            checkpoint.save(folder, 2, state(2), {"step": 2})
            sentence = ""
        except UserError as error:
            sentence = str(error).replace(str(folder), "DIR")
        names = [path.name for path in folder.iterdir()]
        intact = old.read_bytes() == before and names == [old.name]
        return {"tried": True, "intact": intact, "sentence": sentence}
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main() -> None:
    """Try everything; write results/writer.json."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {"bytes": len(checkpoint.encode(state(1), {})), **kills(folder, 200, rng)}
    found |= damage(checkpoint.encode(state(1), {"step": 1}), 300, 100, rng)
    with tempfile.TemporaryDirectory() as name:
        found["full_disk"] = full_disk(Path(name))
    (HERE / "results" / "writer.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    noticed = found["flips_noticed"] == 300 and found["cuts_noticed"] == 100
    kept = found["full_disk"].get("intact", True)
    sys.exit(0 if not found["lost"] + found["wrong"] and noticed and kept else 1)


if __name__ == "__main__":
    main()
