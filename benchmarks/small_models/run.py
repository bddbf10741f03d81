"""Measure rounds of small models: simfbo now, before its rounds ran in blocks, and by hand.

    git worktree add ../before 8f00960
    python benchmarks/small_models/run.py --before ../before
    python benchmarks/small_models/run.py --only quadratic mlp-n1     without the column "before"
    python benchmarks/small_models/run.py --table                     print results.json

Every implementation runs in a process of its own, and they take turns (benchmarks/peers/turns.py).
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fresh
from cases import CASES, Case
from tables import table

sys.path.append(str(Path(__file__).parent.parent / "peers"))
import turns as turn

HERE = Path(__file__).parent.resolve()
NOW = HERE.parent.parent
WORKER = HERE / "worker.py"
PACKAGES = ("jax", "numpy", "scikit-learn")
Found = dict[str, Any]


def measure(name: str, case: Case, before: Path | None, turns: int, scale: float) -> Found:
    """Return the times of a case by what was measured, usually the case itself, and by name."""
    names = [one for one in case["implementations"] if one != "before" or before]
    folders = {one: before if one == "before" and before else NOW for one in names}
    if case.get("fresh") == "command":
        return fresh.startup(folders, turns)
    if case.get("fresh") == "worker":
        return fresh.first_fit(case, folders, turns, WORKER)
    threads = case.get("threads", 1)
    begin = {one: partial(turn.start, case, one, threads, WORKER, folders[one]) for one in names}
    return {name: turn.measure(case, begin, turns, scale)}


def commit(folder: Path) -> str:
    """Return the commit of a checkout, with a mark if its sources were changed since."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = "-dirty" if git("status", "--porcelain", "--", "src") else ""
    return (git("rev-parse", "--short=7", "HEAD") or "unknown") + changed


def chosen(words: list[str] | None) -> list[str]:
    """Return the cases that begin with one of these words; all of them by default."""
    names = [name for name in CASES if words is None or name.startswith(tuple(words))]
    if not names:
        raise SystemExit(f"There is no such case; the cases are {', '.join(CASES)}.")
    return names


def report(name: str, found: Found) -> str:
    """Return a line with now's processor time and the others' ratios to it."""
    ours = found["now"]["cpu_ms"]
    ratios = {k: f"{v['cpu_ms'] / ours:.3g}x" for k, v in found.items() if k != "now"}
    return f"{name:22} now {ours:10.4f} ms of CPU; others take {ratios}"


def ordered(rows: Found) -> Found:
    """Return the measured rows in the order of the cases."""
    return {row: rows[row] for case in CASES for row in rows if rows[row]["case"] == case}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of commit 8f00960")
    parser.add_argument("--only", nargs="*", metavar="CASE", help="cases, or how they begin")
    parser.add_argument("--turns", type=int, default=7, help="turns of each implementation")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on rounds per turn")
    parser.add_argument("--table", action="store_true", help="print the tables; measure nothing")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.table:
        print(table(results))
        return
    before = options.before and options.before.resolve()
    if before and not (before / "src" / "simfbo").is_dir():
        raise SystemExit(f"There is no checkout of simfbo in {before}.")
    results |= turn.machine(*PACKAGES)
    commits = {"now": commit(NOW), **({"before": commit(before)} if before else {})}
    for name in chosen(options.only):
        case = CASES[name]
        found = measure(name, case, before, options.turns, options.scale)
        about = {"case": name, "unit": case.get("unit", "round"), "turns": options.turns}
        about |= {"commits": commits}
        rows = {row: {**about, "implementations": times} for row, times in found.items()}
        results["cases"] = ordered(results.get("cases", {}) | rows)
        for row, times in found.items():
            print(report(row, times), flush=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
