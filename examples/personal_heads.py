"""Give clients that took no part heads of their own."""

# %% [markdown]
# # What a federation leaves to those who come later
#
# Clients who each see a few classes train a network together: the hidden layer is shared, a linear
# head sits on it. Then a client comes along that took no part, with 36 labelled images of its own.
# It keeps the hidden layer, which knows digits, and fits a head of its own, which knows its
# classes. The upper level trains the layer for the head that will sit on it.

# %%
import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from simfbo import SimulatedFederation, datasets, solve
from simfbo.core import partition
from simfbo.runs.report import COLOURS, style
from simfbo.tasks import baselines, hyper_representation
from simfbo.tasks._hyper_representation import moments
from simfbo.tasks._personal import Half, fit_head, halves
from simfbo.tasks.models import mlp, standardise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path("runs/example-personal-heads"))
parser.add_argument("--rounds", type=int, help="500, or 60 if small")
parser.add_argument("--small", action="store_true", help="seconds instead of a minute")
options = parser.parse_args([] if "ipykernel" in sys.modules else None)
rounds = options.rounds or (60 if options.small else 500)

# %% [markdown]
# ## The data, and who holds it
#
# 1,437 digits of 8 x 8 pixels, dealt to twenty clients such that each sees two or three of the ten.
# The last five take no part. Each fits its head on half of its 72 images and is tested on the
# other.

# %%
UNSEEN, PULL = 5, 0.2  # clients; how strongly a head of one's own is drawn to the shared one
images = datasets.load("digits")
pixels, labels = images.train_images, images.train_labels
parts = partition.shards(labels, clients=20, per_client=2)
model = mlp(inputs=64, hidden=50 if options.small else 200, classes=10)
task = hyper_representation(images, parts, model=model, upper_share=0.2, unseen=UNSEEN, pull=PULL)

# %% [markdown]
# ## The run

# %%
history = solve(task, rounds=rounds)

# %% [markdown]
# ## Without a bilevel method
#
# The same clients train by FedAvg: only the head, on a hidden layer left at random; and hidden
# layer and head together, on all their images, as is usual. No baseline sends more than the run
# did. The table shows the mean accuracy of the heads that the five unseen clients fitted.

# %%
if options.small:
    task = task._replace(baselines=task.baselines[:1])
last = history.records[-1]
outcomes = baselines.compare(
    task, SimulatedFederation, rounds=rounds, budget=last["bytes_down"] + last["bytes_up"]
)
print(baselines.table(outcomes, "SimFBO", last, task.metric))

# %% [markdown]
# ## Each of the unseen clients
#
# `fit_head` is all that such a client does: convex, on its own machine, with nothing sent.

# %%
fitted, tested = halves(pixels, labels, parts[-UNSEEN:], seed=0)
scale = moments(pixels)


def features(half: Half) -> jax.Array:
    """Return what the shared hidden layer makes of a client's images."""
    x: Any = history.state.x
    return model.features(x, standardise(half.images, *scale, x.weight.dtype))


def accuracies(pair: tuple[Half, Half]) -> tuple[jax.Array, ...]:
    """Return the accuracy of the shared head and of the client's own."""
    (fit, test), shared = pair, history.state.y
    own = fit_head(features(fit), fit.labels, fit.weights.astype(shared.weight.dtype), shared, PULL)
    classes = [head(features(test)).argmax(-1).astype(np.int32) for head in (shared, own)]
    return tuple(test.weights @ (found == test.labels).astype(np.float32) for found in classes)


before, after = 100 * np.array(jax.lax.map(accuracies, (fitted, tested)))

# %% [markdown]
# ## The figure

# %%
order = np.argsort(before)
digits = [" and ".join(map(str, np.unique(labels[parts[i - UNSEEN]]))) for i in order]
figure = Figure(figsize=(8, 3.6), layout="constrained")
ax, places = figure.subplots(), range(UNSEEN)
ax.hlines(places, before[order], after[order], color=COLOURS[0], lw=3, alpha=0.3)
ax.scatter(before[order], places, color="#888", s=70, label="the shared head", zorder=3)
ax.scatter(after[order], places, color=COLOURS[0], s=70, label="its own head", zorder=4)
ax.set_yticks(places, [f"holds {held}" for held in digits])
ax.set(title="Five clients that took no part", ylim=(-0.5, UNSEEN - 0.5))
style(ax, "accuracy on the client's test images, %")
ax.legend(frameon=False)
options.output.mkdir(parents=True, exist_ok=True)
figure.savefig(options.output / "figure.png", dpi=100)
print(f"\nThe figure is {options.output / 'figure.png'}")

# %% [markdown]
# Each line is a client. The shared head has to tell ten digits apart; one's own starts from it and
# learns which two there are. Where clients hold all digits there is nothing to gain: dealt by
# `partition.dirichlet(labels, clients=20, alpha=0.5)`, own heads were no better. Nor does the
# hidden layer need two levels here: the table's three differ by one test image of 180.
