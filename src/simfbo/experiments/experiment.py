"""Experiments: parts, methods, seeds and the paper's figures, as configured.

This module does not import JAX.
"""

import difflib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from simfbo.config.files import merged, read
from simfbo.config.run import RunConfig, checked
from simfbo.errors import UserError, plain
from simfbo.runs.files import Json
from simfbo.studies.comparison import checked_seeds

NAMES = (
    "mnist-iid",
    "mnist-noniid",
    "cifar-iid",
    "heterogeneous",
    "running-time",
    "speedup",
    "objective-mismatch",
    "bytes",
    "sampled-clients",
)
_PRESENTATION = ("label", "short", "paper", "tuned")  # keys that are not settings of a run


class Method(NamedTuple):
    """One line of a figure.

    Attributes:
        label: its name in tables.
        config: its settings, except for the seed.
        paper: the test accuracy reported in the paper, if any.
        tuned: its step sizes are from `simfbo tune`.
        short: its name at the end of its line.
    """

    label: str
    config: RunConfig
    paper: float | None
    tuned: bool
    short: str


class Part(NamedTuple):
    """Methods that share a task, and the rest of their configuration."""

    name: str
    title: str
    methods: dict[str, Method]
    seeds: list[int]
    tree: Json


@dataclass(frozen=True)
class Experiment:
    """The runs of `simfbo reproduce NAME`.

    Attributes:
        name: of its folder.
        title: in a few words.
        claims: the tested claims, of the paper unless they are ours, each with our verdict.
        minutes: the time on two cores.
        tree: the rest of its configuration.
    """

    name: str
    title: str
    claims: list[tuple[str, str]]
    minutes: float
    tree: Json

    @cached_property
    def parts(self) -> list[Part]:
        """Its parts, except those with `skip`; a single one by default."""
        tree = dict(self.tree)
        tables = tree.pop("parts", {"": {}}) if "methods" in tree else {}
        return [
            _part(name, merged(tree, table))
            for name, table in tables.items()
            if not table.get("skip")
        ]


def chosen(name: str) -> list[str]:
    """Return the experiments with this name: one, or all of them."""
    if name == "all":
        return list(NAMES)
    if name not in NAMES:
        close = difflib.get_close_matches(name, [*NAMES, "all"], n=1)
        hint = f"Did you mean '{close[0]}'?" if close else "simfbo reproduce --list lists them."
        raise UserError(f"Unknown experiment '{plain(name)}'. {hint}")
    return [name]


def load(name: str, quick: bool = False) -> Experiment:
    """Read the configuration of an experiment, or of its short form."""
    tree = read(file(name))
    short = tree.pop("quick")
    tree = merged(tree, short) if quick else tree
    head = {key: tree.pop(key) for key in ("title", "minutes")}
    claims = [(claim, verdict) for claim, verdict in tree.pop("claims")]
    return Experiment(name, **head, claims=claims, tree=tree)


def file(name: str) -> Path:
    """Return the path of an experiment's configuration, in the wheel or in benchmarks/."""
    packaged = Path(__file__).parent / f"{name}.toml"
    clone = Path(__file__).parents[3] / "benchmarks" / name / "experiment.toml"
    return packaged if packaged.exists() else clone


def _part(name: str, tree: Json) -> Part:
    """Build one part; `only` selects methods, `share` shortens the runs."""
    base = {key: tree[key] for key in ("task", "every", "sampling", "local_work") if key in tree}
    methods = {
        key: _method(merged(base, settings), tree.get("share", 1.0))
        for key, settings in tree["methods"].items()
        if key in tree.get("only", tree["methods"])
    }
    return Part(name, tree.get("about", ""), methods, checked_seeds(tree["seeds"]), tree)


def _method(tree: Json, share: float) -> Method:
    """Build a method; the short form has fewer iterations and more frequent evaluations."""
    presentation = {key: tree.pop(key) for key in _PRESENTATION if key in tree}
    if share < 1:
        rounds = max(1, round(share * tree["rounds"]))
        tree |= {"rounds": rounds, "every": max(1, min(tree["every"], rounds // 6))}
    label = presentation["label"]
    return Method(
        label,
        checked(tree, {}),
        presentation.get("paper"),
        presentation.get("tuned", False),
        presentation.get("short", label),
    )
