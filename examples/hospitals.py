"""Predict for a hospital that took no part in training."""

# %% [markdown]
# # Does a model trained by other hospitals work in ours?
#
# Eight hospitals keep their records to themselves. A ninth wants to use the model that they train
# together, so it is judged as such models should be: each hospital in turn is left out, the others
# train, and the model predicts the rows of the one that it has never seen. The tables have text,
# gaps and a skewed measurement, and everything runs in scikit-learn's own tools: a pipeline with a
# `ColumnTransformer`, `GridSearchCV` and `cross_validate`.

# %%
import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn import set_config
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, GroupKFold, LeaveOneGroupOut, cross_validate
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer

from simfbo.estimators import FederatedLogistic, FederatedTabular
from simfbo.runs import style
from simfbo.runs.palette import COLOURS, MUTED

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", type=Path, default=Path("runs/example-hospitals"))
parser.add_argument("--small", action="store_true", help="fewer hospitals and rounds")
options = parser.parse_args([] if "ipykernel" in sys.modules else None)

# %% [markdown]
# ## The tables
#
# The rows are synthetic. Hospitals differ in their patients, in their wards and in how often they
# measure the blood pressure; the outcome depends on age, lactate and surgery everywhere in the same
# way. Ten further measurements have nothing to do with it.

# %%
rng = np.random.default_rng(0)
NAMES = ["North", "East", "South", "West", "Lake", "Hill", "Park", "Port"]
NAMES = NAMES[:3] if options.small else NAMES
WARDS = ["surgery", "medicine", "oncology", "neurology"]


def records(name: str, rows: int) -> pd.DataFrame:
    """Return the records of one hospital, with the outcome."""
    frame = pd.DataFrame({
        "hospital": name,
        "age": rng.normal(60 + 8 * rng.normal(), 12, rows).round(),
        "lactate": rng.lognormal(0.5, 0.8, rows).round(2),
        "pressure": rng.normal(120, 15, rows).round(),
        "ward": rng.choice(WARDS, rows, p=rng.dirichlet(np.ones(4))),
    })  # fmt: skip
    frame.loc[rng.random(rows) < rng.uniform(0, 0.5), "pressure"] = np.nan
    frame[[f"test {j}" for j in range(10)]] = rng.normal(size=(rows, 10))
    score = (
        (frame["age"] - 60) / 12 + 1.5 * np.log(frame["lactate"]) + 2 * (frame["ward"] == "surgery")
    )
    return frame.assign(ill=rng.random(rows) < 1 / (1 + np.exp(1.5 - score)))


table = pd.concat([records(name, int(rng.integers(40, 120))) for name in NAMES], ignore_index=True)
hospital, ill = table.pop("hospital"), table.pop("ill")
print(table.assign(hospital=hospital).groupby("hospital").size().to_string())

# %% [markdown]
# ## The pipeline
#
# A logarithm needs no data, so any transformer will do. Categories, medians and scales do need
# them: `FederatedTabular` agrees on them over the hospitals without pooling rows, which is why it
# must know who holds which row, like the model behind it. scikit-learn routes `clients` to both.

# %%
set_config(enable_metadata_routing=True, transform_output="pandas")
TEXT_AND_GAPS = [name for name in table if name != "lactate"]
pipeline = Pipeline([
    ("columns", ColumnTransformer([
        ("logarithm", FunctionTransformer(np.log, feature_names_out="one-to-one"), ["lactate"]),
        ("tabular", FederatedTabular().set_fit_request(clients=True), TEXT_AND_GAPS),
    ])),
    ("model", FederatedLogistic(rounds=60 if options.small else 1000, random_state=0)
              .set_fit_request(clients=True, sample_weight=False)),
])  # fmt: skip

# %% [markdown]
# ## Leave one hospital out
#
# Twice: the inner search chooses how different the penalties may be, on hospitals that it sets
# aside among those that train, and the outer one measures. Rows of a hospital never judge a model
# that saw others of its rows.

# %%
search = GridSearchCV(
    pipeline, {"model__spread": [0.5, np.inf]}, scoring="neg_log_loss", cv=GroupKFold(2)
)
judged = cross_validate(
    search,
    table,
    ill,
    cv=LeaveOneGroupOut(),
    scoring="neg_log_loss",
    params={"clients": hospital, "groups": hospital},
    return_estimator=True,
)
order = np.unique(hospital)  # in which LeaveOneGroupOut takes them
federated = dict(zip(order, -judged["test_score"], strict=True))

# %% [markdown]
# ## Pooled, and alone
#
# What it would be if all rows of the other hospitals were in one place, and what a hospital gets
# that borrows the model of a single other one (the mean over them). Both are scikit-learn's, with
# the same columns.

# %%
pooled, alone = {}, {}
for name, found in zip(order, judged["estimator"], strict=True):
    columns = found.best_estimator_["columns"].transform(table)
    away = (hospital == name).to_numpy()

    def loss(rows: np.ndarray, columns: pd.DataFrame = columns, away: np.ndarray = away) -> float:
        """Return the loss on the hospital that is left out, of a model trained on these rows."""
        model = LogisticRegressionCV(
            Cs=np.geomspace(1e-3, 10, 9), cv=3, scoring="neg_log_loss", max_iter=2000,
            l1_ratios=(0,), use_legacy_attributes=False,
        )  # fmt: skip
        model.fit(columns[rows], ill[rows])
        return log_loss(ill[away], model.predict_proba(columns[away]))

    pooled[name] = loss(~away)
    others = [other for other in order if other != name]
    alone[name] = np.mean([loss((hospital == other).to_numpy()) for other in others])
results = pd.DataFrame({"federated": federated, "pooled": pooled, "one other hospital": alone})
print(results.round(3).to_string())
print(results.mean().round(3).to_string())

# %% [markdown]
# ## The figure

# %%
means = results.mean()
finding = (
    f"A hospital that took no part: loss {means['federated']:.2f}, pooled {means['pooled']:.2f}"
)
about = f"Log-loss on the rows of the hospital that was left out; {len(table)} rows in all."
figure, ((ax,),) = style.new(finding, about, size=(8.5, 3.8))
style.frame(ax, "hospital left out", "log-loss")
places = np.arange(len(results))
shown = (("one other hospital", MUTED), ("pooled", COLOURS[1]), ("federated", COLOURS[0]))
for shift, (name, colour) in zip((-0.15, 0.0, 0.15), shown, strict=True):
    ax.scatter(places + shift, results[name], color=colour, s=36, zorder=3, label=name)
ax.set_xticks(places, results.index)
ax.set_ylim(top=1.2 * results.to_numpy().max())
style.key(ax, loc="upper right", ncols=3)
options.output.mkdir(parents=True, exist_ok=True)
figure.savefig(options.output / "figure.png", dpi=100)
style.save_svg(figure, options.output / "figure.svg")
print(f"\nThe figure is {options.output / 'figure.png'}")
set_config(enable_metadata_routing=False, transform_output="default")

# %% [markdown]
# The federated model does about as well in a hospital that it has never seen as one for which all
# rows had been collected, and clearly better than what a single other hospital could offer. Where
# hospitals differ in what the outcome depends on, rather than in their patients only, no shared
# model helps much: look at the worst hospital, not at the mean.
