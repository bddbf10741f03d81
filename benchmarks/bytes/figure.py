"""Draw figure.png, accuracy against megabytes sent: `python benchmarks/bytes/figure.py`."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from simfbo.experiments.experiment import load
from simfbo.experiments.results import loaded
from simfbo.runs import report
from simfbo.studies.tables import megabytes

HERE = Path(__file__).parent
PANELS = {
    "mnist-iid": ("MNIST, iid", (0.9, 0.98), {
        "paper": "paper's settings, float32", "local": "local work, float32",
        "small": "local work, coded", "fedavg-small": "FedAvg, coded"}),
    "mnist-shards": ("MNIST, two label shards", (0.8, 0.98), {
        "paper": "paper's settings, float32", "shards": "local work, float32",
        "shards-97": "local work, coded", "shards-fedavg": "FedAvg, coded"}),
    "cifar-iid": ("CIFAR-10, iid", (0.3, 0.68), {
        "cifar-coded": "local work, coded"}),
}  # fmt: skip
LOOKS = {
    "paper's settings, float32": ("#7f7f7f", "-"),
    "local work, float32": ("#0072b2", "--"),
    "local work, coded": ("#0072b2", "-"),
    "FedAvg, coded": ("#d55e00", "-."),
}


def main():
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = dict(zip(PANELS, figure.subplots(1, 3), strict=True))
    for part in load("bytes").parts:
        if part.name not in PANELS:
            continue
        (title, limits, lines), ax = PANELS[part.name], axes[part.name]
        for name, label in lines.items():
            histories = loaded(part, name, HERE)
            places = np.mean([[megabytes(r) for r in h.records] for h in histories], 0)
            values = np.array([h.column("test_accuracy") for h in histories])
            colour, style = LOOKS[label]
            ax.plot(places[1:], values.mean(0)[1:], style, color=colour, lw=1.8, label=label)
            low, high = values.min(0)[1:], values.max(0)[1:]
            ax.fill_between(places[1:], low, high, color=colour, alpha=0.15, lw=0)
        report.style(ax, "megabytes sent, both ways")
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_ylim(*limits)
        ax.set_title(title, fontsize=11)
    axes["mnist-iid"].set_ylabel("test accuracy")
    handles, names = axes["mnist-iid"].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(HERE / "figure.png", dpi=110)


if __name__ == "__main__":
    main()
