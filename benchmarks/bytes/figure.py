"""Draw figure.svg, accuracy against megabytes sent: `python benchmarks/bytes/figure.py`."""

from pathlib import Path
from statistics import mean

import numpy as np
from matplotlib.axes import Axes

from simfbo.experiments.experiment import Part, load
from simfbo.experiments.results import loaded
from simfbo.runs import style
from simfbo.runs.palette import COLOURS, MUTED
from simfbo.runs.report import size
from simfbo.studies.tables import firsts, megabytes

HERE = Path(__file__).parent
PAPER, LOCAL, CODED, FEDAVG = "paper's settings", "local work", "local work, coded", "FedAvg, coded"
PANELS = {
    "mnist-iid": ("MNIST, iid", (0.9, 0.98), {
        "paper": PAPER, "local": LOCAL, "small": CODED, "fedavg-small": FEDAVG}),
    "mnist-shards": ("MNIST, two label shards", (0.8, 0.98), {
        "paper": PAPER, "shards": LOCAL, "shards-97": CODED, "shards-fedavg": FEDAVG}),
    "cifar-iid": ("CIFAR-10, iid", (0.3, 0.68), {"cifar-coded": CODED}),
}  # fmt: skip
LOOKS = {PAPER: (MUTED, "-"), LOCAL: (COLOURS[0], "--"), CODED: (COLOURS[0], "-"),
         FEDAVG: (COLOURS[4], "-.")}  # fmt: skip
TARGET = 0.974


def spent(part: Part, name: str) -> float:
    """Return the mean bytes until the target."""
    found = firsts(loaded(part, name, HERE), "test_accuracy", TARGET)
    return 1e6 * mean(megabytes(record) for record in found)


def titles(iid: Part) -> tuple[str, str]:
    """Return what was found on iid MNIST, and what the figure shows."""
    paper, coded = spent(iid, "paper"), spent(iid, "small")
    return (
        f"Local work and coded messages take MNIST to {100 * TARGET:g} % with {size(int(coded))}"
        f" instead of {size(int(paper))}",
        "Test accuracy, means over seeds; bands reach from the worst seed to the best. Lines are"
        " SimFBO in float32 unless they say otherwise.",
    )


def draw_line(ax: Axes, part: Part, name: str, label: str) -> style.Label:
    """Draw the mean of a method's runs, and the range of them."""
    histories = loaded(part, name, HERE)
    places = np.mean([[megabytes(r) for r in h.records] for h in histories], 0)[1:]
    values = np.array([h.column("test_accuracy") for h in histories])[:, 1:]
    colour, dashes = LOOKS[label]
    ax.plot(places, values.mean(0), dashes, color=colour, lw=1.8)
    ax.fill_between(places, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
    return style.Label(label, places, values.mean(0), colour, bold=True)


def main():
    parts = {part.name: part for part in load("bytes").parts}
    figure, (axes,) = style.new(*titles(parts["mnist-iid"]), size=(9.8, 3.4), columns=3)
    for ax, (name, (title, limits, lines)) in zip(axes, PANELS.items(), strict=True):
        style.frame(ax, "megabytes sent, both ways", heading=title)
        drawn = [draw_line(ax, parts[name], line, label) for line, label in lines.items()]
        ax.set(xscale="log", ylim=limits)
        style.numbers(ax.xaxis)
        style.per_cent(ax.yaxis)
        if ax is not axes[0]:  # whose lines are those of the second
            style.label_lines(ax, drawn)
    axes[0].set_ylabel("test accuracy")
    style.save_svg(figure, HERE / "figure.svg")


if __name__ == "__main__":
    main()
