"""Rejected and anomalous replies as lines of the history."""

from typing import Any

from simfbo.runs.files import Json


def taken_refusals(federation: Any, t: int) -> list[Json]:
    """Remove the refusals of iteration t from the federation; return them as history lines."""
    refusals = getattr(federation, "refusals", [])
    lines = [{"round": t, **r._asdict(), "reason": r.reason.value} for r in refusals]
    refusals.clear()
    return lines


def taken_suspicions(federation: Any, t: int) -> list[Json]:
    """Remove the suspicions of iteration t from the federation; return them as history lines."""
    suspicions = getattr(federation, "suspicions", [])
    lines = [{"round": t, **s._asdict(), "about": s.kind} for s in suspicions]
    suspicions.clear()
    return [{key: line[key] for key in line if key != "kind"} for line in lines]
