"""The figure: bias against heterogeneity, accuracy against the share of hostile clients."""

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from tables import percent

from simfbo.runs import style
from simfbo.runs.palette import COLOURS, GREY, INK, WHITE

STYLES = {
    "mean": (INK, "-", "o"),
    "trimmed-mean 0.1": (COLOURS[8], "-", "v"),
    "trimmed-mean 0.2": (COLOURS[0], "-", "^"),
    "median": (COLOURS[1], "-", "s"),
    "clipped-mean": (COLOURS[4], "-", "D"),
    "mean, gate": (INK, "--", "o"),
    "mean of the honest": (GREY, "-", ""),
}


def line(ax: Axes, name: str, values: list[list[float]]) -> style.Label:
    """Draw means with their standard deviations over evenly spaced places."""
    colour, dashes, marker = STYLES[name]
    places, centre = range(len(values)), [mean(v) for v in values]
    spread = [stdev(v) for v in values]
    low = [c - s for c, s in zip(centre, spread, strict=True)]
    high = [c + s for c, s in zip(centre, spread, strict=True)]
    ax.fill_between(places, low, high, color=colour, alpha=0.12, lw=0)
    hollow = WHITE if dashes == "--" else colour
    ax.plot(places, centre, dashes, color=colour, marker=marker, ms=5, mfc=hollow,
            lw=1.7 if marker else 6, zorder=3 if marker else 1)  # fmt: skip
    return style.Label(name, list(places), centre, colour, bold=bool(marker))


def finding(results: dict[str, Any]) -> str:
    """Return what the median costs where nobody attacks, and what a limit saves where some do."""
    seeds = results["attacks"]["everyone"]["shards"]
    none, most = min(seeds[0]["mean"], key=float), max(seeds[0]["mean"], key=float)
    lost = mean(percent(seeds, "mean", none)) - mean(percent(seeds, "median", none))
    gate, median = (mean(percent(seeds, name, most)) for name in ("mean, gate", "median"))
    return (
        f"On label shards the median costs {lost:.0f} points where nobody attacks; with"
        f" {100 * float(most):.0f} % hostile it ends at {median:.0f} %, the mean behind a norm"
        f" limit at {gate:.0f} %"
    )


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw three panels, a line for each aggregator."""
    figure, (axes,) = style.new(
        finding(results),
        "Means and standard deviations: distance from the solution of ten quadratics, and test"
        " accuracy of digits over three seeds.",
        size=(9.8, 3.6), columns=3,
    )  # fmt: skip
    bias = results["bias"]["normal"]
    drawn = [[line(axes[0], name, list(row.values())) for name, row in bias.items()]]
    style.frame(axes[0], "heterogeneity of honest clients", "distance from x*", "No attack")
    axes[0].set_xticks(range(len(bias["mean"])), list(bias["mean"]))
    for ax, (kind, seeds) in zip(axes[1:], results["attacks"]["everyone"].items(), strict=True):
        shares = list(seeds[0]["mean"])
        drawn.append([line(ax, name, [percent(seeds, name, s) for s in shares]) for name in STYLES])
        up = "test accuracy, %" if kind == "iid" else ""
        style.frame(ax, "share of hostile clients", up, f"Under attack, {kind}")
        ax.set_xticks(range(len(shares)), [f"{100 * float(share):.0f} %" for share in shares])
        ax.set_ylim(0, 101)
    for ax, labels in ((axes[0], drawn[0]), (axes[2], drawn[2])):
        style.label_lines(ax, labels, size=8.5)
    style.save_svg(figure, file)
