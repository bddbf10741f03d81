"""The benchmark in the project's README: what an accuracy costs on iid MNIST, four methods.

python benchmarks/mnist-iid/readme_figure.py

Reads the committed histories under results/ and writes docs/figure-readme.svg. Every number in the
title and next to a line is computed from them; costs agree with table.md.
"""

from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from simfbo.config import methods as _  # noqa: F401  # fills the catalogue
from simfbo.config.catalogue import colour_of
from simfbo.runs import style
from simfbo.runs.history import History
from simfbo.runs.palette import MUTED, WHITE
from simfbo.studies.figures import band
from simfbo.studies.tables import firsts, megabytes

HERE = Path(__file__).parent
OUTPUT = HERE.parent.parent / "docs" / "figure-readme.svg"
METRIC, TARGET = "test_accuracy", 0.97
# The runs, and the method whose colour they have.
LINES = {
    "SimFBO": ("simfbo-paper", "simfbo"),
    "LFedNest": ("lfednest", "lfednest"),
    "FBO-AggITD": ("aggitd", "aggitd"),
    "FedNest": ("fednest", "fednest"),
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


def draw_line(ax: Axes, name: str, size: float | None) -> style.Label:
    """Draw a method's mean and band, and a ring where it reaches the target."""
    folder, method = LINES[name]
    histories, colour, main = runs(folder), colour_of(method), name == "SimFBO"
    sent = [[megabytes(record) for record in history.records] for history in histories]
    grid, middle, half = band(sent, [history.column(METRIC) for history in histories])
    grid, middle, half = grid[1:], middle[1:], half[1:]  # nothing is sent at the start
    ax.fill_between(grid, middle - half, middle + half, color=colour, alpha=0.14, lw=0)
    ax.plot(grid, middle, color=colour, lw=3 if main else 2, zorder=4 if main else 3)
    if size is not None:
        ax.plot(size, TARGET, "o", color=WHITE, mec=colour, mew=2, ms=8, zorder=5)
    text = f"{name}: {'run ends' if size is None else amount(size)}"
    return style.Label(text, grid, middle, colour, bold=True)


def frame(ax: Axes) -> None:
    """Set limits and ticks, and draw the target."""
    style.frame(ax, "data sent, server and clients together (log scale)", "test accuracy")
    ax.set(xscale="log", xlim=(220, 140_000), ylim=(0.88, 0.988))
    ax.axhline(TARGET, color=MUTED, lw=1, ls=(0, (4, 4)), zorder=1)
    ax.set_xticks(ticks := [300, 1000, 3000, 10_000, 30_000, 100_000], list(map(amount, ticks)))
    ax.set_xticks([], minor=True)
    style.per_cent(ax.yaxis)


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
    found = {name: cost(runs(folder)) for name, (folder, _method) in LINES.items()}
    costs = {name: size for name, size in found.items() if size is not None}
    figure, ((ax,),) = style.new(*titles(costs), size=(8, 3.9))
    frame(ax)
    labels = [draw_line(ax, name, size) for name, size in found.items()]
    style.label_lines(ax, labels, size=11)
    style.save_svg(figure, OUTPUT)
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size / 1000:.0f} kB, {costs}")


if __name__ == "__main__":
    main()
