"""Run the same seed on one core and on two, idle and under load, and compare every bit.

    python benchmarks/faults/cores.py         (about 5 minutes)

Every run begins with an empty compilation cache. Compared are the final state and all records but
their clocks. The last column is a pool of another size, which the command line does not use: there
large full-batch products may differ.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from simfbo.runs import checkpoint
from simfbo.runs.history import FILE

HERE = Path(__file__).parent
CASES = {
    "quadratic": "quadratic --tau 1..10 --rounds 200",
    "MNIST perceptron, batch 64": "hyper-representation --dataset mnist --tau 1..5 --rounds 40",
    "MNIST perceptron, 1,000 wide, full batch": "hyper-representation --dataset mnist --rounds 3 "
    "--set task.hidden=1000 --set task.batch_size=full",
    "CIFAR-10 CNN, batch 64": "hyper-representation --dataset cifar10 --set task.model=cnn "
    "--rounds 4",
}  # fmt: skip
WAYS: dict[str, tuple[list[str], dict[str, str], int]] = {
    "two cores": ([], {}, 0),
    "again": ([], {}, 0),
    "one core": (["taskset", "-c", "0"], {}, 0),
    "under load": ([], {}, 3),
    "pool of 1": ([], {"PJRT_NPROC": "1"}, 0),
}


def digest(case: str, way: str) -> str:
    """Return the digest of a run's end."""
    prefix, variables, load = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **variables, "XDG_CACHE_HOME": f"{folder}/cache"}
        # Data sets stay where they are; only compiled programs begin anew.
        data = os.environ.get("SIMFBO_DATA_DIR", str(Path.home() / ".cache" / "simfbo"))
        command = [*prefix, sys.executable, "-m", "simfbo.cli.main", "run", *CASES[case].split(" ")]
        spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            subprocess.run([*command, "--quiet", "--data-dir", data, "--output", f"{folder}/run"],
                           check=True, env=environment, stdout=subprocess.DEVNULL)  # fmt: skip
        finally:
            for process in spin:
                process.kill()
        return _digest(Path(folder) / "run")


def _digest(run: Path) -> str:
    hashed = hashlib.sha256()
    for name, array in checkpoint.load(checkpoint.files(run)[0]).arrays.items():
        hashed.update(name.encode() + array.tobytes())
    for line in (run / FILE).read_text().splitlines()[1:]:
        record = json.loads(line)
        record = {k: v for k, v in record.items() if k not in ("seconds", "cpu_seconds", "crc32")}
        hashed.update(json.dumps(record).encode())
    return hashed.hexdigest()[:12]


def main() -> None:
    """Compare; write results/cores.json."""
    found = {}
    for case in CASES:
        found[case] = {way: digest(case, way) for way in WAYS}
        print(case, found[case], flush=True)
    (HERE / "results" / "cores.json").write_text(json.dumps(found, indent=1) + "\n")
    promised = [way for way in WAYS if way != "pool of 1"]
    sys.exit(0 if all(len({one[way] for way in promised}) == 1 for one in found.values()) else 1)


if __name__ == "__main__":
    main()
