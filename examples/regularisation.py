"""Learn an L2 penalty for every feature."""

# %% [markdown]
# # Which features matter when records cannot be pooled?
#
# Twenty clinics predict the same outcome from the same forty measurements. Each has fifteen
# patients, far too few to tell useful measurements from useless ones alone. One L2 penalty for all
# features either keeps the useless ones or suppresses the useful ones. Here every feature gets its
# own penalty, chosen by a cross-validation across the clinics.

# %%
import argparse
import sys
from pathlib import Path

import numpy as np

from simfbo import SimulatedFederation, solve
from simfbo.runs import style
from simfbo.runs.palette import COLOURS, MUTED
from simfbo.tasks import baselines, penalties, regularisation, samples

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path("runs/example-regularisation"))
parser.add_argument("--rounds", type=int, help="500, or 60 if small")
parser.add_argument("--small", action="store_true", help="run for seconds rather than a minute")
options = parser.parse_args([] if "ipykernel" in sys.modules else None)
rounds = options.rounds or (60 if options.small else 500)

# %% [markdown]
# ## The data and the clients
#
# The rows are synthetic, so the truth is known: 8 of the 40 features matter. Each client's features
# have a different shift. A table with natural clients works too:
# `samples.from_table(simfbo.datasets.load_table("schools"))` has 160 schools and their pupils.
# Which features matter is unknown there: `held.relevant` is None and all dots have one colour.

# %%
held = samples.synthetic(clients=20, per_client=15, features=40, relevant=8)
task = regularisation(held.samples, held.parts, relevant=held.relevant, floor=0.01)

# %% [markdown]
# ## The run
#
# SimFBO learns the forty penalties and the model at the same time. Step sizes are chosen
# automatically.

# %%
history = solve(task, rounds=rounds)
learnt = penalties(history.state.x, floor=0.01)

# %% [markdown]
# ## Without a bilevel method
#
# The same clients train by FedAvg: with one penalty for all features, with the best of twenty, and
# with only the features that matter, which nobody knows beforehand. No baseline sends more bytes
# than the run did; the twenty candidates share that budget.

# %%
if options.small:
    task = task._replace(baselines=task.baselines[:1])
last = history.records[-1]
outcomes = baselines.compare(
    task, SimulatedFederation, rounds=rounds, budget=last["bytes_down"] + last["bytes_up"]
)
print(baselines.table(outcomes, "SimFBO, a penalty per feature", last, task.metric))

# %% [markdown]
# ## The figure

# %%
order = np.argsort(learnt)
relevant = np.zeros(len(order), bool) if held.relevant is None else held.relevant[order]
finding = f"The penalties learnt lie between {learnt.min():.2g} and {learnt.max():.2g}"
if held.relevant is not None:
    least, most = learnt[~held.relevant].min(), learnt[held.relevant].max()
    finding = f"Features that matter get penalties up to {most:.2g}, the others from {least:.2g}"
about = f"{len(order)} features, of which {relevant.sum()} matter; 20 clients."
figure, ((ax,),) = style.new(finding, about, size=(8.5, 3.8))
style.frame(ax, "features, sorted by penalty", "L2 penalty learnt")
for matters, name, colour in (
    (True, "matters", COLOURS[0]),
    (False, "does not matter", COLOURS[1]),
):
    places = np.flatnonzero(relevant == matters)
    values = learnt[order][places]
    ax.vlines(places, 0.01, values, color=colour, lw=2, alpha=0.4)
    ax.scatter(places, values, color=colour, s=36, zorder=3, label=name)
if len(outcomes) > 1:  # the second is the best of twenty
    best = task.baselines[1].candidates[outcomes[1].chosen]
    ax.axhline(penalties(best, floor=0.01)[0], color=MUTED, ls="--", lw=1.4, zorder=1,
               label="one penalty for all, best of 20")  # fmt: skip
ax.set(yscale="log", xlim=(-1, len(order)))
style.numbers(ax.yaxis)
style.key(ax, loc="upper left")
options.output.mkdir(parents=True, exist_ok=True)
figure.savefig(options.output / "figure.png", dpi=100)
style.save_svg(figure, options.output / "figure.svg")
print(f"\nThe figure is {options.output / 'figure.png'}")

# %% [markdown]
# Each dot is a feature. The eight that matter keep small penalties; most of the others get such
# large ones that they are shut off. A single penalty cannot do both, so the search has to keep the
# useless features. If all features matter a little, or if there are only a few, one penalty is as
# good, and simpler.
