"""Comparisons: several methods, several seeds each, on one task.

Runs of one seed share data, partition and initial point for all methods: they depend on the task's
settings and the seed only.
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
_COUNTED = 50  # iterations over which a random cost is averaged
_COMMON = ("task", "seed", "engine", "track")  # common to all methods


class Cost(NamedTuple):
    """The communication of an iteration, over all clients.

    Attributes:
        exchanges: communication rounds.
        bytes: both ways; with entropy coding, of normally distributed messages.
    """

    exchanges: float
    bytes: float


def plan(tree: Json, overrides: Json, names: Sequence[str] | None = None) -> dict[str, RunConfig]:
    """Build the configuration of each method of a comparison, by name.

    Args:
        tree: the TOML file as dictionaries: common settings, and a table `methods.NAME` with the
            settings of each method.
        overrides: values by dotted key that override both.
        names: the methods; all of the file by default. Without a file, names of algorithms.

    Returns:
        A configuration per method, with equal task and seed.
    """
    shared = copied(tree)
    methods = shared.pop("methods", None)
    if methods is None:
        if names:
            algorithms = [METHODS.known(name) for name in names]
        else:
            algorithms = [method.name for method in METHODS.usable() if not method.private]
        # Names become folders, which must not contain a colon.
        methods = {name.replace(":", "-"): {"algorithm": {"name": name}} for name in algorithms}
        names = list(methods)
    if not isinstance(methods, dict) or not methods:
        raise UserError("'methods' must hold a table per method, for example [methods.fednest].")
    unknown = [name for name in names or () if name not in methods]
    if unknown:
        available = plain(", ".join(methods), 150)
        raise UserError(f"Unknown method '{plain(unknown[0])}'. The file has {available}.")
    configs = {
        name: _method(name, shared, methods[name], overrides)
        for name in folder_names(names or methods)
    }
    first, *others = configs
    for name in others:
        if configs[name].task != configs[first].task:
            raise UserError(
                f"'{first}' and '{name}' differ in the task: methods are compared on the same one."
            )
    return configs


def caveat(methods: Mapping[str, RunConfig]) -> str:
    """Name the methods that were written from abstracts of papers; empty if there are none."""
    from_abstracts = [
        name
        for name, config in methods.items()
        if METHODS.find(config.algorithm.name).from_abstract or config.steps == "tuning-free"
    ]
    return f"{', '.join(from_abstracts)}: our reading of the abstract." if from_abstracts else ""


def checked_seeds(value: Any) -> list[int]:
    """Return the seeds of a comparison; raise if they are invalid.

    Example:
        >>> checked_seeds(3), checked_seeds([0, 5, 7])
        ([0, 1, 2], [0, 5, 7])
    """
    if type(value) is int and 0 < value <= MOST_SEEDS:
        return list(range(value))
    seeds: list[Any] = value if isinstance(value, list) else []
    valid = all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    if not seeds or not valid or len(set(seeds)) < len(seeds):
        raise UserError(
            "'seeds' must be how many there are, such as 3 for 0, 1 and 2, or a list of different "
            f"whole numbers from 0 to 4294967295; got {brief(value)}."
        )
    return seeds


def _method(name: str, shared: Json, own: Any, overrides: Json) -> RunConfig:
    """Build the configuration of one method."""
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
    """Return the methods of a plan without a number of iterations of their own."""
    tables = tree.get("methods", {})
    shared = not {"rounds", "preset"}.isdisjoint(overrides)
    return [
        name for name in names if shared or {"rounds", "preset"}.isdisjoint(tables.get(name, {}))
    ]


def iteration_cost(config: RunConfig, task: "Task") -> Cost:
    """Count the communication of an iteration, averaged over 50 if it is random."""
    from simfbo.config.build import build_algorithm, build_federation
    from simfbo.engines.debug import cost

    algorithm = build_algorithm(config.algorithm, task.problem, config.rounds)
    count = _COUNTED if "ledger is cost" in algorithm.known_violations else 1
    federation = build_federation(config, task.data)
    total = cost(algorithm, federation, task.x0, task.y0, count).total
    return Cost(total.rounds / count, (total.bytes_down + total.bytes_up) / count)


def equal(methods: Mapping[str, RunConfig], costs: Mapping[str, float]) -> dict[str, RunConfig]:
    """Set the numbers of iterations such that all methods have the same cost.

    Args:
        methods: the plan; all with the same number of iterations.
        costs: of an iteration of each method. The cheapest one keeps its iterations.

    Returns:
        The plan with new numbers of iterations, and evaluations at the same costs.
    """
    scaled = {}
    for name, config in methods.items():
        share = min(costs.values()) / costs[name]
        every = config.every and max(1, round(share * config.every))
        update = {"rounds": max(1, int(share * config.rounds)), "every": every}
        scaled[name] = config.model_copy(update=update)
    return scaled


def jobs(methods: Mapping[str, RunConfig], seeds: Sequence[int], directory: Path) -> list[Job]:
    """Return the runs of a comparison, grouped by seed."""
    return [
        Job(config.model_copy(update={"seed": seed}), directory / f"{name}-seed{seed}")
        for seed in checked_seeds(list(seeds))
        for name, config in zip(folder_names(methods), methods.values(), strict=True)
    ]
