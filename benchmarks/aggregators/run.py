"""What robust aggregators cost honest clients, and what they buy against hostile ones.

    python benchmarks/aggregators/run.py                  everything (see README.md)
    python benchmarks/aggregators/run.py --only cost      one part; the others stay as they were

Writes results.json and the figure, and prints the tables of README.md.
"""

import argparse
import json
import tempfile
from pathlib import Path

import attacks
import bias
import cost
import jax
import tables
from figure import draw

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PARTS = {
    "bias": bias.measure,
    "centres": lambda: bias.centres() | {"combining": cost.combining()},
    "attacks": attacks.measure,
    "cost": cost.measure,
}


def main() -> None:
    """Measure what was asked for; write and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=[*PARTS, "tables"], help="measure one part, or none")
    only = parser.parse_args().only
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as cache:
        # seeds differ in data, not in programs
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        for name in [part for part in PARTS if only in (None, part)]:
            results[name] = PARTS[name]()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    tables.show(results)
    draw(results, HERE / "figure.svg")


if __name__ == "__main__":
    main()
