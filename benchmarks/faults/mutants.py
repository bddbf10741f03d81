"""Change the code that protects a run, a little at a time, and see whether the tests notice.

    python benchmarks/faults/mutants.py         (about 30 minutes on 2 cores)

Mutants are made by cosmic-ray (extra `benchmark`) in copies of the tree, which itself stays as
it is. A mutant is killed if the tests of its module fail or hang. Of a module with many, a random
choice is tried. Named modules are surveyed alone; the others keep their results.
"""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TESTS = {
    "core/gate": "tests/core/test_admit.py tests/core/test_gate.py",
    "core/aggregation": "tests/core/test_aggregation.py",
    "runs/checkpoint": "tests/runs/test_checkpoint.py",
    "runs/files": "tests/runs/test_files.py",
    "core/sampling": "tests/core/test_sampling.py tests/core/test_gate.py",
}
CONFIG = """[cosmic-ray]
module-path = "src/simfbo/{module}.py"
timeout = 300.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"
"""
MOST = 70  # of a module


def survey(module: str) -> dict[str, Any]:
    """Return how many mutants of a module were killed, and those that survived."""
    folder = Path(tempfile.mkdtemp())
    for part in ("src", "tests", "benchmarks", "pyproject.toml", "requirements.lock"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    config = CONFIG.format(module=module, python=sys.executable, tests=TESTS[module])
    (folder / "cosmic.toml").write_text(config)
    call(folder, "cosmic-ray", "init", "cosmic.toml", "session.sqlite")
    made = thin(folder / "session.sqlite")
    call(folder, "cosmic-ray", "exec", "cosmic.toml", "session.sqlite")
    dump = call(folder, "cosmic-ray", "dump", "session.sqlite")
    shutil.rmtree(folder)
    return {"made": made, **summary([json.loads(line) for line in dump.splitlines()])}


def call(folder: Path, *command: str) -> str:
    """Return what a command prints."""
    done = subprocess.run(command, cwd=folder, check=True, env=environment(folder), text=True,
                          stdout=subprocess.PIPE)  # fmt: skip
    return done.stdout


def thin(session: Path) -> int:
    """Return how many mutants there are, after all but a random choice of them are taken out.

    Left out altogether is what turns `a | b` in an annotation into `a + b`: nobody evaluates it.
    """
    with sqlite3.connect(session) as database:
        database.execute(
            "DELETE FROM mutation_specs WHERE operator_name LIKE '%ReplaceBinaryOperator_BitOr_%'"
        )
        order = "operator_name, occurrence, start_pos_row, start_pos_col"
        jobs = [job for (job,) in database.execute(
            f"SELECT job_id FROM mutation_specs ORDER BY {order}"
        )]  # fmt: skip
        kept = random.Random(0).sample(jobs, min(MOST, len(jobs)))
        marks = ",".join("?" * len(kept))
        for table in ("mutation_specs", "work_items"):
            database.execute(f"DELETE FROM {table} WHERE job_id NOT IN ({marks})", kept)
    return len(jobs)


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the copy is what is imported."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(folder / "src"), "PATH": path}


def summary(found: list[Any]) -> dict[str, Any]:
    """Return the counts of a session, and where the survivors are."""
    counts: Counter[str] = Counter()
    survivors = []
    for _, result in found:
        outcome = (result or {}).get("test_outcome") or "skipped"
        counts[outcome] += 1
        if outcome == "survived":
            lines = (result["diff"] or "").splitlines()
            changed = [line for line in lines if line[:1] in ("+", "-")]
            survivors.append([line for line in changed if line[:3] not in ("+++", "---")])
    return {**counts, "survivors": survivors}


def main() -> None:
    """Survey every module, two side by side; write results/mutants.json."""
    names = sys.argv[1:] or list(TESTS)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(survey, names), strict=True))
    file = HERE / "results" / "mutants.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    found = {name: found.get(name) or before[name] for name in TESTS if name in {**before, **found}}
    killed = sum(one.get("killed", 0) for one in found.values())
    total = killed + sum(one.get("survived", 0) for one in found.values())
    found["share_killed"] = round(killed / total, 4)
    file.write_text(json.dumps(found, indent=1) + "\n")
    for name, one in found.items():
        print(name, {k: v for k, v in one.items() if k != "survivors"} if name in TESTS else one)


if __name__ == "__main__":
    main()
