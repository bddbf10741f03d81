"""Compare computed bytes with real ones: `python benchmarks/bytes/audit.py` writes audit.json.

Runs the first rounds of coded rows of the experiment by simulation, which computes how long entropy
codes are, and really encodes and decodes what each of these rounds sends.
"""

import json
from pathlib import Path

import jax
import numpy as np

from simfbo import Point, SimulatedFederation
from simfbo.codecs.messages import REQUEST_BYTES, decode_message, deliver, encode_message, up_key
from simfbo.config.build import build_codecs, build_federation, build_method
from simfbo.config.build_task import build_task
from simfbo.config.run import checked
from simfbo.core.keys import client_key
from simfbo.experiments.experiment import load

HERE, ROUNDS, SEED = Path(__file__).parent, 10, 100
ROWS = {"mnist-iid": ("small", "dithered")}


def main():
    rows = []
    for part in load("bytes").parts:
        for name in ROWS.get(part.name, ()):
            rows.append({"row": f"{part.name}, {name}", **audit(part.methods[name].config)})
            print(rows[-1], flush=True)
    (HERE / "audit.json").write_text(json.dumps(rows, indent=1) + "\n")


def audit(config):
    config = checked(config.model_dump(), {"seed": SEED})
    task = build_task(config, None)
    method, given = build_method(config, task), build_federation(config, task.data)
    parts, coded = (task.data, given.sampler, given.local_work), build_codecs(config.codecs)
    plain, federation = SimulatedFederation(*parts), SimulatedFederation(*parts, codecs=coded)
    federation.start = Point(task.x0, task.y0)
    (step,), real, gap = method.client_steps.values(), 0, 0.0
    state = method.init(task.x0, task.y0)
    for t in range(ROUNDS):
        key = jax.random.fold_in(jax.random.key(SEED), t)
        cohort, at = plain.cohort(key), Point(state.x, state.y, state.v)
        payload, _, encoded_bytes = deliver(coded, at, federation.start, key)
        real += len(cohort.ids) * (encoded_bytes + REQUEST_BYTES)
        messages = plain.gather(step, payload, cohort, key)
        arrived = federation.gather(step, at, cohort, key)
        for j, i in enumerate(cohort.ids.tolist()):
            own = client_key(up_key(key), i, 0)
            message = jax.tree.map(lambda stack, j=j: np.asarray(stack[j]), messages)
            data = encode_message(coded, message, own)
            real += len(data)
            found = jax.tree.leaves(decode_message(coded, data, own, message))
            twin = [np.asarray(stack[j]) for stack in jax.tree.leaves(arrived)]
            gap = max(gap, *(float(abs(a - b).max()) for a, b in zip(found, twin, strict=True)))
        state = method.round(state, federation, key)
    total = federation.ledger.total
    computed = (total.bytes_down + total.bytes_up) / 2  # it was asked twice in every round
    return {
        "rounds": ROUNDS,
        "computed": computed,
        "real": real,
        "computed / real": computed / real,
        "largest difference of what arrives": gap,
    }


if __name__ == "__main__":
    main()
