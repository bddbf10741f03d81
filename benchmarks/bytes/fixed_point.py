"""Where SimFBO ends with coded messages, on a heterogeneous quadratic with a closed form.

    .venv/bin/python benchmarks/bytes/fixed_point.py

For every codec and server step: the distance of the mean iterate from x*, which a bias moves, and
the root mean square distance of single iterates, the noise floor. Writes fixed_point.json.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from simfbo import Point, SimulatedFederation, algorithms, codecs, run
from simfbo.core.method import Wrapper
from simfbo.tasks._quadratic import random_quadratic

jax.config.update("jax_enable_x64", True)
HERE = Path(__file__).parent
ROUNDS, SEEDS, SIZES = 30_000, (0, 1), (1.0, 0.25)
STEPS = Point(x=0.05, y=0.2, v=0.1)
DIMENSIONS = 4, 5  # of x and y


class Averaged(NamedTuple):
    """A state, with mean and mean square distance of x over the second half of the run."""

    base: Any
    mean: jax.Array
    square: jax.Array
    count: jax.Array


class InTheMean(Wrapper):
    """A method that remembers where it was in its second half."""

    best: tuple[float, ...] = eqx.field(static=True)
    rounds: float

    def inner_state(self, state):
        """Return the method's own state."""
        return state.base

    def init(self, x, y):
        """Return the initial state."""
        zero = jnp.zeros(())
        return Averaged(self.inner.init(x, y), jnp.zeros_like(jnp.asarray(x)), zero, zero)

    def round(self, state, federation, key):
        """Run a round."""
        base = self.inner.round(state.base, federation, key)
        late = jnp.where(state.count >= self.rounds / 2, 2 / self.rounds, 0.0)
        mean = state.mean + late * base.x
        square = state.square + late * jnp.sum((base.x - jnp.array(self.best)) ** 2)
        return Averaged(base, mean, square, state.count + 1)


def every(codec):
    return Point(codec, codec, codec)


def cases():
    start = codecs.relative_to_start
    down = every(start(codecs.dithered(0.1)))
    return {
        "float32": codecs.Codecs(every(codecs.float32()), every(codecs.float32())),
        "dithered, 0.25 up, 0.1 down": codecs.Codecs(every(codecs.dithered(0.25)), down),
        "dithered, 4 up, 0.1 down": codecs.Codecs(every(codecs.dithered(4)), down),
        "random subset of 25 % up": codecs.Codecs(every(codecs.random_subset(0.25)), down),
        "bfloat16 both ways": codecs.Codecs(every(codecs.bfloat16()), every(codecs.bfloat16())),
        "largest 25 % up (biased)": codecs.Codecs(every(codecs.top_k(0.25)), down),
    }


def main():
    coefficients = random_quadratic(8, *DIMENSIONS, heterogeneity=1.0, seed=4)
    task, best = coefficients.task(), coefficients.closed_form().x()
    rows = []
    for name, coded in cases().items():
        for size in SIZES:
            found = []
            for seed in SEEDS:
                server = Point(*(size * step for step in STEPS))
                method = algorithms.simfbo(task.problem, STEPS, server)
                federation = SimulatedFederation(task.data, codecs=coded)
                state = run(
                    InTheMean(method, tuple(best.tolist()), ROUNDS), federation, task.x0, task.y0,
                    rounds=ROUNDS, seed=seed,
                ).method_state  # fmt: skip
                gap = float(np.linalg.norm(state.mean - best))
                found.append((gap, float(np.sqrt(state.square))))
            gaps, floors = zip(*found, strict=True)
            rows.append({"codecs": name, "server step": size, "mean iterate": max(gaps),
                         "single iterates": float(np.mean(floors))})  # fmt: skip
            print(rows[-1], flush=True)
    about = {"distance at the start": float(np.linalg.norm(task.x0 - best)), "rounds": ROUNDS,
             "seeds": len(SEEDS), "dimensions": DIMENSIONS}  # fmt: skip
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    (HERE / "fixed_point.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
