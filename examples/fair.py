"""Learn how much weight each group needs."""

# %% [markdown]
# # A model that works for the smallest group too
#
# Twenty sites read digits with a camera. Most cameras are upright, but a few were mounted sideways
# or upside down. One model is trained for all sites, and it is good where most of the data comes
# from. Here the federation learns how much weight each group needs to reduce the loss of the worst
# one.

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
from simfbo.runs.palette import COLOURS, GREY
from simfbo.tasks import baselines, fair, group_weights, linear, metrics, samples
from simfbo.tasks.models import Linear

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path("runs/example-fair"))
parser.add_argument("--rounds", type=int, help="500, or 60 if small")
parser.add_argument("--small", action="store_true", help="run for seconds rather than a minute")
options = parser.parse_args([] if "ipykernel" in sys.modules else None)
rounds = options.rounds or (60 if options.small else 500)

# %% [markdown]
# ## The data and the clients
#
# 1,437 digits of 8 x 8 pixels, dealt to twenty sites: 15 upright, 3 sideways and 2 upside down. A
# third of the test images is in each group. Groups need not be sites: any number per row will do.
# `datasets.load_table("mortgages")` has groups of its own; `samples.from_table` prepares them.

# %%
NAMES = ("upright", "sideways", "upside down")  # turned by 0, 1 and 2 quarters
SITES = np.repeat((0, 1, 2), (15, 3, 2))  # the group of each site
images = datasets.load("digits")
parts = partition.iid(len(images.train_labels), clients=len(SITES))
group = SITES[samples.owners(parts, len(images.train_labels))]
test_group = np.arange(len(images.test_labels)) % len(NAMES)


def turned(pixels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return images as the cameras of these groups see them."""
    return np.stack([np.rot90(image, g) for image, g in zip(pixels, groups, strict=True)])


seen = turned(images.train_images, group), turned(images.test_images, test_group)
rows = samples.from_images(images._replace(train_images=seen[0], test_images=seen[1]))
task = fair(rows, parts, (group, test_group))
shares = np.bincount(group) / len(group)

# %% [markdown]
# The task reports the loss of the worst group. To see every group, we add metrics to the run and
# its baselines.


# %%
@jax.jit
def group_losses(y: Linear) -> jax.Array:
    """Return each group's mean loss on test images."""
    inputs, target, groups = map(jnp.asarray, (rows.test_features, rows.test_target, test_group))
    losses = linear.losses(linear.averaged(y)(inputs), target, rows.classes)
    return metrics.group_means(losses, groups, len(NAMES))


def by_group(state: Any) -> dict[str, float]:
    """Return each group's loss on test images, and its weight in training."""
    means, counted = np.asarray(group_losses(state.y.models)), group_weights(state.x, shares)
    loss = {f"loss {name}": float(means[i]) for i, name in enumerate(NAMES)}
    return loss | {f"weight {name}": float(counted[i]) for i, name in enumerate(NAMES)}


def watched(case: Any) -> Any:
    """Return a task or baseline that also measures every group."""
    return case._replace(evaluate=lambda state: {**case.evaluate(state), **by_group(state)})


task = watched(task)._replace(baselines=tuple(map(watched, task.baselines)))

# %% [markdown]
# ## The run

# %%
history = solve(task, rounds=rounds)

# %% [markdown]
# ## Without a bilevel method
#
# The same sites train by FedAvg: without weights, with inverse frequencies as weights, and with the
# best of nine powers of those. No baseline sends more bytes than the run did.

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
lines = [(one.name, one.metrics) for one in outcomes[:2]] + [("SimFBO", last)]
looks = {"no weights": (GREY, "o"), "inverse frequency": (COLOURS[4], "D"),
         "SimFBO": (COLOURS[0], "o")}  # fmt: skip
places, losses = range(len(NAMES)), [[each[f"loss {g}"] for g in NAMES] for _, each in lines]
worst = {name: max(values) for (name, _), values in zip(lines, losses, strict=True)}
finding = f"{worst['SimFBO']:.2f} with SimFBO, {worst['no weights']:.2f} without weights"
about = "Left: the loss of each group. Right: the weights over the run."
figure, ((left, right),) = style.new(
    f"Loss of the worst group: {finding}", about, size=(9, 3.4), columns=2
)
style.frame(left, "loss on the group's test images")
left.hlines(places, losses[0], losses[-1], color=COLOURS[0], lw=3, alpha=0.3)
for (name, _), values in zip(lines, losses, strict=True):
    colour, marker = looks[name]
    left.scatter(values, places, color=colour, marker=marker, s=60, label=name, zorder=3)
sizes = [f"{100 * share:.0f} % of rows" for share in shares]
left.set_yticks(places, [f"{name}, {size}" for name, size in zip(NAMES, sizes, strict=True)])
left.set_ylim(-1.2, len(NAMES) - 0.6)
style.key(left, loc="lower right")

style.frame(right, "iterations of SimFBO", "weight of a row in training")
curves = [
    style.Label(name, history.column("round"), history.column(f"weight {name}"), colour, bold=True)
    for name, colour in zip(NAMES, COLOURS[1:], strict=False)
]
for curve in curves:
    right.plot(curve.x, curve.y, color=curve.colour, lw=2)
right.set(xlim=(0, rounds), ylim=(0, None))
style.label_lines(right, curves)
options.output.mkdir(parents=True, exist_ok=True)
figure.savefig(options.output / "figure.png", dpi=100)
style.save_svg(figure, options.output / "figure.svg")
print(f"\nThe figure is {options.output / 'figure.png'}")

# %% [markdown]
# Left: the groups' losses move together at the expense of the upright sites, which is unavoidable
# with a single linear model. Right: a row from an upside-down camera ends up with the weight of
# thirteen upright ones, where inverse frequencies give it that of seven and a half; its group is
# still the worst on test images, but by little. If a group's labels are merely noisier, no weights
# help.
