"""Give clients that were not in training heads of their own."""

# %% [markdown]
# # How clients that join later benefit
#
# Clients that each have a few classes train a network together: a shared hidden layer with a linear
# head on top. Then a new client joins, with 36 labelled images of its own. It keeps the hidden
# layer, which knows digits, and fits its own head, which knows its classes. The upper level trains
# the layer for the head that will be put on top of it.

# %%
import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from simfbo import SimulatedFederation, datasets, partition, solve
from simfbo.runs import style
from simfbo.runs.palette import COLOURS, GREY
from simfbo.tasks import baselines, hyper_representation
from simfbo.tasks.models import mlp, moments, standardise
from simfbo.tasks.personal_heads import Half, fit_head, halves

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path("runs/example-personal-heads"))
parser.add_argument("--rounds", type=int, help="500, or 60 if small")
parser.add_argument("--small", action="store_true", help="run for seconds rather than a minute")
options = parser.parse_args([] if "ipykernel" in sys.modules else None)
rounds = options.rounds or (60 if options.small else 500)

# %% [markdown]
# ## The data and the clients
#
# 1,437 digits of 8 x 8 pixels, dealt to twenty clients so that each has two or three of the ten
# classes. The last five are not in training. Each fits its head on half of its 72 images and is
# tested on the other half.

# %%
UNSEEN, PULL = 5, 0.2  # clients; how strongly their heads are pulled towards the shared one
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
# The same clients train by FedAvg: only the head, on a random hidden layer; and hidden layer and
# head together, on all their images, as is usual. No baseline sends more bytes than the run did.
# The table shows the mean accuracy of the heads that the five unseen clients fitted.

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
# `fit_head` is all that such a client does: a convex problem on its own machine; nothing is sent.

# %%
fitted, tested = halves(pixels, labels, parts[-UNSEEN:], seed=0)
scale = moments(pixels)


def features(half: Half) -> jax.Array:
    """Return the output of the shared hidden layer for a client's images."""
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
finding = f"{after.mean():.1f} % with own heads, {before.mean():.1f} % with the shared one"
about = "Five clients that were not in training."
figure, ((ax,),) = style.new(f"Unseen clients: {finding}", about, size=(8.5, 3.0))
style.frame(ax, "accuracy on the client's test images, %")
places = range(UNSEEN)
ax.hlines(places, before[order], after[order], color=COLOURS[0], lw=3, alpha=0.3)
ax.scatter(before[order], places, color=GREY, s=70, label="the shared head", zorder=3)
ax.scatter(after[order], places, color=COLOURS[0], s=70, label="its own head", zorder=4)
ax.set_yticks(places, [f"holds {held}" for held in digits])
ax.set_ylim(-0.5, UNSEEN - 0.5)
style.key(ax, loc="best")
options.output.mkdir(parents=True, exist_ok=True)
figure.savefig(options.output / "figure.png", dpi=100)
style.save_svg(figure, options.output / "figure.svg")
print(f"\nThe figure is {options.output / 'figure.png'}")

# %% [markdown]
# Each line is a client. The shared head has to tell ten digits apart; a client's own head starts
# from it and learns which two there are. If clients have all digits there is nothing to gain: with
# `partition.dirichlet(labels, clients=20, alpha=0.5)`, own heads were no better. Nor is the hidden
# layer what matters here: heads of their own do as well on a random one, as the table shows.
