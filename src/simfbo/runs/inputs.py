"""The inputs of a run, which must be the same when it is resumed."""

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from simfbo.core.method import Method
from simfbo.errors import UserError
from simfbo.runs.describe import describe
from simfbo.runs.files import Json

_SHOWN = 3  # differences in a message


def inputs_of(algorithm: Method, federation: Any) -> Json:
    """Return a digest of the data, and the numbers in the algorithm and in the federation.

    Unknown entries are None or empty, and are not compared.
    """
    settings = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return {
        "data": getattr(federation, "data_digest", None),
        "algorithm": {"class": type(algorithm).__name__, **describe(settings)},
        "federation": describe(getattr(federation, "settings", {})),
    }


def require_same(wanted: Json, found: Json, directory: Path | None) -> None:
    """Raise unless both headers describe the same run; warn if versions differ.

    Descriptions of inputs may differ between versions: then a difference is a warning too.

    Args:
        wanted: the header of the resumed run.
        found: the stored header.
        directory: the folder where it is stored.
    """
    for key in ("algorithm", "rounds", "every", "seed", "config", "client_metrics"):
        if wanted.get(key) != found.get(key):
            raise UserError(
                f"The run was started with different settings ({key}): resume it with the same "
                "ones, or choose another folder."
            )
    stored = found.get("versions") or {}
    changed = [name for name, v in wanted["versions"].items() if stored.get(name) != v]
    if changed:
        warnings.warn(
            f"The run was started with another version of {', '.join(changed)}: from here on, "
            "results may differ in the last digits.",
            stacklevel=2,
        )
    if difference := _difference(wanted.get("inputs") or {}, found.get("inputs") or {}):
        text = f"The run in {directory} was started with other {difference}"
        if {*changed} <= {"threads"}:
            raise UserError(f"{text}: resume it with the same, or choose another folder.")
        warnings.warn(f"{text}, or its version describes them otherwise.", stacklevel=2)


def _difference(wanted: Json, found: Json) -> str | None:
    """Describe the first difference between known inputs; None if there is none."""
    if wanted.get("data") and found.get("data") and wanted["data"] != found["data"]:
        return "data"
    for key in ("algorithm", "federation"):
        now, then = wanted.get(key), found.get(key)
        if now and then and (names := [n for n in {**then, **now} if _differ(n, then, now)]):
            shown = ", ".join(_change(name, then, now) for name in names[:_SHOWN])
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            return f"settings of the {key} ({shown}{more})"
    return None


def _differ(name: str, then: Json, now: Json) -> bool:
    return name not in then or name not in now or then[name] != now[name]


def _change(name: str, then: Json, now: Json) -> str:
    """Format the old and the new value of a setting.

    Example:
        >>> _change("local.y", {"local.y": 0.1}, {"local.y": 0.2})
        'local.y 0.1, now 0.2'
    """
    old, new = (
        str(settings[name])[:20] if name in settings else "nothing" for settings in (then, now)
    )
    return f"{name} {old}, now {new}"
