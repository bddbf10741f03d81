"""Change the code that protects a run, a little at a time, and see whether the tests notice.

    python benchmarks/faults/mutants.py         (about 40 minutes on 2 cores)

Mutants are made by cosmic-ray (extra `benchmark`) in copies of the tree, which itself stays as
it is. A mutant is killed if the tests of its module fail or hang.
"""

import json
import os
import shutil
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
    "gate": "tests/test_gate.py",
    "aggregation": "tests/test_aggregation.py",
    "checkpoint": "tests/test_checkpoint.py tests/test_resume.py",
    "sampling": "tests/test_sampling.py tests/test_gate.py",
}
CONFIG = """[cosmic-ray]
module-path = "src/simfbo/{module}.py"
timeout = 180.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"

[cosmic-ray.filters.operators-filter]
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"]
"""
# The operator left out turns `a | b` in annotations into `a + b`, which nobody evaluates.


def survey(module: str) -> dict[str, Any]:
    """Return how many mutants of a module were killed, and those that survived."""
    folder = Path(tempfile.mkdtemp())
    for part in ("src", "tests", "benchmarks", "pyproject.toml", "requirements.lock"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    config = CONFIG.format(module=module, python=sys.executable, tests=TESTS[module])
    (folder / "cosmic.toml").write_text(config)
    for command in (
        ["cosmic-ray", "init", "cosmic.toml", "session.sqlite"],
        ["cr-filter-operators", "session.sqlite", "cosmic.toml"],
        ["cosmic-ray", "exec", "cosmic.toml", "session.sqlite"],
    ):
        subprocess.run(command, cwd=folder, check=True, env=environment(folder))
    dump = subprocess.run(["cosmic-ray", "dump", "session.sqlite"], cwd=folder, check=True,
                          capture_output=True, text=True, env=environment(folder))  # fmt: skip
    found = [json.loads(line) for line in dump.stdout.splitlines()]
    shutil.rmtree(folder)
    return summary(found)


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the copy is what is imported."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(folder / "src"), "PATH": path}


def summary(found: list[Any]) -> dict[str, Any]:
    """Return the counts of a session, and where the survivors are."""
    counts: Counter[str] = Counter()
    survivors = []
    for item, result in found:
        outcome = (result or {}).get("test_outcome") or "skipped"
        counts[outcome] += 1
        if outcome == "survived":
            change = item["mutations"][0]
            survivors.append([change["operator_name"].removeprefix("core/"), change["start_pos"]])
    return {**counts, "survivors": survivors}


def main() -> None:
    """Survey every module, two side by side; write results/mutants.json."""
    names = sys.argv[1:] or list(TESTS)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(survey, names), strict=True))
    killed = sum(one.get("killed", 0) for one in found.values())
    total = killed + sum(one.get("survived", 0) for one in found.values())
    found["share_killed"] = round(killed / total, 4)
    (HERE / "results" / "mutants.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, one in found.items():
        print(name, {k: v for k, v in one.items() if k != "survivors"} if name in TESTS else one)


if __name__ == "__main__":
    main()
