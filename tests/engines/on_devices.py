"""Runs on several devices and prints what it finds; started by test_devices.py."""

import json
import sys
import tempfile

import jax
import numpy as np

if sys.argv[1:2] == ["distributed"]:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)  # programs are small and run once

from simfbo import Gate, Point, SimulatedFederation, run  # noqa: E402
from simfbo.algorithms import fednest, simfbo  # noqa: E402
from simfbo.core.local_work import momentum, proximal, sgd, uniform  # noqa: E402
from simfbo.core.sampling import (  # noqa: E402
    drop_out,
    with_replacement,
    without_replacement,
)
from simfbo.tasks import quadratic  # noqa: E402

TASK = quadratic(clients=11, dim_x=2, dim_y=3, samples=4, noise=0.3, seed=1)
DRAWN = quadratic(clients=11, dim_x=2, dim_y=3, samples=4, noise=0.3, batch_size=2, seed=1)
TWO = quadratic(clients=2, dim_x=2, dim_y=3, samples=4, noise=0.3, seed=1)
STEPS = Point(x=0.05, y=0.2, v=0.1)
METHOD = simfbo(TASK.problem, STEPS)
GATHERING = fednest(TASK.problem, STEPS, 1, 2, mode="as_released")
RULES = [sgd(), momentum(0.5), proximal(0.2)] * 3 + [momentum(0.9)] * 2
CASES = {
    "everyone": (METHOD, TASK, {}),
    "minibatches": (METHOD, DRAWN, {"local_work": uniform(1, 3, RULES)}),
    "sampled": (METHOD, TASK, {"sampler": without_replacement(5), "chunk": 1}),
    "replaced": (METHOD, DRAWN, {"sampler": with_replacement(6)}),
    "gathered": (GATHERING, TASK, {"chunk": 2}),
    "all of two": (METHOD, TWO, {"sampler": with_replacement(2)}),
    "refused": (METHOD, TASK, {"gate": Gate(max_norm=4.0), "absence": drop_out(0.3)}),
}


def go(method, task, devices, **options):
    federation = SimulatedFederation(task.data, devices=devices, strategy="batches", **options)
    return run(method, federation, task.x0, task.y0, rounds=4), federation


def compare():
    found = {"differences": {}, "same ledgers": {}, "same refusals": {}}
    for name, (method, task, world) in CASES.items():
        (one, first), (many, second) = (
            go(method, task, devices, **world) for devices in (1, 2 if task is TWO else 4)
        )
        pairs = zip(jax.tree.leaves(one.state), jax.tree.leaves(many.state), strict=True)
        found["differences"][name] = max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)
        found["same ledgers"][name] = first.ledger == second.ledger
        found["same refusals"][name] = [r["client"] for r in one.refusals] == [
            r["client"] for r in many.refusals
        ]
    return found | placed() | {"resumed": resumed(), "of two": go(METHOD, TASK, 2)[1].mesh.size}


def placed():
    """Return whose data lies where."""
    _, federation = go(METHOD, TASK, 4)
    lower = federation.clients(np.inf).lower
    samples = np.asarray(TASK.data.lower.samples[2])[:: TASK.data.lower.largest]
    shards = lower.samples[2].addressable_shards
    owners = [
        [int(np.argmax([np.array_equal(s, row[0]) for s in samples])) for row in shard.data]
        for shard in shards
    ]
    return {"shards": [len(shard.data) for shard in shards], "clients on devices": owners}


def resumed():
    def stop(t, record):
        if t == 2:
            raise KeyboardInterrupt

    federation = SimulatedFederation(TASK.data, without_replacement(5))
    options = {"rounds": 5, "every": 5, "evaluate": TASK.evaluate}
    whole = run(METHOD, federation, TASK.x0, TASK.y0, **options)
    with tempfile.TemporaryDirectory() as folder:
        again = SimulatedFederation(TASK.data, without_replacement(5))
        run(METHOD, again, TASK.x0, TASK.y0, directory=folder, on_round=stop, **options)
        end = run(METHOD, again, TASK.x0, TASK.y0, directory=folder, resume=True, **options)
    pairs = zip(jax.tree.leaves(whole.state), jax.tree.leaves(end.state), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def together():
    """Return where runs on all devices of all processes end."""
    federation = SimulatedFederation(TASK.data, strategy="batches")
    sampled = SimulatedFederation(TASK.data, without_replacement(5), strategy="batches")
    ends = [run(METHOD, one, TASK.x0, TASK.y0, rounds=5).state.x for one in (federation, sampled)]
    return {"x": np.concatenate(ends).tolist(), "devices": len(jax.devices())}


if __name__ == "__main__":
    print(json.dumps(compare() if sys.argv[1] == "compare" else together()))
