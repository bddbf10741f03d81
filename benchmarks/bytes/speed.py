"""What coding costs: `python benchmarks/bytes/speed.py` writes speed.json.

Processor time of a round of SimFBO on the MNIST perceptron with and without codecs, turn by turn in
one process; and of encoding and decoding what such a round sends.
"""

import json
import time
from pathlib import Path

import jax
import numpy as np

from simfbo import Point, SimulatedFederation, codecs, local_work, sampling
from simfbo.config.build import build_codecs, build_method
from simfbo.config.build_task import build_task
from simfbo.config.run import load

HERE, TURNS = Path(__file__).parent, 40
BASE = {"task.name": "hyper-representation", "task.dataset": "mnist"}


def every(codec):
    return Point(codec, codec, codec)


def cases():
    start, dithered = codecs.relative_to_start, codecs.dithered
    return {
        "no codecs": None,
        "float32": codecs.Codecs(every(codecs.float32()), every(codecs.float32())),
        "dithered(0.5)": codecs.Codecs(every(dithered(0.5)), every(start(dithered(0.5)))),
        "dithered(3)": codecs.Codecs(every(dithered(3)), every(start(dithered(3)))),
        "eden(2)": codecs.Codecs(every(codecs.eden(2)), every(start(codecs.eden(2)))),
        "small": build_codecs(load(None, BASE | {"codecs.preset": "small"}).codecs),
    }


def rounds(task, method, clients, tau):
    """Return the median processor milliseconds of a round, by codecs."""
    found = {}
    for name, coded in cases().items():
        federation = SimulatedFederation(
            task.data, sampling.without_replacement(clients), local_work.constant(tau), codecs=coded
        )
        federation.start = Point(task.x0, task.y0)
        state = method.round(method.init(task.x0, task.y0), federation, jax.random.key(0))
        found[name] = [federation, jax.block_until_ready(state), []]
    for turn in range(TURNS):
        for one in found.values():
            begin = time.process_time()
            one[1] = jax.block_until_ready(method.round(one[1], one[0], jax.random.key(turn)))
            one[2].append(time.process_time() - begin)
    return {name: 1000 * float(np.median(times)) for name, (_, _, times) in found.items()}


def coding():
    """Return milliseconds and bytes of one encode and decode of a layer's change, by codec."""
    rng, key = np.random.default_rng(0), jax.random.key(1)
    low = rng.standard_normal((784, 30)) @ rng.standard_normal((30, 200))
    layer = (low * np.exp(rng.standard_normal((784, 1)))).astype(np.float32)
    rows = []
    for codec in (codecs.float32(), codecs.bfloat16(), codecs.dithered(0.5), codecs.dithered(3),
                  codecs.dithered(0.5, False), codecs.eden(2), codecs.random_subset(0.1),
                  codecs.top_k(0.05), codecs.lowrank(32, 0.3)):  # fmt: skip
        data = codec.encode(layer, key)
        codec.decode(data, key, layer)
        times = []
        for _ in range(7):
            begin = time.process_time()
            codec.encode(layer, key)
            middle = time.process_time()
            codec.decode(data, key, layer)
            times.append((middle - begin, time.process_time() - middle))
        encode, decode = 1000 * np.median(times, 0)
        fixed = " (fixed length)" if codec is codecs.dithered(0.5, False) else ""
        rows.append({"codec": codec.name + fixed, "bytes": len(data), "encode ms": encode,
                     "decode ms": decode})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main():
    config = load(None, BASE)
    task = build_task(config, None)
    method = build_method(config, task)
    rows = []
    for clients, tau in ((10, 1), (10, 5), (1, 25)):
        taken = rounds(task, method, clients, tau)
        row = {"clients": clients, "local steps": tau, "no codecs, ms": taken["no codecs"]}
        rows.append(row | {k: v / taken["no codecs"] for k, v in taken.items() if k != "no codecs"})
        print(rows[-1], flush=True)
    text = json.dumps({"rounds": rows, "coding": coding()}, indent=1)
    (HERE / "speed.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
