"""What it costs to watch a run: memory of server and page, and processor time of the run.

    python benchmarks/watch/run.py [PAIRS]

A run of 2,000 iterations with an evaluation after each, alone and watched in headless Chromium, in
turns. Needs chromium and chromedriver.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scipy import stats

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "runs"))
from webdriver import Browser  # noqa: E402

ROUNDS = 2000
RUN = ("run", "hyper-representation", "--dataset", "digits", "--rounds", str(ROUNDS),
       "--set", "every=1", "--quiet", "--no-baselines", "--output")  # fmt: skip
PROGRESS = """
const text = document.querySelector(".runs .progress span")?.textContent ?? "-1";
return Number(text.split(" ")[0].replace(",", ""));
"""
TICKS = os.sysconf("SC_CLK_TCK")


def simfbo(*arguments, **options):
    command = [sys.executable, "-m", "simfbo.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, **options)


def finished(process):
    """Wait for a run; return the processor seconds that it took."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


def resident(process):
    """Return the megabytes of memory that a process holds."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


def processor(process):
    """Return the processor seconds that a process has taken so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def alone(folder):
    start = time.monotonic()
    with simfbo(*RUN, folder / "run", stdout=subprocess.DEVNULL) as process:
        return {"cpu": finished(process), "wall": time.monotonic() - start}


def watched(folder):
    """Run with the page open; look at memory at the start, in the middle and at the end."""
    pipe = {"stdout": subprocess.PIPE, "text": True}
    with Browser() as browser, simfbo("watch", folder, "--port", 0, **pipe) as server:
        browser.show(1280)
        browser.open(server.stdout.readline().split()[3])
        start, samples = time.monotonic(), []
        with simfbo(*RUN, folder / "run", stdout=subprocess.DEVNULL) as process:
            for least in (1, ROUNDS // 2, ROUNDS):
                while browser.run(PROGRESS) < least:
                    time.sleep(2)
                samples.append((resident(server), browser.heap() / 1e6))
            used, wall = finished(process), time.monotonic() - start
        found = {"cpu": used, "wall": wall, "server cpu": processor(server), "memory": samples}
        assert browser.log() == []
        server.terminate()
    return found


def main(pairs):
    results = []
    with tempfile.TemporaryDirectory() as folder:
        alone(Path(folder))  # fills caches, and does not count
    for i in range(pairs):
        found = {}
        for kind in (alone, watched)[:: 1 if i % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                found[kind.__name__] = kind(Path(folder))
        results.append(found)
        print(json.dumps(found), flush=True)
    for key in ("cpu", "wall"):
        logs = [math.log(found["watched"][key] / found["alone"][key]) for found in results]
        middle = statistics.mean(logs)
        half = stats.t.ppf(0.975, pairs - 1) * statistics.stdev(logs) / math.sqrt(pairs)
        mean, low, high = (math.exp(value) for value in (middle, middle - half, middle + half))
        print(f"{key}, watched / alone: {mean:.3f}, 95 % interval {low:.3f} to {high:.3f}; "
              f"single pairs {math.exp(min(logs)):.3f} to {math.exp(max(logs)):.3f}")  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
