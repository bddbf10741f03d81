"""What runs are called where several are shown: the algorithm and the settings that differ."""

import json
import zlib
from collections.abc import Hashable, Sequence

from simfbo.errors import plain
from simfbo.runs.files import Json
from simfbo.runs.lines import flattened

# What follows from other settings, from the machine or from the presentation.
_DERIVED = ("versions.", "about.", "client_metrics.", "samples.", "private", "inputs.")
_SEEDS = ("seed", "config.seed")
_OWNERS = ("config.algorithm", "config.task")  # whose settings mean nothing to another one
_LENGTHS = ("rounds", "every")  # mentioned only where nothing else tells runs apart
_MOST = 4  # settings in a name


def settings(header: Json) -> Json:
    """Return the settings in a history's header, by their dotted keys, each of them once.

    Example:
        >>> settings({"seed": 0, "config": {"seed": 0, "task": {"name": "fair"}}, "versions": {}})
        {'seed': 0, 'config.task.name': 'fair'}
    """
    # Without a configuration, what tells runs apart are the numbers they were built with.
    derived = _DERIVED if header.get("config") else (*_DERIVED[:-1], "inputs.data")
    found = {key: value for key, value in flattened(header) if not key.startswith(derived)}
    repeated = {f"config.{key}" for key in found if found[key] == found.get(f"config.{key}")}
    return {key: found[key] for key in found if key not in repeated}


def differences(headers: Sequence[Json]) -> list[str]:
    """Return the keys of the settings that are not the same in all runs."""
    flat = [settings(header) for header in headers]
    return [key for key in _keys(flat) if len({repr(one.get(key)) for one in flat}) > 1]


def labels(headers: Sequence[Json]) -> list[str]:
    """Return a name for each run: the algorithm, and the settings that differ, the seed last.

    The settings of an algorithm or a task are compared between runs of that one only.
    """
    flat = [settings(header) for header in headers]
    varying = {_last(key): key for key in _keys(flat) if _tells_apart(key, flat)}
    seed = varying.pop("seed", None)
    brief = {name: key for name, key in varying.items() if name not in _LENGTHS}
    found = [[_label(one, some, seed) for one in flat] for some in (brief, varying)]
    return min(found, key=lambda names: -len(set(names)))  # the first, unless the second says more


def groups(headers: Sequence[Json]) -> list[str]:
    """Return a text for each run, the same for those that differ in nothing but the seed."""
    found = [_digest(settings(header)) for header in headers]
    seeds = [(one, repr(header.get("seed"))) for one, header in zip(found, headers, strict=True)]
    # Two runs of one seed are not a sample: what tells them apart is not in their headers.
    mixed = {one for one, seed in seeds if seeds.count((one, seed)) > 1}
    return [f"{one}-{i}" if one in mixed else one for i, one in enumerate(found)]


def without_seed(label: str, header: Json) -> str:
    """Return the name of the group that a run with some label belongs to.

    Example:
        >>> without_seed("SimFBO, tau 3, seed 7", {"seed": 7})
        'SimFBO, tau 3'
    """
    return label.removesuffix(f", seed {header.get('seed')}")


def _label(one: Json, varying: dict[str, str], seed: str | None) -> str:
    """Return the name of a run, given which of its settings to mention."""
    said = [f"{name} {plain(str(one[key]), 30)}" for name, key in varying.items() if key in one]
    said = said[:_MOST] + ["…"] * (len(said) > _MOST)
    if seed is not None and seed in one:
        said.append(f"seed {one[seed]}")
    return ", ".join([str(one.get("algorithm", "unknown")), *said])


def _tells_apart(key: str, flat: Sequence[Json]) -> bool:
    """Return whether a setting differs between runs that it can be compared between."""
    if key in ("algorithm", "config.algorithm.name"):
        return False  # names begin with it
    owner = next((name for name in _OWNERS if key.startswith(f"{name}.")), "")
    kind = f"{owner}.name"
    found: dict[Hashable, set[str]] = {}
    for one in flat:
        about = None if key == kind else str(one.get(kind))
        found.setdefault(about, set()).add(repr(one.get(key)))
    return any(len(values) > 1 for values in found.values())


def _digest(flat: Json) -> str:
    """Return a short text that depends on all settings but the seed."""
    kept = {key: value for key, value in flat.items() if key not in _SEEDS}
    return f"{zlib.crc32(json.dumps(kept, sort_keys=True).encode()):08x}"


def _keys(flat: Sequence[Json]) -> list[str]:
    return list({key: None for one in flat for key in one})


def _last(key: str) -> str:
    """Return the last part of a dotted key in words; a task's name is its own."""
    return "task" if key == "config.task.name" else key.rsplit(".", 1)[-1].replace("_", " ")
