"""Learn which labels to trust."""

# %% [markdown]
# # Whose labels can be trusted?
#
# Twenty clients label images of digits, some carefully and some at random: half of all labels are
# wrong, and nobody knows which. For each client, an expert has checked five images. Here the
# federation learns from those hundred checked labels how far to trust each of the others, while it
# trains on them.

# %%
import argparse
import sys
from pathlib import Path

import numpy as np

from simfbo import SimulatedFederation, datasets, partition, solve
from simfbo.runs import style
from simfbo.runs.palette import COLOURS, MUTED
from simfbo.tasks import baselines, label_cleaning, label_noise, samples, trust_in

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path("runs/example-label-cleaning"))
parser.add_argument("--rounds", type=int, help="500, or 80 if small")
parser.add_argument("--small", action="store_true", help="run for seconds rather than a minute")
options = parser.parse_args([] if "ipykernel" in sys.modules else None)
rounds = options.rounds or (80 if options.small else 500)

# %% [markdown]
# ## The data and the clients
#
# 1,437 digits of 8 x 8 pixels, dealt to twenty clients at random. The task replaces labels by wrong
# ones, at a different rate for each client between 0 and 100 %. The last two lines draw the same
# noise again, for the figure only: the run does not see them.

# %%
rows = samples.from_images(datasets.load("digits"))
parts = partition.iid(len(rows.target), clients=20)
task = label_cleaning(rows, parts, wrong=0.5, clean=100, trust="network")

lower, _ = label_noise.set_apart(parts, count=100, seed=0)
noisy = label_noise.corrupted(rows.target, lower, share=0.5, classes=rows.classes, seed=0)

# %% [markdown]
# ## The run
#
# The trust in a label is a small network of one number: how badly the label fits a model trained on
# all labels. So the upper variable has 25 numbers, however many labels there are.

# %%
history = solve(task, rounds=rounds)
state, owner = history.state, samples.owners(parts, len(rows.target))
batch = (rows.features, noisy.labels, owner)
trust = np.asarray(trust_in(state.x, state.y, batch, rows.classes))

# %% [markdown]
# ## Without a bilevel method
#
# The same clients train by FedAvg: on all labels as they are, on the checked ones only, on all with
# the best of eight penalties, and on correct labels only, which nobody has. No baseline sends more
# bytes than the run did.

# %%
if options.small:
    task = task._replace(baselines=task.baselines[:1])
last = history.records[-1]
outcomes = baselines.compare(
    task, SimulatedFederation, rounds=rounds, budget=last["bytes_down"] + last["bytes_up"]
)
print(baselines.table(outcomes, "SimFBO, trust learnt", last, task.metric))

# %% [markdown]
# ## The figure

# %%
unchecked = np.concatenate(lower)
found, wrong = trust[unchecked], noisy.wrong[unchecked]
right_found, wrong_found = (100 * np.mean(part > 0.5) for part in (found[~wrong], found[wrong]))
finding = f"{right_found:.0f} % of the right labels, {wrong_found:.0f} % of the wrong ones"
about = f"Left: the mean of each of 20 clients. Right: each of {len(found):,} labels."
figure, ((left, right),) = style.new(
    f"Trust above one half: {finding}", about, size=(9, 3.4), columns=2
)
shares = np.array([noisy.wrong[own].mean() for own in lower])
style.frame(left, "wrong labels of the client, %", "mean trust in the client's labels")
left.plot([0, 100], [1, 0], color=MUTED, ls="--", lw=1.4, label="the share of right labels")
left.scatter(100 * shares, [trust[own].mean() for own in lower], color=COLOURS[0], s=40, zorder=3)
style.key(left, loc="lower left")

style.frame(right, "trust in the label", "labels (logarithmic)")
right.hist([found[~wrong], found[wrong]], bins=np.linspace(0, 1, 11), color=COLOURS[:2],
           label=["right labels", "wrong labels"], log=True)  # fmt: skip
right.set_xlim(0, 1)
style.numbers(right.yaxis)
style.key(right, loc="upper center")
options.output.mkdir(parents=True, exist_ok=True)
figure.savefig(options.output / "figure.png", dpi=100)
style.save_svg(figure, options.output / "figure.svg")
print(f"\nThe figure is {options.output / 'figure.png'}")

# %% [markdown]
# Left: the federation finds out who labels carefully, although the network does not know which
# client a label comes from. Right: few labels are in between, and few on the wrong side; note the
# logarithmic scale. Wrong labels are random here. If one class is always mistaken for another,
# wrong labels can fit the model as well as correct ones, and trust based on the fit does not find
# them.
