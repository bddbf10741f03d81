"""Tables and figures of what `theory` measured."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from simfbo.experiments.grid import Cell
from simfbo.runs import report

_MEASURED = "mean_grad_norm_squared"
_KINDS = {0.0: "clients alike", 1.0: "clients that differ"}
_DISTANCES = {"to_phi": "to Φ's point", "to_phi_tilde": "to Φ~'s point"}


def speedup_table(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return the mean over seeds for every P, a column per tau."""
    rows = []
    for h, P in dict.fromkeys((cell["heterogeneity"], cell["P"]) for cell in cells):
        here = _where(cells, heterogeneity=h, P=P)
        taus = dict.fromkeys(cell["tau"] for cell in here)
        values = {tau: [c[_MEASURED] for c in _where(here, tau=tau)] for tau in taus}
        means = {f"τ = {tau}": _spread(values[tau]) for tau in taus}
        rows.append({"": _KINDS[h], "P": str(P), **means})
    return rows


def exponent_table(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return the exponents of P and tau, with 95 % intervals, next to Theorem 1's."""
    n = cells[0]["clients"]
    alike, differ = _where(cells, heterogeneity=0.0), _where(cells, heterogeneity=1.0)
    some = [cell for cell in differ if cell["P"] < n]
    return [
        _exponents("clients alike", alike, "−1/2", "−1/2"),  # noqa: RUF001
        _exponents(f"clients that differ, P < {n}", some, "−1/2", "1/2 (sampling), −1/2 (noise)"),  # noqa: RUF001
        _exponents(f"clients that differ, all {n}", _where(differ, P=n), "", "−1/2"),  # noqa: RUF001
    ]


def exponents(cells: Sequence[Cell]) -> dict[str, tuple[float, float]]:
    """Return exponent and half-width of its 95 % interval for P and tau, by least squares of logs.

    A variable that does not vary has no exponent.
    """
    varied = [key for key in ("P", "tau") if len({cell[key] for cell in cells}) > 1]
    columns = [np.log([cell[key] for cell in cells]) for key in varied]
    design = np.stack([np.ones(len(cells)), *columns], axis=1)
    logs = np.log([cell[_MEASURED] for cell in cells])
    found, *_ = np.linalg.lstsq(design, logs, rcond=None)
    freedom = len(cells) - design.shape[1]
    variance = np.sum((logs - design @ found) ** 2) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    half = stats.t.ppf(0.975, freedom) * errors
    return {key: (float(found[i]), float(half[i])) for i, key in enumerate(varied, 1)}


def _exponents(name: str, cells: Sequence[Cell], of_P: str, of_tau: str) -> dict[str, str]:
    found = exponents(cells)
    shown = {key: f"{value:+.2f} ± {half:.2f}" for key, (value, half) in found.items()}
    return {
        "exponent of": name,
        "P": shown.get("P", ""),
        "P in the bound": of_P,
        "τ": shown.get("tau", ""),
        "τ in the bound": of_tau,
    }


def draw_speedup(cells: Sequence[Cell]) -> Figure:
    """Draw the measured mean against P, a line per tau, a panel per kind of clients."""
    kinds = list(dict.fromkeys(cell["heterogeneity"] for cell in cells))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, len(kinds), squeeze=False)[0]
    for ax, h in zip(axes, kinds, strict=True):
        here = _where(cells, heterogeneity=h)
        for i, tau in enumerate(dict.fromkeys(cell["tau"] for cell in here)):
            _line(ax, _where(here, tau=tau), report.COLOURS[i], f"τ = {tau}")
        _slope(ax, here)
        report.style(ax, f"P of {here[0]['clients']} clients ({_KINDS[h]})")
    axes[0].set_ylabel(f"mean of |∇Φ|² over {cells[0]['rounds']:,} rounds")
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _line(ax: Any, cells: Sequence[Cell], colour: str, label: str) -> None:
    """Draw means over seeds with their standard deviations."""
    groups = {P: [c[_MEASURED] for c in _where(cells, P=P)] for P in dict.fromkeys(
        cell["P"] for cell in cells)}  # fmt: skip
    deviations = [stdev(v) if len(v) > 1 else 0 for v in groups.values()]
    ax.errorbar(list(groups), [mean(v) for v in groups.values()], deviations, color=colour,
                marker="o", ms=4, lw=1.6, capsize=2, label=label)  # fmt: skip
    ax.set_xscale("log")
    ax.set_xticks(list(groups), [str(P) for P in groups])
    ax.set_xticks([], minor=True)
    ax.set_yscale("log")


def _slope(ax: Any, cells: Sequence[Cell]) -> None:
    """Draw the slope -1/2 through the first point, to compare with."""
    sizes = np.array(sorted({cell["P"] for cell in cells}), float)
    start = mean(c[_MEASURED] for c in _where(cells, P=int(sizes[0]), tau=1))
    ax.plot(sizes, start * (sizes / sizes[0]) ** -0.5, color="#888", ls=":", lw=1,
            label="slope −1/2")  # fmt: skip  # noqa: RUF001


def mismatch_table(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return where each method ends, as a share of the distance between the two points."""
    rows = []
    for method, eta in dict.fromkeys((cell["method"], cell["eta"]) for cell in cells):
        here = _where(cells, method=method, eta=eta)
        shares = {
            f"{text}, %": _spread([100 * cell[key] / cell["apart"] for cell in here], "{:.1f}")
            for key, text in _DISTANCES.items()
        }
        rows.append({"method": _label(method), "η": f"{eta:g}", **shares, "seeds": str(len(here))})
    return rows


def draw_mismatch(cells: Sequence[Cell]) -> Figure:
    """Draw the distances against the local step, a panel per method."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, method in zip(axes, ("simfbo", "shrofbo"), strict=True):
        here = _where(cells, method=method)
        etas = sorted({cell["eta"] for cell in here})
        for (key, text), colour in zip(_DISTANCES.items(), report.COLOURS, strict=False):
            shares = [[c[key] / c["apart"] for c in _where(here, eta=eta)] for eta in etas]
            ax.plot(etas, [np.mean(s) for s in shares], color=colour, marker="o", ms=4, label=text)
            low, high = ([np.quantile(s, q) for s in shares] for q in (0.1, 0.9))
            ax.fill_between(etas, low, high, color=colour, alpha=0.2, lw=0)
        ax.plot(etas, np.array(etas) / etas[-1] * 0.1, color="#888", ls=":", lw=1, label="slope 1")
        report.style(ax, f"local step η ({_label(method)})")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(etas, [f"{eta:g}" for eta in etas])
        ax.set_xticks([], minor=True)
    axes[0].set_ylabel("distance at the end / distance of the points")
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _label(method: str) -> str:
    return {"simfbo": "SimFBO", "shrofbo": "ShroFBO"}[method]


def _where(cells: Sequence[Cell], **values: Any) -> list[Cell]:
    """Return the cells with these values."""
    return [cell for cell in cells if cell.items() >= values.items()]


def _spread(values: Sequence[float], form: str = "{:.3g}") -> str:
    """Return mean and standard deviation."""
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(mean(values)) + spread
