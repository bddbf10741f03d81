"""Tables and figures of an experiment's runs, next to the paper's figures."""

from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from simfbo.experiments import findings
from simfbo.experiments.experiment import Part
from simfbo.experiments.results import Groups
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.studies import figures
from simfbo.studies.tables import COSTS, column, firsts, lost, mean_cost, to_target

METRIC = findings.METRIC


def accuracy(part: Part, groups: Groups, tree: Json) -> list[dict[str, str]]:
    """Build the table of a part, a row per method, means over seeds.

    Accuracies are per cent ± standard deviation; costs to a target are for the first evaluation
    at or above it, if all seeds reached it.
    """
    rows = []
    for name, method in part.methods.items():
        histories, costs = groups[name], tree["costs"]
        last = [history.records[-1] for history in histories]
        row = {
            "method": method.label,
            "exchanges an iteration": exchanges_an_iteration(last),
            "test accuracy, %": ended(histories, METRIC),
            "the paper's": "" if method.paper is None else f"{100 * method.paper:.4g}",
            "train accuracy, %": ended(histories, "train_accuracy"),
            "iterations": f"{mean(r['round'] for r in last):,.0f}",
        }
        row |= {column(cost): mean_cost(last, cost) for cost in costs}
        for target in tree["targets"]:
            title = f"to {100 * target:g} %: {' / '.join(map(column, costs))}"
            row[title] = to_target(histories, METRIC, target, costs)
        rows.append(row)
    return rows


def ended(histories: Sequence[History], metric: str) -> str:
    """Format the mean accuracy at the end, or the number of lost runs."""
    return lost(histories) or per_cent([history.records[-1][metric] for history in histories])


def exchanges_an_iteration(last: Sequence[Json]) -> str:
    """Return the exchanges per iteration, from the runs' last records."""
    iterations = sum(record["round"] for record in last)
    rounds = sum(record["communication_rounds"] for record in last)
    return f"{rounds / iterations:.3g}" if iterations else "–"  # noqa: RUF001


def per_cent(shares: Sequence[float]) -> str:
    """Format mean and standard deviation in per cent.

    Example:
        >>> per_cent([0.974, 0.976])
        '97.50 ± 0.14'
    """
    spread = f" ± {100 * stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):.2f}{spread}"


def differences(part: Part, groups: Groups, pairs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Compare two methods at their end, seed by seed, with confidence intervals.

    Both runs of a seed share data, partition, start and local work, so differences are paired: the
    interval is Student's, p that of the paired t test and of Wilcoxon's signed ranks. A pair with
    a lost run is skipped.
    """
    return [
        {
            "difference at the end": f"{part.methods[a].label} minus {part.methods[b].label}",
            "of": name,
            **_paired(scale * (_finals(groups[a], metric) - _finals(groups[b], metric))),
        }
        for a, b in pairs
        for name, metric, scale in _COMPARED
        if a in groups and b in groups  # not every part has every method
        if not lost(groups[a]) and not lost(groups[b])
    ]


_COMPARED = (("test accuracy, points", METRIC, 100), ("test loss", "test_loss", 1))


def _paired(gaps: np.ndarray) -> dict[str, str]:
    """Format paired differences; without tests if all are equal."""
    row = {"mean": f"{gaps.mean():+.3f}", "seeds": str(len(gaps))}
    if np.ptp(gaps) == 0:
        return row | dict.fromkeys(("95 % interval", "p (t)", "p (signed ranks)"), "")
    low, high = interval(gaps)
    return row | {
        "95 % interval": f"{low:+.3f} to {high:+.3f}",
        "p (t)": f"{stats.ttest_1samp(gaps, 0)[1]:.2g}",
        "p (signed ranks)": f"{stats.wilcoxon(gaps)[1]:.2g}",
    }


def _finals(histories: Sequence[History], metric: str) -> np.ndarray:
    return np.array([history.records[-1][metric] for history in histories])


def ratios(part: Part, groups: Groups, reference: str) -> list[dict[str, str]]:
    """Compare the costs of reaching a method's final accuracy.

    The accuracy is the reference's mean over seeds at its end; its cost is that of its whole run.
    A method is skipped if one of its seeds did not reach it.
    """
    if lost(groups[reference]):
        return []
    target = mean(_finals(groups[reference], METRIC))
    final = [history.records[-1] for history in groups[reference]]
    rows = []
    for name, method in part.methods.items():
        records = firsts(groups[name], METRIC, target)
        firsts_reached = [record for record in records if record and record["round"]]
        if name == reference or len(firsts_reached) < len(groups[name]):
            continue
        row = {"method": method.label}
        for cost in ("rounds", "MB", "CPU s"):
            ratio = sum(map(COSTS[cost], final)) / sum(map(COSTS[cost], firsts_reached))
            name = column(cost)
            row |= {name: mean_cost(firsts_reached, cost), f"times fewer {name}": f"{ratio:.2g}"}
        rows.append(row)
    return rows


def interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return Student's confidence interval of a mean."""
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean() - half), float(values.mean() + half)


def draw(part: Part, groups: Groups, tree: Json) -> Figure:
    """Draw the test accuracy of a part against its costs, with the finding as title.

    A colour per algorithm, a line style per setting of it; dotted horizontally, the paper's
    figures. If one algorithm is compared with itself (`colours = "each"`), a colour per line.
    Methods that are not in `highlight` are grey.
    """
    main = tree.get("highlight", part.methods)
    methods = dict(sorted(part.methods.items(), key=lambda item: item[0] not in main))
    if tree.get("colours") == "each":
        plain = figures.looks_of_lines([method.short for method in methods.values()])
    else:
        plain = figures.looks_of({m.short: m.config.algorithm.name for m in methods.values()})
    looks = {
        method.short: plain[method.short]._replace(mark=method.paper, main=name in main)
        for name, method in methods.items()
    }
    dotted = "Dotted: the paper's figures." if any(m.paper for m in methods.values()) else ""
    return figures.draw(
        {method.short: groups[name] for name, method in methods.items()},
        METRIC,
        along=tree["costs"],
        looks=looks,
        limits=tuple(tree["limits"]),
        finding=findings.finding(groups, tree),
        about=f"{part.title} {dotted}".strip(),
    )
