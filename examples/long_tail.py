"""Learn to correct for an imbalance of classes."""

# %% [markdown]
# # Rare classes that must not be ignored
#
# Twenty clients train a classifier, and they hold twenty times as many samples of some classes as
# of others. A model that is right on average then learns to ignore the rare ones. Weights in
# inverse proportion to the counts are the usual remedy, but only a guess. Here the federation
# learns the correction for every class.

# %%
import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo import SimulatedFederation, datasets, partition, solve
from simfbo.runs import style
from simfbo.runs.palette import COLOURS, GREY, GRID
from simfbo.tasks import baselines, linear, long_tail, metrics, samples
from simfbo.tasks.models import Linear

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path("runs/example-long-tail"))
parser.add_argument("--rounds", type=int, help="500, or 60 if small")
parser.add_argument("--small", action="store_true", help="run for seconds rather than a minute")
parser.add_argument("--dataset", default="digits", choices=("digits", "optdigits"))
options = parser.parse_args([] if "ipykernel" in sys.modules else None)
rounds = options.rounds or (60 if options.small else 500)

# %% [markdown]
# ## The data and the clients
#
# Digits of 8 x 8 pixels, most of them removed so that the most common class is twenty times as
# large as the rarest. The rest is dealt to twenty clients at random. Test images are balanced.
# `optdigits` is the full set of the same digits, three times as many; it is downloaded if
# necessary.

# %%
rows = samples.from_images(datasets.load(options.dataset))
kept = samples.long_tailed(rows.target, imbalance=20, seed=0)
rows = rows._replace(features=rows.features[kept], target=rows.target[kept])
task = long_tail(rows, partition.iid(len(rows.target), clients=20))
counts = np.bincount(rows.target)

# %% [markdown]
# The task reports the mean accuracy over classes. To see every class, we add metrics to the run and
# its baselines.


# %%
@jax.jit
def predicted(y: Linear) -> jax.Array:
    """Return the class of every test image."""
    return linear.averaged(y)(jnp.asarray(rows.test_features)).argmax(-1)


def by_digit(state: Any) -> dict[str, float]:
    """Return the accuracy on the test images of every digit."""
    found = metrics.by_class(np.asarray(predicted(state.y)), rows.test_target, rows.classes)
    return {f"digit {digit}": float(value) for digit, value in enumerate(found)}


def watched(case: Any) -> Any:
    """Return a task or baseline that also measures every digit."""
    return case._replace(evaluate=lambda state: {**case.evaluate(state), **by_digit(state)})


task = watched(task)._replace(baselines=tuple(map(watched, task.baselines)))

# %% [markdown]
# ## The run

# %%
history = solve(task, rounds=rounds)

# %% [markdown]
# ## Without a bilevel method
#
# The same clients train by FedAvg: without correction, with inverse frequencies as weights, with
# scores shifted by the logarithm of the frequencies, and with the best of nine such shifts. No
# baseline sends more bytes than the run did.

# %%
if options.small:
    task = task._replace(baselines=task.baselines[:1])
last = history.records[-1]
outcomes = baselines.compare(
    task, SimulatedFederation, rounds=rounds, budget=last["bytes_down"] + last["bytes_up"]
)
print(baselines.table(outcomes, "SimFBO", last, task.metric))

# %% [markdown]
# ## The figure

# %%
order = np.argsort(-counts)
lines = {one.name: one.metrics for one in outcomes[:2]} | {"SimFBO": last}
looks = {"no tuning": (GREY, "o"), "inverse frequency": (COLOURS[4], "D"),
         "SimFBO": (COLOURS[0], "o")}  # fmt: skip
table = np.array([[100 * found[f"digit {digit}"] for digit in order] for found in lines.values()])
means = dict(zip(lines, table.mean(1), strict=True))
places = np.arange(len(order)) + np.linspace(-0.22, 0.22, len(lines))[:, None]
finding = f"{means['SimFBO']:.1f} % with SimFBO, {means['no tuning']:.1f} % without"
about = f"Every class of {options.dataset}, from the most common to the rarest."
figure, ((ax,),) = style.new(f"Mean accuracy of the classes: {finding}", about, size=(8.5, 3.8))
style.frame(ax, "digit, and its number of samples over all clients", "accuracy on test images, %")
ax.plot(places, table, color=GRID, lw=1.5)
for name, place, values in zip(lines, places, table, strict=True):
    colour, marker = looks[name]
    ax.scatter(place, values, color=colour, marker=marker, s=45, label=name, zorder=3)
ax.set_xticks(range(len(order)), [f"{digit}\n{counts[digit]}" for digit in order])
ax.grid(visible=False, axis="x")
style.key(ax, loc="lower center")
options.output.mkdir(parents=True, exist_ok=True)
figure.savefig(options.output / "figure.png", dpi=100)
style.save_svg(figure, options.output / "figure.svg")
print(f"\nThe figure is {options.output / 'figure.png'}")

# %% [markdown]
# From left to right, classes get rarer. Plain training is poor on the rare ones; SimFBO recovers
# most of that, at the expense of the most common ones. Inverse frequencies do as well on these few
# digits with half of the bytes: try them first. One test image is 3 % of a class here, so small
# differences mean little.
