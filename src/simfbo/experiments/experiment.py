"""Experiments: parts, methods, seeds and the paper's figures, as configured.

Light on purpose: nothing here imports JAX.
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
_OWN = ("label", "short", "paper", "tuned")  # keys of a method that are not settings of a run


class Method(NamedTuple):
    """One line of a figure.

    Attributes:
        label: what it is called.
        config: its settings, but for the seed.
        paper: the test accuracy that the paper reports for it; None if it does not.
        tuned: whether its step sizes are `simfbo tune`'s.
        short: what it is called at its line's end.
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
    """What `simfbo reproduce NAME` runs.

    Attributes:
        name: of its folder.
        title: in a few words.
        claims: what it tests, claims of the paper unless they are ours, each with our verdict.
        minutes: what it took on two cores.
        tree: the rest of its configuration.
    """

    name: str
    title: str
    claims: list[tuple[str, str]]
    minutes: float
    tree: Json

    @cached_property
    def parts(self) -> list[Part]:
        """Return its parts, or all in one; `skip` leaves one out. None if it has no methods."""
        tree = dict(self.tree)
        several = tree.pop("parts", {"": {}}) if "methods" in tree else {}
        return [
            _part(name, merged(tree, own)) for name, own in several.items() if not own.get("skip")
        ]


def chosen(name: str) -> list[str]:
    """Return the experiments of a name: one, or all of them."""
    if name == "all":
        return list(NAMES)
    if name not in NAMES:
        close = difflib.get_close_matches(name, [*NAMES, "all"], n=1)
        hint = f"Did you mean '{close[0]}'?" if close else "simfbo reproduce --list lists them."
        raise UserError(f"Unknown experiment '{plain(name)}'. {hint}")
    return [name]


def load(name: str, quick: bool = False) -> Experiment:
    """Return an experiment, or its short form."""
    tree = read(file(name))
    short = tree.pop("quick")
    tree = merged(tree, short) if quick else tree
    head = {key: tree.pop(key) for key in ("title", "minutes")}
    claims = [(claim, verdict) for claim, verdict in tree.pop("claims")]
    return Experiment(name, **head, claims=claims, tree=tree)


def file(name: str) -> Path:
    """Return where an experiment's configuration is: in the wheel, or in a clone's benchmarks/."""
    packaged = Path(__file__).parent / f"{name}.toml"
    clone = Path(__file__).parents[3] / "benchmarks" / name / "experiment.toml"
    return packaged if packaged.exists() else clone


def _part(name: str, tree: Json) -> Part:
    """Return one part; `only` leaves methods out, `share` shortens the runs."""
    base = {key: tree[key] for key in ("task", "every", "sampling", "local_work") if key in tree}
    methods = {
        key: _method(merged(base, own), tree.get("share", 1.0))
        for key, own in tree["methods"].items()
        if key in tree.get("only", tree["methods"])
    }
    return Part(name, tree.get("about", ""), methods, checked_seeds(tree["seeds"]), tree)


def _method(tree: Json, share: float) -> Method:
    """Return a method; the short form takes a share of its iterations and evaluates more often."""
    own = {key: tree.pop(key) for key in _OWN if key in tree}
    if share < 1:
        rounds = max(1, round(share * tree["rounds"]))
        tree |= {"rounds": rounds, "every": max(1, min(tree["every"], rounds // 6))}
    label = own["label"]
    return Method(
        label, checked(tree, {}), own.get("paper"), own.get("tuned", False), own.get("short", label)
    )
