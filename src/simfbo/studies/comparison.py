"""Comparisons: several methods, several seeds each, on one task.

Runs of one seed share data, partition and initial point, whatever the method: all three are drawn
from the task's settings and the seed alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simfbo.config.catalogue import METHODS
from simfbo.config.files import merged
from simfbo.config.messages import dotted
from simfbo.config.run import RunConfig, checked, copied
from simfbo.errors import UserError, brief, plain
from simfbo.runs.files import Json, folder_names
from simfbo.studies.sweep import Job

if TYPE_CHECKING:
    from simfbo.tasks import Task

MOST_SEEDS = 10_000
_COUNTED = 50  # iterations over which a cost is counted where it is drawn
_COMMON = ("task", "seed", "engine", "track")  # what a method may not set for itself


class Cost(NamedTuple):
    """What an iteration sends, over all clients.

    Attributes:
        exchanges: communication rounds.
        bytes: both ways; those of entropy codes are of normally distributed messages.
    """

    exchanges: float
    bytes: float


def plan(tree: Json, overrides: Json, names: Sequence[str] | None = None) -> dict[str, RunConfig]:
    """Return the settings of each method of a comparison, by name.

    Args:
        tree: the TOML file as dictionaries: settings of all, and a table `methods.NAME` for each
            method with those of its own.
        overrides: values by dotted key that override both.
        names: which methods; all of the file by default. Without a file, names of algorithms.

    Returns:
        A configuration per method, alike in task and seed.
    """
    shared = copied(tree)
    methods = shared.pop("methods", None)
    if methods is None:
        # package.module:name names a folder too, so without the colon.
        methods = {
            name.replace(":", "-"): {"algorithm": {"name": name}} for name in _registered(names)
        }
        names = list(methods)
    if not isinstance(methods, dict) or not methods:
        raise UserError("'methods' must hold a table per method, for example [methods.fednest].")
    unknown = [name for name in names or () if name not in methods]
    if unknown:
        known = plain(", ".join(methods), 150)
        raise UserError(f"Unknown method '{plain(unknown[0])}'. The file has {known}.")
    found = {
        name: _method(name, shared, methods[name], overrides)
        for name in folder_names(names or methods)
    }
    first, *others = found
    for name in others:
        if found[name].task != found[first].task:
            raise UserError(
                f"'{first}' and '{name}' differ in the task: methods are compared on the same one."
            )
    return found


def caveat(methods: Mapping[str, RunConfig]) -> str:
    """Name the methods that were written from their papers' abstracts; empty if there are none."""
    read = [
        name
        for name, config in methods.items()
        if METHODS.find(config.algorithm.name).from_abstract or config.steps == "tuning-free"
    ]
    return f"{', '.join(read)}: our reading of the abstract." if read else ""


def _registered(names: Sequence[str] | None) -> list[str]:
    """Return names as methods are registered with; all that need no personal lower level."""
    if names:
        return [METHODS.known(name) for name in names]
    return [method.name for method in METHODS.usable() if not method.private]


def checked_seeds(found: Any) -> list[int]:
    """Return the seeds of a comparison, after a check that they are seeds.

    Example:
        >>> checked_seeds(3), checked_seeds([0, 5, 7])
        ([0, 1, 2], [0, 5, 7])
    """
    if type(found) is int and 0 < found <= MOST_SEEDS:
        return list(range(found))
    seeds: list[Any] = found if isinstance(found, list) else []
    whole = all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    if not seeds or not whole or len(set(seeds)) < len(seeds):
        raise UserError(
            "'seeds' must be how many there are, such as 3 for 0, 1 and 2, or a list of different "
            f"whole numbers from 0 to 4294967295; got {brief(found)}."
        )
    return seeds


def _method(name: str, shared: Json, own: Any, overrides: Json) -> RunConfig:
    """Return the settings of one method."""
    field = dotted(["methods", name])
    if not isinstance(own, dict):
        raise UserError(f"'{field}' must be a table of settings, got {brief(own)}.")
    if set(own) & set(_COMMON):
        key = next(key for key in _COMMON if key in own)
        raise UserError(f"'{field}.{key}' cannot be set: all methods share the {key}.")
    if "algorithm" in shared:
        raise UserError("'algorithm' differs between methods: move it into a table [methods.NAME].")
    try:
        return checked(merged(shared, {"algorithm": {"name": name}} | own), overrides)
    except UserError as error:
        raise UserError(f"In method '{name}': {error}") from None


def without_rounds(tree: Json, overrides: Json, names: Iterable[str]) -> list[str]:
    """Return the methods of a plan that have no number of iterations of their own."""
    tables = tree.get("methods", {})
    shared = not {"rounds", "preset"}.isdisjoint(overrides)
    return [
        name for name in names if shared or {"rounds", "preset"}.isdisjoint(tables.get(name, {}))
    ]


def iteration_cost(config: RunConfig, task: "Task") -> Cost:
    """Count what an iteration of a method sends, over 50 where some send more than others."""
    from simfbo.config.build import build_algorithm, build_federation
    from simfbo.engines.debug import cost

    algorithm = build_algorithm(config.algorithm, task.problem, config.rounds)
    count = _COUNTED if "ledger is cost" in algorithm.known_violations else 1
    federation = build_federation(config, task.data)
    total = cost(algorithm, federation, task.x0, task.y0, count).total
    return Cost(total.rounds / count, (total.bytes_down + total.bytes_up) / count)


def equal(methods: Mapping[str, RunConfig], costs: Mapping[str, float]) -> dict[str, RunConfig]:
    """Return methods with as many iterations as cost the same.

    Args:
        methods: the plan; all with the same number of iterations.
        costs: of an iteration of each. Together they may cost what they do of the cheapest method.

    Returns:
        The plan with new numbers of iterations, and evaluations at the same costs.
    """
    least = min(costs.values())
    return {name: _shortened(config, least / costs[name]) for name, config in methods.items()}


def _shortened(config: RunConfig, share: float) -> RunConfig:
    """Return the settings with a share of the iterations, and of those between evaluations."""
    every = config.every and max(1, round(share * config.every))
    return config.model_copy(update={"rounds": max(1, int(share * config.rounds)), "every": every})


def jobs(methods: Mapping[str, RunConfig], seeds: Sequence[int], directory: Path) -> list[Job]:
    """Return the runs of a comparison, all methods of a seed together."""
    return [
        Job(config.model_copy(update={"seed": seed}), directory / f"{name}-seed{seed}")
        for seed in checked_seeds(list(seeds))
        for name, config in zip(folder_names(methods), methods.values(), strict=True)
    ]
