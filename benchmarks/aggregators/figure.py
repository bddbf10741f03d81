"""The figure: bias against heterogeneity, accuracy against the share of hostile clients."""

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import percent

STYLES = {
    "mean": ("#222222", "-", "o"),
    "trimmed-mean 0.1": ("#7fb8e6", "-", "v"),
    "trimmed-mean 0.2": ("#1f6fb4", "-", "^"),
    "median": ("#d1495b", "-", "s"),
    "clipped-mean": ("#e6a117", "-", "D"),
    "mean, gate": ("#222222", "--", "o"),
    "mean of the honest": ("#cfcfcf", "-", ""),
}


def line(ax: Axes, name: str, values: list[list[float]]) -> None:
    """Draw means with their standard deviations over evenly spaced places."""
    colour, dashes, marker = STYLES[name]
    places, centre = range(len(values)), [mean(v) for v in values]
    spread = [stdev(v) for v in values]
    low = [c - s for c, s in zip(centre, spread, strict=True)]
    high = [c + s for c, s in zip(centre, spread, strict=True)]
    ax.fill_between(places, low, high, color=colour, alpha=0.12, lw=0)
    hollow = "white" if dashes == "--" else colour
    ax.plot(places, centre, dashes, color=colour, marker=marker, ms=5, mfc=hollow, label=name,
            lw=1.7 if marker else 7, zorder=3 if marker else 1)  # fmt: skip


def frame(ax: Axes, title: str, along: str, up: str, ticks: list[str]) -> None:
    """Label the axes and take away what nobody reads."""
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    ax.set_xlabel(along)
    ax.set_ylabel(up)
    ax.set_xticks(range(len(ticks)), ticks)
    ax.grid(axis="y", color="#e4e4e4", lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw three panels with one legend."""
    with mpl.rc_context({"font.size": 9.5}):
        figure = Figure(figsize=(11, 4.3), layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)
        axes = figure.subplots(1, 3, width_ratios=(1.05, 1, 1))
        bias = results["bias"]["normal"]
        for name, row in bias.items():
            line(axes[0], name, list(row.values()))
        frame(axes[0], "No attack: where it ends", "heterogeneity of honest clients",
              "distance from the solution x*", list(bias["mean"]))  # fmt: skip
        for ax, (kind, seeds) in zip(axes[1:], results["attacks"]["everyone"].items(), strict=True):
            shares = list(seeds[0]["mean"])
            for name in STYLES:
                line(ax, name, [percent(seeds, name, share) for share in shares])
            ticks = [f"{float(share):.0%}" for share in shares]
            up = "test accuracy, %" if kind == "iid" else ""
            frame(ax, f"Under attack: {kind}", "share of hostile clients", up, ticks)
            ax.set_ylim(0, 101)
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
        figure.savefig(file, dpi=110)
