"""Change the code that protects a run, a little at a time, and see whether the tests notice.

    python benchmarks/faults/mutants.py         (about 30 minutes on 2 cores)

Mutants are made by cosmic-ray (extra `benchmark`) in copies of the tree, which itself stays as
it is. A mutant is killed if those tests of its module fail or hang that `make test` runs. Of a
module with many, a random choice is tried. Named modules are surveyed alone, one after the other;
the others keep their results. What is interrupted goes on where it was, in the copies below
build/mutants; delete them to begin anew.
"""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ESTIMATORS = "tests/estimators/test_conventions.py tests/estimators/test_tasks.py"
SURVEYS = {  # mutants to try, and tests
    "core/gate": (
        70,
        "tests/core/test_admit.py tests/core/test_gate.py tests/engines/test_watched.py",
    ),
    "robust/aggregation": (70, "tests/robust/test_aggregation.py"),
    "runs/checkpoint": (70, "tests/runs/test_checkpoint.py"),
    "core/sampling": (70, "tests/core/test_sampling.py tests/core/test_gate.py"),
    "runs/files": (
        25,
        "tests/runs/test_files.py tests/runs/test_names.py tests/cli/test_names.py "
        "tests/runs/test_checkpoint.py",
    ),
    "runs/palette": (15, "tests/runs/test_palette.py tests/runs/test_style.py"),
    "estimators/_linear": (20, f"{ESTIMATORS} tests/estimators/test_export.py"),
    "estimators/_validation": (20, f"{ESTIMATORS} tests/estimators/test_federation.py"),
    "estimators/_fair": (20, ESTIMATORS),
}
CONFIG = """[cosmic-ray]
module-path = "src/simfbo/{module}.py"
timeout = 300.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"
"""
PARTS = ("src", "tests", "benchmarks", "docs", "conftest.py", "pyproject.toml", "requirements.lock")


def survey(module: str) -> dict[str, Any]:
    """Return how many mutants of a module were killed, and those that survived."""
    folder = ROOT / "build" / "mutants" / module.replace("/", "-")
    if not (folder / "made").exists():
        prepare(module, folder)
    call(folder, "cosmic-ray", "exec", "cosmic.toml", "session.sqlite")
    dump = call(folder, "cosmic-ray", "dump", "session.sqlite")
    made = int((folder / "made").read_text())
    return {"made": made, **summary([json.loads(line) for line in dump.splitlines()])}


def prepare(module: str, folder: Path) -> None:
    """Copy the tree, make mutants and choose some; run the tests, which must pass, unchanged."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    most, tests = SURVEYS[module]
    config = CONFIG.format(module=module, python=sys.executable, tests=tests)
    (folder / "cosmic.toml").write_text(config)
    call(
        folder, sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()
    )
    call(folder, "cosmic-ray", "init", "cosmic.toml", "session.sqlite")
    (folder / "made").write_text(str(thin(folder / "session.sqlite", most)))


def call(folder: Path, *command: str) -> str:
    """Return what a command prints."""
    done = subprocess.run(command, cwd=folder, check=True, env=environment(folder), text=True,
                          stdout=subprocess.PIPE)  # fmt: skip
    return done.stdout


def thin(session: Path, most: int) -> int:
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
        kept = random.Random(0).sample(jobs, min(most, len(jobs)))
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
    """Survey every module, or those that are named; write results/mutants.json."""
    names = sys.argv[1:] or list(SURVEYS)
    with ThreadPoolExecutor(1 if sys.argv[1:] else 2) as pool:
        found = dict(zip(names, pool.map(survey, names), strict=True))
    file = HERE / "results" / "mutants.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    found = {
        name: found.get(name) or before[name] for name in SURVEYS if name in {**before, **found}
    }
    killed = sum(one.get("killed", 0) for one in found.values())
    total = killed + sum(one.get("survived", 0) for one in found.values())
    found["share_killed"] = round(killed / total, 4)
    file.write_text(json.dumps(found, indent=1) + "\n")
    for name, one in found.items():
        print(name, {k: v for k, v in one.items() if k != "survivors"} if name in SURVEYS else one)


if __name__ == "__main__":
    main()
