"""Tables and figures of the measurements in `theory`."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from simfbo.experiments.grid import Cell
from simfbo.runs import style
from simfbo.runs.palette import COLOURS, MUTED

_MEASURED = "mean_grad_norm_squared"
_KINDS = {0.0: "clients alike", 1.0: "clients that differ"}
_RAISED = str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹")
_DISTANCES = {"to_phi": "to Φ's point", "to_phi_tilde": "to Φ~'s point"}


def speedup_table(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return the mean over seeds for every P, a column per tau."""
    rows = []
    for h, P in dict.fromkeys((cell["heterogeneity"], cell["P"]) for cell in cells):
        selected = where(cells, heterogeneity=h, P=P)
        taus = dict.fromkeys(cell["tau"] for cell in selected)
        values = {tau: [c[_MEASURED] for c in where(selected, tau=tau)] for tau in taus}
        means = {f"τ = {tau}": _spread(values[tau]) for tau in taus}
        rows.append({"": _KINDS[h], "P": str(P), **means})
    return rows


def exponent_table(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return the exponents of P and tau, with 95 % intervals, next to Theorem 1's."""
    n = cells[0]["clients"]
    alike, differ = where(cells, heterogeneity=0.0), where(cells, heterogeneity=1.0)
    sampled = [cell for cell in differ if cell["P"] < n]
    return [
        _exponents("clients alike", alike, "−1/2", "−1/2"),  # noqa: RUF001
        _exponents(
            f"clients that differ, P < {n}",
            sampled,
            "−1/2",  # noqa: RUF001
            "1/2 (sampling), −1/2 (noise)",  # noqa: RUF001
        ),
        _exponents(f"clients that differ, all {n}", where(differ, P=n), "", "−1/2"),  # noqa: RUF001
    ]


def exponents(cells: Sequence[Cell]) -> dict[str, tuple[float, float]]:
    """Fit the exponents of P and tau, with half-widths of 95 % intervals, by least squares of logs.

    A constant variable has no exponent.
    """
    varied = [key for key in ("P", "tau") if len({cell[key] for cell in cells}) > 1]
    columns = [np.log([cell[key] for cell in cells]) for key in varied]
    design = np.stack([np.ones(len(cells)), *columns], axis=1)
    logs = np.log([cell[_MEASURED] for cell in cells])
    coefficients, *_ = np.linalg.lstsq(design, logs, rcond=None)
    freedom = len(cells) - design.shape[1]
    variance = np.sum((logs - design @ coefficients) ** 2) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    half = stats.t.ppf(0.975, freedom) * errors
    return {key: (float(coefficients[i]), float(half[i])) for i, key in enumerate(varied, 1)}


def _exponents(name: str, cells: Sequence[Cell], of_P: str, of_tau: str) -> dict[str, str]:
    fits = exponents(cells)
    shown = {key: f"{value:+.2f} ± {half:.2f}" for key, (value, half) in fits.items()}
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
    about = (
        f"Mean of |∇Φ|² over {cells[0]['rounds']:,} iterations on a quadratic, with standard "
        "deviations over seeds. τ: local steps of a client. Dotted: the rate 1/√P of Theorem 1."
    )
    figure, (axes,) = style.new(
        _speedup(cells), about, size=(9, 3.4), columns=len(kinds), sharey=True
    )
    labels: list[list[style.Label]] = []
    for ax, h in zip(axes, kinds, strict=True):
        selected = where(cells, heterogeneity=h)
        style.frame(
            ax,
            f"P, clients of {selected[0]['clients']} an exchange",
            heading=_KINDS[h].capitalize(),
        )
        taus = list(dict.fromkeys(cell["tau"] for cell in selected))
        lines = [
            _line(ax, where(selected, tau=tau), COLOURS[i], f"τ = {tau}")
            for i, tau in enumerate(taus)
        ]
        _slope(ax, selected)
        labels.append(lines)
    axes[0].set_ylabel("mean of |∇Φ|²")
    style.numbers(axes[0].yaxis, (1, 2, 5))
    for ax, lines in zip(axes, labels, strict=True):
        style.label_lines(ax, lines)
    return figure


def _speedup(cells: Sequence[Cell]) -> str:
    """State the fitted powers of P and tau, for identical and for heterogeneous clients."""
    alike = where(cells, heterogeneity=0.0)
    differ = [c for c in where(cells, heterogeneity=1.0) if c["P"] < c["clients"]]
    return (
        f"|∇Φ|² falls like {_powers(alike)} where clients are alike,"
        f" like {_powers(differ)} where they differ and some take part"
    )


def _powers(cells: Sequence[Cell]) -> str:
    names = {"P": "P", "tau": "τ"}
    fits = exponents(cells).items()
    return " ".join(f"{names[key]}{f'{value:.2f}'.translate(_RAISED)}" for key, (value, _) in fits)


def _line(ax: Any, cells: Sequence[Cell], colour: str, label: str) -> style.Label:
    """Draw means over seeds with their standard deviations."""
    groups = {
        P: [c[_MEASURED] for c in where(cells, P=P)]
        for P in dict.fromkeys(cell["P"] for cell in cells)
    }
    deviations = [stdev(v) if len(v) > 1 else 0 for v in groups.values()]
    means = [mean(v) for v in groups.values()]
    ax.errorbar(
        list(groups),
        means,
        deviations,
        color=colour,
        marker="o",
        ms=4,
        lw=1.8,
        capsize=2,
        label=label,
    )
    ax.set_xscale("log")
    ax.set_xticks(list(groups), [str(P) for P in groups])
    ax.set_xticks([], minor=True)
    ax.set_yscale("log")
    return style.Label(label, list(groups), means, colour, bold=True)


def _slope(ax: Any, cells: Sequence[Cell]) -> None:
    """Draw a line of slope -1/2 through the first point, for comparison."""
    sizes = np.array(sorted({cell["P"] for cell in cells}), float)
    start = mean(c[_MEASURED] for c in where(cells, P=int(sizes[0]), tau=1))
    ax.plot(sizes, start * (sizes / sizes[0]) ** -0.5, color=MUTED, ls=":", lw=1.2)


def mismatch_table(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return the final distances as shares of the distance between the two points."""
    rows = []
    for method, eta in dict.fromkeys((cell["method"], cell["eta"]) for cell in cells):
        selected = where(cells, method=method, eta=eta)
        shares = {
            f"{text}, %": _spread([100 * cell[key] / cell["apart"] for cell in selected], "{:.1f}")
            for key, text in _DISTANCES.items()
        }
        rows.append(
            {"method": _label(method), "η": f"{eta:g}", **shares, "seeds": str(len(selected))}
        )
    return rows


def draw_mismatch(cells: Sequence[Cell]) -> Figure:
    """Draw the distances against the local step, a panel per method."""
    methods = ("simfbo", "shrofbo")
    about = (
        "Distance from x at the end, in per cent of the distance between the two points. Lines are"
        " means, bands the middle 80 %. Dotted: proportional to η."
    )
    figure, (axes,) = style.new(
        _mismatch(cells, methods), about, size=(9, 3.4), columns=2, sharey=True
    )
    labels: list[list[style.Label]] = []
    for ax, method in zip(axes, methods, strict=True):
        style.frame(ax, "local step size η", heading=_label(method))
        selected = where(cells, method=method)
        etas = sorted({cell["eta"] for cell in selected})
        labels.append(
            [
                _distances(ax, selected, etas, key, text, COLOURS[i])
                for i, (key, text) in enumerate(_DISTANCES.items())
            ]
        )
        ax.plot(etas, np.array(etas) / etas[-1] * 0.1, color=MUTED, ls=":", lw=1.2)
        ax.set(xscale="log", yscale="log")
        ax.set_xticks(etas, [f"{eta:g}" for eta in etas])
        ax.set_xticks([], minor=True)
    style.per_cent(axes[0].yaxis)
    axes[0].set_ylabel("distance at the end")
    for ax, lines in zip(axes, labels, strict=True):
        style.label_lines(ax, lines)
    return figure


def _distances(
    ax: Any, cells: Sequence[Cell], etas: Sequence[float], key: str, text: str, colour: str
) -> style.Label:
    """Draw one distance against the local step."""
    shares = [[c[key] / c["apart"] for c in where(cells, eta=eta)] for eta in etas]
    means = [mean(s) for s in shares]
    ax.plot(etas, means, color=colour, marker="o", ms=4, lw=1.8)
    low, high = ([np.quantile(s, q) for s in shares] for q in (0.1, 0.9))
    ax.fill_between(etas, low, high, color=colour, alpha=0.15, lw=0)
    return style.Label(text, etas, means, colour, bold=True)


def _mismatch(cells: Sequence[Cell], methods: Sequence[str]) -> str:
    """State the nearest point of each method and its distance, for the smallest local step."""
    least = min(cell["eta"] for cell in cells)
    parts = []
    for method in methods:
        selected = where(cells, method=method, eta=least)
        shares = {
            text: 100 * mean(c[key] / c["apart"] for c in selected)
            for key, text in _DISTANCES.items()
        }
        nearest = min(shares, key=lambda text: shares[text])
        point = nearest.removeprefix("to ")
        parts.append(f"{shares[nearest]:.1f} % away from {point} with {_label(method)}")
    return f"With a local step of {least:g}, runs end {' and '.join(parts)}"


def _label(method: str) -> str:
    return {"simfbo": "SimFBO", "shrofbo": "ShroFBO", "mimefbo": "MimeFBO"}[method]


def where(cells: Sequence[Cell], **values: Any) -> list[Cell]:
    """Return the cells with these values."""
    return [cell for cell in cells if cell.items() >= values.items()]


def _spread(values: Sequence[float], form: str = "{:.3g}") -> str:
    """Return mean and standard deviation."""
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(mean(values)) + spread
