"""The figure in the project's README: what an accuracy costs on iid MNIST, four methods.

python benchmarks/mnist-iid/readme_figure.py

Reads the committed histories under results/ and writes docs/figure-readme.png. Every number in the
title and next to a line is computed from them; costs agree with table.md.
"""

from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simfbo.config import methods as _  # noqa: F401  # fills the catalogue
from simfbo.config.catalogue import colour_of
from simfbo.runs.history import History
from simfbo.studies.figures import band
from simfbo.studies.tables import firsts, megabytes

HERE = Path(__file__).parent
OUTPUT = HERE.parent.parent / "docs" / "figure-readme.png"
METRIC, TARGET = "test_accuracy", 0.97
# The runs, the method whose colour they have, and where the label goes: megabytes and per cent.
LINES = {
    "SimFBO": ("simfbo-paper", "simfbo", (15_500, 97.35)),
    "LFedNest": ("lfednest", "lfednest", (8_300, 96.45)),
    "FBO-AggITD": ("aggitd", "aggitd", (140_000, 98.1)),
    "FedNest": ("fednest", "fednest", (140_000, 95.3)),
}


def runs(name: str) -> list[History]:
    """Load the runs of one setting, one per seed."""
    return [History.load(file) for file in sorted((HERE / "results").glob(f"{name}-seed?.jsonl"))]


def cost(histories: list[History]) -> float | None:
    """Return the mean megabytes until the target; None unless every seed reached it."""
    found = firsts(histories, METRIC, TARGET)
    return None if None in found else mean(map(megabytes, filter(None, found)))


def amount(size: float) -> str:
    """Return megabytes as people write them."""
    return f"{size:,.0f} MB" if size < 1000 else f"{size / 1000:,.0f} GB"


def draw_line(ax: Axes, name: str) -> float | None:
    """Draw a method's mean and band with its label; return what the target cost it."""
    folder, method, place = LINES[name]
    histories, colour, main = runs(folder), colour_of(method), name == "SimFBO"
    sent = [[megabytes(record) for record in history.records] for history in histories]
    grid, middle, half = band(sent, [history.column(METRIC) for history in histories])
    grid, middle, half = grid[1:], 100 * middle[1:], 100 * half[1:]  # nothing is sent at the start
    ax.fill_between(grid, middle - half, middle + half, color=colour, alpha=0.14, lw=0)
    ax.plot(grid, middle, color=colour, lw=3 if main else 2, zorder=4 if main else 3)
    size = cost(histories)
    label = name if size is None else f"{name}: {amount(size)}"
    ax.text(*place, label, color=colour, fontsize=13, fontweight="bold", ha="right")
    if size is not None:
        ax.plot(size, 100 * TARGET, "o", color="white", mec=colour, mew=2, ms=8, zorder=5)
    return size


def frame(ax: Axes) -> None:
    """Label the axes and remove what nobody reads."""
    ax.set_xscale("log")
    ax.set_xlim(220, 140_000)
    ax.set_ylim(88, 98.8)
    ax.axhline(100 * TARGET, color="#999999", lw=1, ls=(0, (4, 4)), zorder=1)
    ax.set_xticks(ticks := [300, 1000, 3000, 10_000, 30_000, 100_000], list(map(amount, ticks)))
    ax.set_xticks([], minor=True)
    ax.set_yticks(range(88, 99, 2), [f"{percent} %" for percent in range(88, 99, 2)])
    ax.tick_params(labelsize=11, length=0)
    ax.set_xlabel("data sent, server and clients together (log scale)", fontsize=12)
    ax.set_ylabel("test accuracy", fontsize=12)
    ax.grid(alpha=0.2)
    ax.spines[["top", "right"]].set_visible(False)


def titles(costs: dict[str, float]) -> tuple[str, str]:
    """Return the finding in one sentence, with the numbers measured, and what it is about."""
    others = {name: size / costs["SimFBO"] for name, size in costs.items() if name != "SimFBO"}
    low, high = (int(10 * ratio) / 10 for ratio in (min(others.values()), max(others.values())))
    finding = (
        f"SimFBO reaches {100 * TARGET:.0f} % on MNIST with {low} to {high} times less traffic"
    )
    setting = f"than {' and '.join(others)}; 100 clients, ten per round, three seeds, 95 % bands"
    return finding, setting


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ax = figure.subplots()
    found = {name: draw_line(ax, name) for name in LINES}
    costs = {name: size for name, size in found.items() if size is not None}
    frame(ax)
    finding, setting = titles(costs)
    ax.set_title(setting, loc="left", fontsize=11.5, color="#555555", pad=8, x=-0.083)
    figure.suptitle(finding, x=0.01, ha="left", fontsize=15, fontweight="bold")
    figure.savefig(OUTPUT, dpi=110)
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size / 1000:.0f} kB, {costs}")


if __name__ == "__main__":
    main()
