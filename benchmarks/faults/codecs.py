"""Mutated coded messages: none may crash the receiver, take long, or take memory.

    .venv/bin/python benchmarks/faults/codecs.py [MESSAGES]

Writes results/codecs.json.
"""

import json
import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np

from simfbo import codecs
from simfbo.codecs.laws import mutated, survives

FAMILY = (
    codecs.float32(), codecs.bfloat16(), codecs.dithered(0.5), codecs.dithered(4),
    codecs.dithered(0.5, False), codecs.eden(1), codecs.eden(4), codecs.random_subset(0.1),
    codecs.top_k(0.05), codecs.lowrank(8, 0.3), codecs.lowrank(8, 0.3, False),
)  # fmt: skip


def main(messages):
    rng, key = np.random.default_rng(1), jax.random.key(1)
    arrays = [rng.standard_normal((64, 96)).astype(np.float32),
              rng.standard_cauchy(300).astype(np.float32)]  # fmt: skip
    pairs = [(codec, z, codec.encode(z, key)) for codec in FAMILY for z in arrays]
    for codec, z, data in pairs:
        codec.decode(data, key, z)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failed, longest = 0, 0.0
    for number in range(messages):
        codec, z, data = pairs[number % len(pairs)]
        begin = time.process_time()
        failed += not survives(codec, mutated(data, rng), key, z)
        longest = max(longest, time.process_time() - begin)
        if number % 10_000 == 0:
            print(number, failed, flush=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    found = {"messages": messages, "failed": failed, "longest decode, ms": round(1000 * longest),
             "peak memory grew by, MB": round(grown)}  # fmt: skip
    print(found)
    file = Path(__file__).parent / "results" / "codecs.json"
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
