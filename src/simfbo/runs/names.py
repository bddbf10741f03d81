"""Labels of runs that are shown together: the algorithm and the settings that differ."""

import json
import zlib
from collections.abc import Hashable, Sequence

from simfbo.errors import plain
from simfbo.runs.files import Json
from simfbo.runs.lines import flattened

# Entries that depend on other settings, on the machine or on the presentation.
_DERIVED = ("versions.", "about.", "client_metrics.", "samples.", "private", "inputs.")
_SEEDS = ("seed", "config.seed")
_OWNERS = ("config.algorithm", "config.task")  # their settings are specific to their `name`
_LENGTHS = ("rounds", "every")  # only in labels that would be equal without them
_MAX_SETTINGS = 4  # in a label


def settings(header: Json) -> Json:
    """Return the settings in a history's header by their dotted keys, without repetitions.

    Example:
        >>> settings({"seed": 0, "config": {"seed": 0, "task": {"name": "fair"}}, "versions": {}})
        {'seed': 0, 'config.task.name': 'fair'}
    """
    # Without a configuration, runs differ in the numbers of their inputs.
    derived = _DERIVED if header.get("config") else (*_DERIVED[:-1], "inputs.data")
    flat = {key: value for key, value in flattened(header) if not key.startswith(derived)}
    repeated = {f"config.{key}" for key in flat if flat[key] == flat.get(f"config.{key}")}
    return {key: flat[key] for key in flat if key not in repeated}


def differences(headers: Sequence[Json]) -> list[str]:
    """Return the keys of the settings that differ between runs."""
    runs = [settings(header) for header in headers]
    return [key for key in _keys(runs) if len({repr(run.get(key)) for run in runs}) > 1]


def labels(headers: Sequence[Json]) -> list[str]:
    """Return a label for each run: the algorithm and the settings that differ, the seed last.

    The settings of an algorithm or a task are compared between its own runs only.
    """
    runs = [settings(header) for header in headers]
    varying = {_in_words(key): key for key in _keys(runs) if _is_distinctive(key, runs)}
    seed = varying.pop("seed", None)
    brief = {name: key for name, key in varying.items() if name not in _LENGTHS}
    short, long = ([_label(run, keys, seed) for run in runs] for keys in (brief, varying))
    return long if len(set(long)) > len(set(short)) else short


def groups(headers: Sequence[Json]) -> list[str]:
    """Return an identifier for each run, equal for runs that differ in nothing but the seed."""
    digests = [_digest(settings(header)) for header in headers]
    seeds = [repr(header.get("seed")) for header in headers]
    pairs = list(zip(digests, seeds, strict=True))
    # Runs with the same settings and the same seed differ in something that headers do not have.
    mixed = {digest for digest, seed in pairs if pairs.count((digest, seed)) > 1}
    return [f"{digest}-{i}" if digest in mixed else digest for i, digest in enumerate(digests)]


def without_seed(label: str, header: Json) -> str:
    """Remove the seed from a run's label, which leaves the label of its group.

    Example:
        >>> without_seed("SimFBO, tau 3, seed 7", {"seed": 7})
        'SimFBO, tau 3'
    """
    return label.removesuffix(f", seed {header.get('seed')}")


def _label(run: Json, keys: dict[str, str], seed: str | None) -> str:
    """Format the label of a run from the settings at `keys`, by name."""
    words = [f"{name} {plain(str(run[key]), 30)}" for name, key in keys.items() if key in run]
    words = words[:_MAX_SETTINGS] + ["…"] * (len(words) > _MAX_SETTINGS)
    if seed is not None and seed in run:
        words.append(f"seed {run[seed]}")
    return ", ".join([str(run.get("algorithm", "unknown")), *words])


def _is_distinctive(key: str, runs: Sequence[Json]) -> bool:
    """Check if a setting differs between runs of the same algorithm or task."""
    if key in ("algorithm", "config.algorithm.name"):
        return False  # labels begin with it
    owner = next((name for name in _OWNERS if key.startswith(f"{name}.")), "")
    name_key = f"{owner}.name"
    values: dict[Hashable, set[str]] = {}
    for run in runs:
        name = None if key == name_key else str(run.get(name_key))
        values.setdefault(name, set()).add(repr(run.get(key)))
    return any(len(distinct) > 1 for distinct in values.values())


def _digest(run: Json) -> str:
    """Return a short digest of all settings except the seed."""
    without_seeds = {key: value for key, value in run.items() if key not in _SEEDS}
    return f"{zlib.crc32(json.dumps(without_seeds, sort_keys=True).encode()):08x}"


def _keys(runs: Sequence[Json]) -> list[str]:
    return list({key: None for run in runs for key in run})


def _in_words(key: str) -> str:
    """Return the last part of a dotted key in words; the name of a task is "task"."""
    return "task" if key == "config.task.name" else key.rsplit(".", 1)[-1].replace("_", " ")
